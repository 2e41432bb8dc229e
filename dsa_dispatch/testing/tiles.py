"""Sizes beyond one tile of a kernel, none a multiple of one, and tiles in which no slot is a key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch

from dsa_dispatch._capability import Capability
from dsa_dispatch._dispatch.check import INDEXER_STAGES, declines
from dsa_dispatch._dispatch.device import device_info
from dsa_dispatch._stages import Stage
from dsa_dispatch.testing.cases import call_of
from dsa_dispatch.testing.extent import Extent
from dsa_dispatch.testing.operands import Ids, Subject, clean_ids, make
from dsa_dispatch.testing.sizes import (
    Sizes,
    channel_pairs,
    head_counts,
    is_grouped,
    next_run,
    widths,
    within_limits,
)
from dsa_dispatch.testing.stage_run import judge_stage

TILES = (64, 16, 128)
"""Slots that published kernels take at a time."""
FEW_ROWS = 3


def sizes_beyond(subject: Subject) -> Iterator[tuple[str, Sizes]]:
    """Declared sizes beyond one tile, each different from the native sizes in that one; the nearest that run."""
    capability, stage, native = subject.capability, subject.stage, subject.sizes
    few = dataclasses.replace(native, rows=min(native.rows, FEW_ROWS))
    found: dict[str, Sizes] = {}
    for width in subject.extent.widths:
        fit = next_run(widths(capability.width), width)
        if fit is not None and native.width < fit <= subject.extent.largest_width:
            found[f"width {fit}"] = dataclasses.replace(few, width=fit, keys=fit + 5)
    # Listed head counts have a declared value, and a check, each.
    for count in subject.extent.heads if capability.heads.values is None else ():
        fit = next_run(head_counts(capability.heads, native.kv_heads), count)
        if fit is not None and native.heads < fit <= subject.extent.largest_heads:
            found[f"heads {fit}"] = dataclasses.replace(few, heads=fit)
    for qk, v in _channels_beyond(capability, stage, subject.extent):
        found[f"channels {qk}/{v}"] = dataclasses.replace(few, qk=qk, v=v)
    found[f"rows {subject.extent.more_rows}"] = dataclasses.replace(native, rows=subject.extent.more_rows)
    for name, sizes in found.items():
        held = within_limits(capability, sizes)
        call = call_of(capability, stage, subject.device.type, held)
        if held != native and not declines(capability, stage, call, device_info(subject.device)):
            yield name, held


def _channels_beyond(capability: Capability, stage: Stage, extent: Extent) -> Iterator[tuple[int, int]]:
    channels = capability.channels
    native = channel_pairs(channels, stage in INDEXER_STAGES)
    if channels.pairs is not None:
        yield from (pair for pair in native[-1:] if native[0] != pair and pair[0] <= extent.largest_channels)
        return
    for count in extent.channels:
        qk = -(-count // channels.multiple_of) * channels.multiple_of
        if channels.maximum is None or qk <= channels.maximum:
            yield qk, qk if stage in INDEXER_STAGES else qk - qk // 5
    if is_grouped(stage):
        qk = native[0][0]
        yield qk, 2 * qk + 3


def _with_gaps(sizes: Sizes, generator: torch.Generator) -> Ids:
    """Holes anywhere, and a row that ends inside its last tile."""
    ids = clean_ids(sizes, generator)
    slots, length = ids.slots.clone(), ids.length.clone()
    slots[torch.rand(slots.shape, generator=generator) < 0.3] = -1
    length[1::2] = (length[1::2] * 9 // 10).clamp(min=1)
    return Ids(slots, length)


def beyond(subject: Subject, name: str, sizes: Sizes) -> None:
    """More than one tile of something, and no multiple of one."""
    claim = f"sizes beyond one tile: {name}"
    judge_stage(subject, claim, make(subject, sizes=sizes, ids=_with_gaps))
    if (
        subject.stage in ("indexer_target", "indexer_loss")
        and {"sparse", "dense"} <= subject.capability.losses
    ):
        judge_stage(subject, f"{claim}, dense form", make(subject, sizes=sizes, sparse=False))


def tiles_of_holes(subject: Subject, width: int) -> None:
    """Whole tiles without a key, then keys: a running maximum is still -inf when the first key comes."""

    def pattern(sizes: Sizes, generator: torch.Generator) -> Ids:
        ids = clean_ids(sizes, generator)
        slots = ids.slots.clone()
        for row in range(len(slots)):
            tile = TILES[row % len(TILES)]
            first = tile if row >= len(TILES) and 2 * tile < width else 0
            slots[row, first : min(first + tile, width - 1)] = -1
        return Ids(slots, torch.full_like(ids.length, width))

    sizes = dataclasses.replace(subject.sizes, width=width, keys=width, rows=subject.extent.rows)
    sizes = within_limits(subject.capability, sizes)
    claim = "tiles of holes: 16, 64 or 128 slots that are all holes, before the row's keys or between them"
    hint = "The maximum over a tile without a key is -inf, and -inf - -inf is NaN"
    for poison in (False, True):
        held = f"{claim}, with NaN in every key that no slot names" if poison else claim
        judge_stage(subject, held, make(subject, sizes=sizes, ids=pattern, poison=poison), nan_hint=hint)


def tile_checks(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    """The checks of a stage that sums over keys, with their names."""
    sparse = subject.stage not in ("indexer_target", "indexer_loss") or "sparse" in subject.capability.losses
    possible = [width for width in widths(subject.capability.width) if width <= subject.extent.largest_width]
    wanted = next((width for width in subject.extent.widths if width > max(TILES)), TILES[1] + 3)
    width = next_run(possible, wanted) or (possible or [0])[-1]
    if sparse and width > TILES[0]:
        yield "tiles of holes", partial(tiles_of_holes, subject, width)
    for name, sizes in sizes_beyond(subject):
        yield f"beyond a tile, {name}", partial(beyond, subject, name, sizes)
