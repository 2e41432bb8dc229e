"""Calls derived from what a capability declares: one for every declared value, one a step outside every boundary.

The boundaries are worked out here a second time, from the fields and not with ``Capability``'s own ``fit`` and
``runs`` alone, so that a rule that accepts what its declaration excludes is found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsa_dispatch._call import CallSpec, DeviceInfo
from dsa_dispatch._capability import FLOATS, Capability, Heads
from dsa_dispatch._decline import DeclineCode
from dsa_dispatch._dispatch.check import INDEXED_STAGES, INDEXER_STAGES
from dsa_dispatch._stages import BACKWARD_STAGES, Stage
from dsa_dispatch.testing.sizes import (
    channel_pairs,
    head_counts,
    is_grouped,
    native_sizes,
    pads_width,
    preferred_dtype,
    widths,
)

LARGEST_WIDTH = 4096
LARGEST_HEADS = 256
LARGEST_CHANNELS = 1024
"""Above these a declared value is judged but not run: it would make no small case."""


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


OPERATION_OF: dict[Stage, str] = {
    "indexer_topk": "run_fused_qk_topk",
    "indexer_target": "run_fused_qk_topk_with_loss",
    "indexer_loss": "run_fused_qk_topk_with_loss",
    "attention_forward": "run_fused_absorbed_sparse_attention",
    "attention_backward": "run_fused_absorbed_sparse_attention",
    "gqa_forward": "run_fused_gqa_sparse_attention",
    "gqa_backward": "run_fused_gqa_sparse_attention",
}


def base_call(capability: Capability, stage: Stage, device: str) -> CallSpec:
    """The plainest call the stage declares."""
    sizes = native_sizes(capability, stage)
    bounds = "ranges" if "ranges" in capability.bounds or stage in INDEXED_STAGES else "causal"
    call = CallSpec(
        operation=OPERATION_OF[stage],
        device=device,
        dtype=preferred_dtype(capability),
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
        context_parallel="none"
        if "none" in capability.context_parallel
        else sorted(capability.context_parallel)[0],
        needs_grad=_all_inputs(stage) if stage in BACKWARD_STAGES else frozenset(),
    )
    if stage in INDEXER_STAGES:
        return dataclasses.replace(call, index_heads=sizes.heads, index_channels=sizes.qk)
    return dataclasses.replace(
        call, heads=sizes.heads, kv_heads=sizes.kv_heads, qk_channels=sizes.qk, v_channels=sizes.v
    )


def _weights_dtype(capability: Capability, stage: Stage) -> str:
    if stage not in INDEXER_STAGES or "float32" in capability.weights_dtypes:
        return "float32"
    return sorted(capability.weights_dtypes)[0]


def _all_inputs(stage: Stage) -> frozenset[str]:
    return frozenset({"query", "key", "value"} if is_grouped(stage) else {"query", "key"})


def _fields(stage: Stage) -> tuple[str, str, str]:
    """The names of heads, channels and value channels in a call of this stage."""
    if stage in INDEXER_STAGES:
        return "index_heads", "index_channels", ""
    return "heads", "qk_channels", "" if stage == "indexer_target" else "v_channels"


def accepted_calls(capability: Capability, stage: Stage, device: str) -> Iterator[Accepted]:
    """One call for every declared value, each different from the base in that value alone."""
    base = base_call(capability, stage, device)

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
    yield from _accepted_shapes(capability, stage, base)
    if stage in ("indexer_target", "indexer_loss"):
        for kind in sorted(capability.losses):
            yield vary(f"{kind} loss", sparse_loss=kind == "sparse")
    if stage not in INDEXED_STAGES:
        for bounds in sorted(capability.bounds):
            if base.context_parallel == "none" and base.layout == "bshd":
                yield vary(f"bounds {bounds}", bounds=bounds)
        ranged = "ranges" in capability.bounds
        for layout in sorted(capability.layouts):
            yield vary(f"layout {layout}", runs=ranged or layout == "bshd", layout=layout)
        for kind in sorted(capability.context_parallel):
            # The public operations name one context-parallel layout; a contiguous one is judged, not run.
            yield vary(
                f"context parallel {kind}", runs=ranged and kind != "contiguous", context_parallel=kind
            )
    else:
        yield vary("ids int64", index_dtype="int64")
    yield Accepted("batch 2", _two_items(capability, base))
    if capability.deterministic and (stage != "indexer_topk" or capability.tie_rule == "lower_index"):
        yield vary("deterministic", deterministic=True)
    if stage in BACKWARD_STAGES and capability.partial_gradients:
        for name in sorted(base.needs_grad):
            yield vary(f"gradient of {name} alone", needs_grad=frozenset({name}))
    for name, limit in (("rows", capability.max_rows), ("keys", capability.max_keys)):
        if limit is not None:
            yield vary(f"{name} {limit}", runs=limit <= LARGEST_WIDTH, **{name: limit})


def _two_items(capability: Capability, base: CallSpec) -> CallSpec:
    rows = base.rows if capability.max_rows is None else max(min(base.rows, capability.max_rows // 2), 0)
    keys = base.keys if capability.max_keys is None else max(min(base.keys, capability.max_keys // 2), 0)
    return dataclasses.replace(base, batch=2, rows=rows, keys=keys)


def _accepted_shapes(capability: Capability, stage: Stage, base: CallSpec) -> Iterator[Accepted]:
    heads_field, qk_field, v_field = _fields(stage)
    step = base.kv_heads if is_grouped(stage) else 1
    counts = head_counts(capability.heads, step)
    shown = counts if capability.heads.values is not None else [*counts[:4], *counts[-1:]]
    for count in dict.fromkeys(shown):
        known_end = capability.heads.values is not None or capability.heads.maximum is not None
        if count <= LARGEST_HEADS or known_end:
            yield Accepted(
                f"heads {count}",
                dataclasses.replace(base, **{heads_field: count}),  # type: ignore[arg-type]  # an int field
                count <= LARGEST_HEADS,
            )
    if capability.heads.pad and stage != "indexer_target" and not is_grouped(stage):
        for count in dict.fromkeys(value - 1 for value in counts if 1 < value <= LARGEST_HEADS):
            if count not in counts:
                yield Accepted(
                    f"heads {count}, padded",
                    dataclasses.replace(base, **{heads_field: count}),  # type: ignore[arg-type]
                )
                break
    if is_grouped(stage):
        for count in [value for value in head_counts(capability.kv_heads)[:4] if base.heads % value == 0]:
            yield Accepted(f"key heads {count}", dataclasses.replace(base, kv_heads=count))
    yield from _accepted_channels(capability, stage, base, qk_field, v_field)
    possible = widths(capability.width)
    shown = [*possible[:3], *possible[-1:]] if capability.width.maximum is not None else possible[:3]
    for width in dict.fromkeys(shown):
        yield Accepted(f"width {width}", dataclasses.replace(base, width=width), width <= LARGEST_WIDTH)
    if pads_width(capability, stage) and possible[0] > 1:
        width = possible[0] - 1
        yield Accepted(f"width {width}, padded", dataclasses.replace(base, width=width))


def _accepted_channels(
    capability: Capability, stage: Stage, base: CallSpec, qk_field: str, v_field: str
) -> Iterator[Accepted]:
    channels = capability.channels
    pairs = channel_pairs(channels, stage in INDEXER_STAGES)
    if channels.pairs is None:
        step = channels.multiple_of
        qk = pairs[0][0] + step
        if channels.maximum is None or qk <= channels.maximum:
            pairs.append((qk, qk))
    for qk, v in pairs:
        changes: dict[str, Any] = {qk_field: qk, **({v_field: v} if v_field else {})}
        yield Accepted(f"channels {qk}/{v}", dataclasses.replace(base, **changes), qk <= LARGEST_CHANNELS)
    qk, v = pairs[0]
    if channels.pad and (channels.pairs is not None or channels.multiple_of > 1):
        narrower = qk - 1
        if narrower >= (v if v_field and not is_grouped(stage) else 1):
            changes = {qk_field: narrower, **({v_field: v} if v_field else {})}
            yield Accepted(f"channels {narrower}/{v}, padded", dataclasses.replace(base, **changes))


def declined_calls(capability: Capability, stage: Stage, device: DeviceInfo) -> Iterator[Declined]:
    """One call a step outside every boundary, each different from the base in that value alone."""
    base = base_call(capability, stage, device.type)
    code = DeclineCode

    def vary(label: str, why: DeclineCode, **changes: Any) -> Declined:
        return Declined(label, dataclasses.replace(base, **changes), device, why)

    yield from _declined_devices(capability, base, device)
    for dtype in sorted(FLOATS - capability.dtypes):
        yield vary(f"dtype {dtype}", code.DTYPE, dtype=dtype)
    heads_field, _, _ = _fields(stage)
    may_pad = stage != "indexer_target" and not is_grouped(stage)
    for count in _heads_outside(capability.heads, may_pad):
        yield vary(f"heads {count}", code.HEADS, **{heads_field: count})
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
    yield from _declined_limits(capability, base, device)


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
    _, qk_field, v_field = _fields(stage)
    outside: set[tuple[int, int]] = set()
    if channels.pairs is not None:
        widest = max(qk for qk, _ in channels.pairs)
        for qk, v in channels.pairs:
            near = [(qk + 1, v), *([] if channels.pad else [(qk - 1, v)])]
            outside |= {pair for pair in near if not channels.pad or pair[0] > widest}
            if v_field and v:
                outside |= {(qk, v - 1), (qk, v + 1)}
        outside -= set(channels.pairs)
    else:
        if channels.multiple_of > 1 and not channels.pad:
            outside.add((channels.multiple_of + 1, 1))
        if channels.maximum is not None:
            outside.add((channels.maximum + 1, 1))
    for qk, v in sorted(outside):
        if qk >= 1 and (not v_field or v >= 1):
            changes: dict[str, Any] = {qk_field: qk, **({v_field: v} if v_field else {})}
            label = f"channels {qk}/{v}" if v_field else f"channels {qk}"
            yield Declined(label, dataclasses.replace(base, **changes), device, DeclineCode.CHANNELS)


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


def _declined_limits(capability: Capability, base: CallSpec, device: DeviceInfo) -> Iterator[Declined]:
    for name, limit in (("rows", capability.max_rows), ("keys", capability.max_keys)):
        if limit is not None:
            call = dataclasses.replace(base, **{name: limit + 1})  # type: ignore[arg-type]  # an int field
            yield Declined(f"{name} {limit + 1}", call, device, DeclineCode.LIMIT)
    if capability.max_elements is not None:
        per_row = max(base.heads * base.qk_channels, base.index_heads * base.index_channels)
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
