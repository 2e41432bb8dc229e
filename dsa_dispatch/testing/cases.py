"""Calls derived from what a capability declares: the plainest, and those a step outside every boundary.

The boundaries are worked out here a second time, from the fields and not with ``Capability``'s own ``fit`` and
``runs`` alone, so that a rule that accepts what its declaration excludes is found.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsa_dispatch._call import CallSpec, DeviceInfo
from dsa_dispatch._capability import FLOATS, Capability, Heads
from dsa_dispatch._decline import DeclineCode
from dsa_dispatch._dispatch.check import INDEXED_STAGES, INDEXER_STAGES, declines, largest_operand
from dsa_dispatch._stages import BACKWARD_STAGES, OPERATION_OF, Stage
from dsa_dispatch.testing.extent import FULL, Extent
from dsa_dispatch.testing.sizes import (
    Sizes,
    admits,
    channel_pairs,
    head_counts,
    is_grouped,
    native_sizes,
    pads_width,
    plainest,
    preferred_dtype,
    widths,
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A call that must be accepted and, where ``runs``, gives the exact answer."""

    label: str
    call: CallSpec
    runs: bool = True


@dataclass(frozen=True, slots=True)
class Declined:
    """A call that must be declined with ``code``."""

    label: str
    call: CallSpec
    device: DeviceInfo
    code: DeclineCode


def base_call(capability: Capability, stage: Stage, device: str, extent: Extent = FULL) -> CallSpec:
    """The plainest call the stage declares."""
    return call_of(capability, stage, device, native_sizes(capability, stage, extent))


def sizes_served(capability: Capability, stage: Stage, device: DeviceInfo, extent: Extent) -> Sizes | None:
    """Sizes of a plain call that a rule, ``extra_check``, does not decline; None where none of those tried is."""
    native = native_sizes(capability, stage, extent)

    def served(sizes: Sizes) -> bool:
        return admits(capability, sizes) and not declines(
            capability, stage, call_of(capability, stage, device.type, sizes), device
        )

    return next(filter(served, _near(capability, stage, native)), None)


