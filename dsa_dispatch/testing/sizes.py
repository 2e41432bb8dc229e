"""Small sizes a declared stage runs as it stands, without any padding by the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from dsa_dispatch._call import ContextParallel
from dsa_dispatch._capability import Capability, Channels, Heads, IndexWidth
from dsa_dispatch._dispatch.check import INDEXER_STAGES
from dsa_dispatch._stages import Stage
from dsa_dispatch.testing.extent import FULL, Extent

SEARCHED: Final = 1 << 13
"""Counts above this are not tried: no model has more heads, and a larger width would make no small case."""
DTYPES: Final = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one call of a stage; ``width`` is the top-k of a selection. ``rows`` and ``keys`` are per batch item."""

    heads: int
    kv_heads: int
    qk: int
    v: int
    width: int
    rows: int
    keys: int
    batch: int = 1


def is_grouped(stage: Stage) -> bool:
    return stage in ("gqa_forward", "gqa_backward")


def head_counts(heads: Heads, step: int = 1) -> list[int]:
    """Every count that runs, ascending, that is a multiple of ``step``."""
    counts = sorted(heads.values) if heads.values is not None else range(max(heads.minimum, 1), SEARCHED)
    return [count for count in counts if count % step == 0 and heads.runs(count)]


def widths(width: IndexWidth) -> list[int]:
    """Every width that runs, ascending."""
    top = min(width.maximum or SEARCHED, SEARCHED)
    step = width.multiple_of
    counts = range(step, top + 1, step)
    return [count for count in counts if not (width.power_of_two and count & (count - 1))]


def next_run(running: Sequence[int], count: int) -> int | None:
    """The smallest of the ascending counts that holds ``count``."""
    return next((value for value in running if value >= count), None)


def channel_pairs(channels: Channels, indexer: bool) -> list[tuple[int, int]]:
    """Pairs ``(query and key, value)`` that run, the smallest first; the value is the key's width for an indexer."""
    if channels.pairs is not None:
        return sorted((qk, qk if indexer or not v else v) for qk, v in channels.pairs)
    step = channels.multiple_of
    small = -(-32 // step) * step
    if channels.maximum is not None:
        small = min(small, channels.maximum // step * step)
    return [(small, small if indexer else max(small // 2, 1))]


def native_sizes(capability: Capability, stage: Stage, extent: Extent = FULL) -> Sizes:
    """The smallest sizes that leave room for holes and several rows."""
    kv_heads = 1
    if is_grouped(stage):
        counts = [n for n in head_counts(capability.kv_heads)[:64] if head_counts(capability.heads, n)]
        kv_heads = 2 if 2 in counts else counts[0]
    heads = head_counts(capability.heads, kv_heads)
    # Three heads, where they run: a kernel that rounds heads up by itself then writes past its output.
    count = 3 * kv_heads if 3 * kv_heads in heads else heads[0]
    qk, v = channel_pairs(capability.channels, stage in INDEXER_STAGES)[0]
    possible = widths(capability.width)
    width = next((count for count in possible if count >= 8), possible[-1])
    return within_limits(capability, Sizes(count, kv_heads, qk, v, width, rows=extent.rows, keys=width + 5))


def within_limits(capability: Capability, sizes: Sizes) -> Sizes:
    """The same with as few rows and keys per batch item as the declared limits ask for, at least one of each."""
    rows, keys = sizes.rows, sizes.keys
    if capability.max_rows is not None:
        rows = min(rows, capability.max_rows // sizes.batch)
    if capability.max_keys is not None:
        keys = min(keys, capability.max_keys // sizes.batch)
    if capability.max_elements is not None:
        widest = max(sizes.qk, sizes.v)
        rows = min(rows, capability.max_elements // (sizes.batch * max(sizes.heads * widest, sizes.width)))
        keys = min(keys, capability.max_elements // (sizes.batch * sizes.kv_heads * widest))
    return replace(sizes, rows=max(rows, 1), keys=max(keys, 1))


def several_items(capability: Capability, sizes: Sizes, rows: int = 3) -> Sizes:
    """Two batch items of up to ``rows`` rows each; one where the declared limits have no room for two."""
    two = within_limits(capability, replace(sizes, batch=2, rows=min(rows, sizes.rows)))
    return two if admits(capability, two) else within_limits(capability, replace(sizes, rows=rows))


def admits(capability: Capability, sizes: Sizes) -> bool:
    """Whether the declared limits hold ``sizes``."""
    return sizes == within_limits(capability, sizes) and (
        sizes.batch == 1
        or min(capability.max_rows or sizes.batch, capability.max_keys or sizes.batch) >= sizes.batch
    )


def pads_width(capability: Capability, stage: Stage) -> bool:
    """Whether the core may widen: a wider selection could only be cut back where the best keys come first."""
    return capability.width.pad and (stage != "indexer_topk" or capability.sorted)


def preferred_dtype(capability: Capability) -> str:
    """The declared type in which faults show most sharply."""
    return next(name for name in ("float64", "float32", "float16", "bfloat16") if name in capability.dtypes)


def coarsest_dtype(capability: Capability) -> str:
    """The declared type in which a sum of that type shows most."""
    return next(name for name in ("bfloat16", "float16", "float32", "float64") if name in capability.dtypes)


def plainest(layouts: frozenset[ContextParallel]) -> ContextParallel:
    """No context parallelism where that is declared."""
    return "none" if "none" in layouts else sorted(layouts)[0]
