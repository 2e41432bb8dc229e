"""Calls that must be accepted and answered: one for every declared value, and samples of every declared rule."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from dsa_dispatch._call import CallSpec
from dsa_dispatch._capability import Capability
from dsa_dispatch._dispatch.check import INDEXED_STAGES, INDEXER_STAGES, largest_operand
from dsa_dispatch._stages import BACKWARD_STAGES, Stage
from dsa_dispatch.testing.cases import (
    Accepted,
    call_of,
    with_channels,
    with_heads,
)
from dsa_dispatch.testing.extent import FULL, Extent
from dsa_dispatch.testing.sizes import (
    Sizes,
    channel_pairs,
    head_counts,
    is_grouped,
    native_sizes,
    next_run,
    pads_width,
    several_items,
    widths,
)

T = TypeVar("T")


def accepted_calls(
    capability: Capability, stage: Stage, device: str, extent: Extent = FULL, sizes: Sizes | None = None
) -> Iterator[Accepted]:
    """One call for every declared value, each different from the base, of these ``sizes``, in that value alone."""
    sizes = sizes or native_sizes(capability, stage, extent)
    for case in _accepted(capability, stage, call_of(capability, stage, device, sizes), sizes, extent):
        if case.label == "base" or _within_limits(capability, stage, case.call):
            runs = case.runs and _can_be_asked(stage, case.call)
            yield dataclasses.replace(case, runs=runs and _elements(stage, case.call) <= extent.most_elements)


def _elements(stage: Stage, call: CallSpec) -> int:
    """Of the largest tensor that the formulas make for it."""
    if stage in INDEXER_STAGES:
        heads, channels = call.index_heads, call.index_channels
    else:
        heads, channels = call.heads, max(call.qk_channels, call.v_channels)
    every_key = stage == "indexer_topk" or (
        stage in ("indexer_target", "indexer_loss") and not call.sparse_loss
    )
    slots = call.batch * call.rows * (call.batch * call.keys if every_key else call.width)
    return max(
        call.batch * call.keys * call.kv_heads * channels,
        call.batch * call.rows * heads * channels,
        slots * max(heads, call.kv_heads * channels),
    )


def _within_limits(capability: Capability, stage: Stage, call: CallSpec) -> bool:
    """A limit of rows, keys or elements leaves no room for some values of the others."""
    return (
        (capability.max_rows is None or call.batch * call.rows <= capability.max_rows)
        and (capability.max_keys is None or call.batch * call.keys <= capability.max_keys)
        and (capability.max_elements is None or largest_operand(stage, call) <= capability.max_elements)
    )


def _can_be_asked(stage: Stage, call: CallSpec) -> bool:
    """Whether the public operations can ask for it: packed and context-parallel rows need ranges, and what they call
    context parallel is the zigzag layout."""
    if stage in INDEXED_STAGES:
        return True
    plain = call.layout == "bshd" and call.context_parallel == "none"
    return call.context_parallel != "contiguous" and (plain or call.bounds == "ranges")


def _accepted(
    capability: Capability, stage: Stage, base: CallSpec, sizes: Sizes, extent: Extent
) -> Iterator[Accepted]:
    def vary(label: str, runs: bool = True, **changes: Any) -> Accepted:
        return Accepted(label, dataclasses.replace(base, **changes), runs)

    yield Accepted("base", base)
    for dtype in sorted(capability.dtypes):
        yield vary(f"dtype {dtype}", dtype=dtype)
    if stage in INDEXER_STAGES:
        for dtype in sorted(capability.weights_dtypes):
            yield vary(f"weights {dtype}", weights_dtype=dtype)
        for value in sorted(capability.relu):
            yield vary(f"use_relu {value}", use_relu=value)
    yield from _accepted_heads(capability, stage, base, extent)
    yield from _accepted_channels(capability, stage, base, extent)
    yield from _accepted_widths(capability, stage, base, extent)
    if stage in ("indexer_target", "indexer_loss"):
        for kind in sorted(capability.losses):
            yield vary(f"{kind} loss", sparse_loss=kind == "sparse")
    if stage not in INDEXED_STAGES:
        for bounds in sorted(capability.bounds):
            if base.context_parallel == "none" and base.layout == "bshd":
                yield vary(f"bounds {bounds}", bounds=bounds)
        for layout in sorted(capability.layouts):
            yield vary(f"layout {layout}", layout=layout)
        for kind in sorted(capability.context_parallel):
            yield vary(f"context parallel {kind}", context_parallel=kind)
    else:
        yield vary("ids int64", index_dtype="int64")
    two = several_items(capability, sizes, sizes.rows)
    if two.batch == 2:
        yield vary("batch 2", batch=2, rows=two.rows, keys=two.keys)
    if capability.deterministic and (stage != "indexer_topk" or capability.tie_rule == "lower_index"):
        yield vary("deterministic", deterministic=True)
    if stage in BACKWARD_STAGES and capability.partial_gradients:
        for name in sorted(base.needs_grad):
            yield vary(f"gradient of {name} alone", needs_grad=frozenset({name}))
    for name, limit in (("rows", capability.max_rows), ("keys", capability.max_keys)):
        if limit is not None:
            yield vary(f"{name} {limit}", runs=limit <= extent.largest_count, **{name: limit})


def spread(values: Sequence[T], most: int | None) -> set[T]:
    """Up to ``most`` of the values, the first and the last among them."""
    if most is None or len(values) <= most:
        return set(values)
    return {values[number * (len(values) - 1) // max(most - 1, 1)] for number in range(most)}


def _accepted_heads(
    capability: Capability, stage: Stage, base: CallSpec, extent: Extent
) -> Iterator[Accepted]:
    heads = capability.heads
    counts = head_counts(heads, base.kv_heads if is_grouped(stage) else 1)
    if heads.values is not None:
        shown = counts
    else:
        beyond = [next_run(counts, count) for count in extent.heads] if _rule_free(capability) else []
        shown = sorted({*counts[:4], *counts[-1:], *(count for count in beyond if count is not None)})
    known_end = heads.values is not None or heads.maximum is not None
    run = spread([count for count in shown if count <= extent.largest_heads], extent.values)
    for count in shown:
        if count <= extent.largest_heads or known_end:
            yield Accepted(f"heads {count}", with_heads(base, stage, count), count in run)
    if heads.pad and stage != "indexer_target" and not is_grouped(stage):
        padded = _between(counts, extent.largest_heads)
        run = spread(padded, extent.values)
        for count in padded:
            yield Accepted(f"heads {count}, padded", with_heads(base, stage, count), count in run)
    if is_grouped(stage):
        for count in [value for value in head_counts(capability.kv_heads)[:4] if base.heads % value == 0]:
            yield Accepted(f"key heads {count}", dataclasses.replace(base, kv_heads=count))


def _rule_free(capability: Capability) -> bool:
    """Sizes that are only samples of a rule are no claims of their own: an ``extra_check`` may take them back."""
    return capability.extra_check is None


def _between(counts: Sequence[int], largest: int) -> list[int]:
    """Counts that do not run: one below the least that does, and one in each of the first gaps."""
    running = [count for count in counts if count <= largest][:4]
    found = [running[0] - 1] if running and running[0] > 1 else []
    found += [low + 1 for low, high in itertools.pairwise(running) if high > low + 1]
    return found


def _accepted_widths(
    capability: Capability, stage: Stage, base: CallSpec, extent: Extent
) -> Iterator[Accepted]:
    possible = widths(capability.width)
    beyond = [next_run(possible, width) for width in extent.widths] if _rule_free(capability) else []
    last = possible[-1:] if capability.width.maximum is not None else []
    shown = sorted({*possible[:3], *last, *(width for width in beyond if width is not None)})
    run = spread([width for width in shown if width <= extent.largest_width], extent.values)
    for width in shown:
        yield Accepted(f"width {width}", _with_width(capability, base, width), width in run)
    if pads_width(capability, stage):
        for width in _between(possible, extent.largest_width)[:2]:
            yield Accepted(f"width {width}, padded", _with_width(capability, base, width))


def _with_width(capability: Capability, base: CallSpec, width: int) -> CallSpec:
    """With keys for every slot where the limits have room for them."""
    keys = max(base.keys, width + 5)
    fits = capability.max_keys is None or keys <= capability.max_keys
    if capability.max_elements is not None or not fits:
        keys = base.keys
    return dataclasses.replace(base, width=width, keys=keys)


def _accepted_channels(
    capability: Capability, stage: Stage, base: CallSpec, extent: Extent
) -> Iterator[Accepted]:
    channels = capability.channels
    pairs = channel_pairs(channels, stage in INDEXER_STAGES)
    if channels.pairs is None:
        step = channels.multiple_of
        narrow = pairs[0][0]
        more = [narrow + step, *(-(-count // step) * step for count in extent.channels)]
        pairs += [(qk, qk) for qk in more if channels.maximum is None or qk <= channels.maximum]
        if is_grouped(stage):
            pairs.append((narrow, 2 * narrow + 3))
    run = spread([pair for pair in pairs if pair[0] <= extent.largest_channels], extent.values)
    for qk, v in dict.fromkeys(pairs):
        label = f"channels {qk}/{v}"
        yield Accepted(label, with_channels(base, stage, qk, v), (qk, v) in run)
    qk, v = pairs[0]
    if channels.pad and (channels.pairs is not None or channels.multiple_of > 1):
        narrower = qk - 1
        if narrower >= (v if stage in ("attention_forward", "attention_backward") else 1):
            call = with_channels(base, stage, narrower, v)
            yield Accepted(f"channels {narrower}/{v}, padded", call)