def _near(capability: Capability, stage: Stage, native: Sizes) -> Iterator[Sizes]:
    """The native sizes, then other declared ones, the small ones first."""
    yield native
    if capability.extra_check is None:
        return
    counts = head_counts(capability.heads, native.kv_heads)
    heads = dict.fromkeys((native.heads, *counts[:4], *(count for count in (16, 64, 128) if count in counts)))
    possible = widths(capability.width)
    wide = dict.fromkeys(
        (native.width, *possible[:2], *(width for width in (16, 64, 128, 512, 2048) if width in possible))
    )
    pairs = channel_pairs(capability.channels, stage in INDEXER_STAGES)
    if capability.channels.pairs is None:
        pairs += [(64, 64), (128, 128), (512, 512), (576, 512)]
    rows = dict.fromkeys((native.rows, 1, 2, 4, 8, 16, 64))
    for (qk, v), width, count, some in itertools.product(pairs, wide, heads, rows):
        for keys in dict.fromkeys((width + 5, width, -(-(width + 5) // 64) * 64)):
            yield dataclasses.replace(native, heads=count, qk=qk, v=v, width=width, rows=some, keys=keys)


def call_of(capability: Capability, stage: Stage, device: str, sizes: Sizes) -> CallSpec:
    """A call of these sizes, as plain as the stage declares in everything else."""
    bounds = "ranges" if "ranges" in capability.bounds or stage in INDEXED_STAGES else "causal"
    call = CallSpec(
        operation=OPERATION_OF[stage],
        device=device,
        dtype=preferred_dtype(capability),
        batch=sizes.batch,
        rows=sizes.rows,
        keys=sizes.keys,
        width=sizes.width,
        index_heads=2,
        index_channels=32,
        heads=2,
        qk_channels=32,
        v_channels=16,
        weights_dtype=_weights_dtype(capability, stage),
        use_relu=True in capability.relu,
        sparse_loss="sparse" in capability.losses,
        bounds=bounds,  # type: ignore[arg-type]  # one of the two literals
        layout="bshd" if "bshd" in capability.layouts else "thd",
        context_parallel=plainest(capability.context_parallel),
        needs_grad=_all_inputs(stage) if stage in BACKWARD_STAGES else frozenset(),
    )
    call = with_channels(with_heads(call, stage, sizes.heads), stage, sizes.qk, sizes.v)
    return call if stage in INDEXER_STAGES else dataclasses.replace(call, kv_heads=sizes.kv_heads)


def with_heads(call: CallSpec, stage: Stage, count: int) -> CallSpec:
    """The call with so many heads of the kind that the stage looks at."""
    if stage in INDEXER_STAGES:
        return dataclasses.replace(call, index_heads=count)
    return dataclasses.replace(call, heads=count)


def with_channels(call: CallSpec, stage: Stage, qk: int, v: int) -> CallSpec:
    """The call with these channels; an indexer and the teacher look at the first number alone."""
    if stage in INDEXER_STAGES:
        return dataclasses.replace(call, index_channels=qk)
    if stage == "indexer_target":
        return dataclasses.replace(call, qk_channels=qk)
    return dataclasses.replace(call, qk_channels=qk, v_channels=v)


def _weights_dtype(capability: Capability, stage: Stage) -> str:
    if stage not in INDEXER_STAGES or "float32" in capability.weights_dtypes:
        return "float32"
    return sorted(capability.weights_dtypes)[0]


def _all_inputs(stage: Stage) -> frozenset[str]:
    return frozenset({"query", "key", "value"} if is_grouped(stage) else {"query", "key"})


def declined_calls(capability: Capability, stage: Stage, device: DeviceInfo) -> Iterator[Declined]:
    """One call a step outside every boundary, each different from the base in that value alone."""
    base = base_call(capability, stage, device.type)
    code = DeclineCode

    def vary(label: str, why: DeclineCode, **changes: Any) -> Declined:
        return Declined(label, dataclasses.replace(base, **changes), device, why)

    yield from _declined_devices(capability, base, device)
    for dtype in sorted(FLOATS - capability.dtypes):
        yield vary(f"dtype {dtype}", code.DTYPE, dtype=dtype)
    may_pad = stage != "indexer_target" and not is_grouped(stage)
    for count in _heads_outside(capability.heads, may_pad):
        yield Declined(f"heads {count}", with_heads(base, stage, count), device, code.HEADS)
    if is_grouped(stage):
        for count in _heads_outside(capability.kv_heads, may_pad=False):
            yield vary(f"key heads {count}", code.HEADS, kv_heads=count)
    yield from _declined_channels(capability, stage, base, device)
    if base.sparse_loss or stage not in ("indexer_target", "indexer_loss"):
        for width in _widths_outside(capability, stage):
            yield vary(f"width {width}", code.INDEX_WIDTH, width=width)
    if stage in INDEXER_STAGES:
        for dtype in sorted(FLOATS - capability.weights_dtypes):
            yield vary(f"weights {dtype}", code.DTYPE, weights_dtype=dtype)
        for value in sorted({True, False} - capability.relu):
            yield vary(f"use_relu {value}", code.EXTRA_CHECK, use_relu=value)
    if stage in ("indexer_target", "indexer_loss"):
        for kind in sorted({"sparse", "dense"} - capability.losses):
            yield vary(f"{kind} loss", code.EXTRA_CHECK, sparse_loss=kind == "sparse")
    if stage not in INDEXED_STAGES:
        for layout in sorted({"bshd", "thd"} - capability.layouts):
            yield vary(f"layout {layout}", code.PACKED if layout == "thd" else code.LAYOUT, layout=layout)
        for bounds in sorted({"causal", "ranges"} - capability.bounds):
            yield vary(f"bounds {bounds}", code.LAYOUT, bounds=bounds)
        for kind in sorted({"none", "contiguous", "zigzag"} - capability.context_parallel):
            yield vary(f"context parallel {kind}", code.CONTEXT_PARALLEL, context_parallel=kind)
    for extra in ("explicit_values", "key_positions", "mask"):
        yield vary(f"extra {extra}", code.LAYOUT, extras=frozenset({extra}))
    yield from _declined_promises(capability, stage, base, device)
    yield from _declined_limits(capability, stage, base, device)


def _declined_devices(capability: Capability, base: CallSpec, device: DeviceInfo) -> Iterator[Declined]:
    if capability.devices is not None:
        other = next(name for name in ("cpu", "cuda", "xpu", "mps", "meta") if name not in capability.devices)
        yield Declined(
            f"device {other}",
            dataclasses.replace(base, device=other),
            DeviceInfo(type=other, name=other),
            DeclineCode.DEVICE,
        )
    ranges = capability.compute_capabilities or ()
    edges = {edge for low, high in ranges for edge in ((low[0], low[1] - 1), (low[0] - 1, 9), high)}
    for edge in sorted(edges):
        if min(edge) >= 0 and not any(low <= edge < high for low, high in ranges):
            yield Declined(
                f"compute capability {edge[0]}.{edge[1]}",
                dataclasses.replace(base, device="cuda"),
                dataclasses.replace(
                    device, type="cuda", name="a GPU", compute_capability=edge, shared_memory=1 << 20
                ),
                DeclineCode.COMPUTE_CAPABILITY,
            )


def _heads_outside(heads: Heads, may_pad: bool) -> list[int]:
    """Counts one step outside: below the least, between, and above the largest."""
    padded = heads.pad and may_pad
    if heads.values is not None:
        top = max(heads.values)
        near = {value + step for value in heads.values for step in (-1, 1)} - heads.values
        return sorted(count for count in near if count >= 1 and (not padded or count > top))
    outside = set()
    least = head_counts(heads)[0]
    if not padded:
        outside |= {heads.minimum - 1, *([least + 1] if heads.multiple_of > 1 else [])}
        if heads.power_of_two:
            outside.add(3 * least if least > 1 else 3)
    if heads.maximum is not None:
        outside.add(heads.maximum + 1)
    return sorted(count for count in outside if count >= 1)


def _declined_channels(
    capability: Capability, stage: Stage, base: CallSpec, device: DeviceInfo
) -> Iterator[Declined]:
    channels = capability.channels
    has_value = stage in INDEXED_STAGES
    outside: set[tuple[int, int]] = set()
    if channels.pairs is not None:
        widest = max(qk for qk, _ in channels.pairs)
        for qk, v in channels.pairs:
            near = [(qk + 1, v), *([] if channels.pad else [(qk - 1, v)])]
            outside |= {pair for pair in near if not channels.pad or pair[0] > widest}
            if has_value and v:
                outside |= {(qk, v - 1), (qk, v + 1)}
        outside -= set(channels.pairs)
    else:
        if channels.multiple_of > 1 and not channels.pad:
            outside.add((channels.multiple_of + 1, 1))
        if channels.maximum is not None:
            outside.add((channels.maximum + 1, 1))
    for qk, v in sorted(outside):
        if qk >= 1 and (not has_value or v >= 1):
            label = f"channels {qk}/{v}" if has_value else f"channels {qk}"
            yield Declined(label, with_channels(base, stage, qk, v), device, DeclineCode.CHANNELS)


def _widths_outside(capability: Capability, stage: Stage) -> list[int]:
    width = capability.width
    outside = set()
    if not pads_width(capability, stage):
        if width.multiple_of > 1:
            outside |= {width.multiple_of - 1, width.multiple_of + 1}
        if width.power_of_two:
            outside.add(3 * width.multiple_of)
    if width.maximum is not None:
        outside.add(width.maximum + 1)
    return sorted(outside)


def _declined_promises(
    capability: Capability, stage: Stage, base: CallSpec, device: DeviceInfo
) -> Iterator[Declined]:
    deterministic = dataclasses.replace(base, deterministic=True)
    if not capability.deterministic:
        yield Declined("deterministic", deterministic, device, DeclineCode.DETERMINISM)
    if stage == "indexer_topk" and capability.tie_rule != "lower_index":
        yield Declined("deterministic ties", deterministic, device, DeclineCode.TIE_RULE)
    if not capability.capture_safe:
        capturing = dataclasses.replace(base, capturing=True)
        yield Declined("graph capture", capturing, device, DeclineCode.GRAPH_CAPTURE)
    if stage in BACKWARD_STAGES and not capability.partial_gradients:
        partial = dataclasses.replace(base, needs_grad=frozenset({"query"}))
        yield Declined("gradient of query alone", partial, device, DeclineCode.GRAD)


def _declined_limits(
    capability: Capability, stage: Stage, base: CallSpec, device: DeviceInfo
) -> Iterator[Declined]:
    for name, limit in (("rows", capability.max_rows), ("keys", capability.max_keys)):
        if limit is not None:
            call = dataclasses.replace(base, **{name: limit + 1})  # type: ignore[arg-type]  # an int field
            yield Declined(f"{name} {limit + 1}", call, device, DeclineCode.LIMIT)
    if capability.max_elements is not None:
        per_row = largest_operand(stage, dataclasses.replace(base, rows=1, keys=0))
        call = dataclasses.replace(base, rows=capability.max_elements // per_row + 1)
        yield Declined(f"elements above {capability.max_elements}", call, device, DeclineCode.LIMIT)
    if capability.shared_memory:
        ranges = capability.compute_capabilities
        small = DeviceInfo(
            type="cuda",
            name="a GPU",
            compute_capability=ranges[0][0] if ranges else None,
            shared_memory=capability.shared_memory - 1,
        )
        call = dataclasses.replace(base, device="cuda")
        yield Declined("shared memory", call, small, DeclineCode.LIMIT)
