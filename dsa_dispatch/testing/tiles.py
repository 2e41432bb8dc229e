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
    admits,
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
MANY_KEYS = (1 << 16) + 41
MANY_KEY_HEADS = 8
DENSE_COLUMNS = 1 << 15
"""Rows times keys up to which the dense form of a loss, which has a column for each key, is judged too."""


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
    if is_grouped(stage) and MANY_KEY_HEADS in head_counts(capability.kv_heads):
        for count in head_counts(capability.heads, MANY_KEY_HEADS)[:1]:
            name = f"key heads {MANY_KEY_HEADS}"
            found[name] = dataclasses.replace(few, kv_heads=MANY_KEY_HEADS, heads=count)
    for qk, v in _channels_beyond(capability, stage, subject.extent):
        found[f"channels {qk}/{v}"] = dataclasses.replace(few, qk=qk, v=v)
    found[f"rows {subject.extent.more_rows}"] = dataclasses.replace(native, rows=subject.extent.more_rows)
    for name, sizes in found.items():
        held = within_limits(capability, sizes)
        if held != native and servable(subject, held):
            yield name, held


def servable(subject: Subject, sizes: Sizes) -> bool:
    """Whether the declaration accepts a call of these sizes."""
    call = call_of(subject.capability, subject.stage, subject.device.type, sizes)
    return admits(subject.capability, sizes) and not declines(
        subject.capability, subject.stage, call, device_info(subject.device)
    )


def _channels_beyond(capability: Capability, stage: Stage, extent: Extent) -> Iterator[tuple[int, int]]:
    channels = capability.channels
    indexer = stage in INDEXER_STAGES
    native = channel_pairs(channels, indexer)
    if channels.pairs is not None:
        yield from (pair for pair in native[-1:] if native[0] != pair and pair[0] <= extent.largest_channels)
        return
    wanted = [(count, count if indexer else count - count // 5) for count in extent.channels]
    if stage.startswith("attention") or stage == "indexer_target":
        wanted += extent.channel_pairs
    for count, v in wanted:
        qk = -(-count // channels.multiple_of) * channels.multiple_of
        if channels.maximum is None or qk <= channels.maximum:
            yield qk, qk if indexer else v
    if is_grouped(stage):
        qk = native[0][0]
        yield qk, 2 * qk + 3


def sizes_apart(subject: Subject) -> Iterator[tuple[str, Sizes]]:
    """Declared sizes that a kernel may treat apart: one of something, fewer keys than slots, more rows than any tile of
    rows has, ids that 16 bits do not hold."""
    native = subject.sizes
    few = dataclasses.replace(native, rows=min(native.rows, FEW_ROWS))
    many = 4 * subject.extent.more_rows + 32
    for name, sizes in (
        ("one row", dataclasses.replace(native, rows=1)),
        ("one key", dataclasses.replace(few, keys=1)),
        ("fewer keys than slots", dataclasses.replace(few, keys=max(native.width - 3, 1))),
        (f"rows {many}", dataclasses.replace(native, rows=many)),
        (f"keys {MANY_KEYS}", dataclasses.replace(few, keys=MANY_KEYS)),
    ):
        elements = sizes.keys * sizes.kv_heads * max(sizes.qk, sizes.v)
        if elements <= subject.extent.most_elements and servable(subject, sizes):
            yield name, sizes


def _with_gaps(sizes: Sizes, generator: torch.Generator) -> Ids:
    """Holes anywhere, and a row that ends inside its last tile."""
    ids = clean_ids(sizes, generator)
    slots, length = ids.slots.clone(), ids.length.clone()
    slots[torch.rand(slots.shape, generator=generator) < 0.3] = -1
    length[1::2] = (length[1::2] * 9 // 10).clamp(min=1)
    return Ids(slots, length)


def _of_last_keys(sizes: Sizes, generator: torch.Generator) -> Ids:
    """Distinct keys, the last ones of the row's batch item first."""
    ids = clean_ids(sizes, generator)
    count = int(ids.length[0])
    slots = ids.slots.clone()
    for row in range(len(slots)):
        last = row // sizes.rows * sizes.keys + sizes.keys - 1
        slots[row, :count] = last - (torch.arange(count) * (row + 1)) % sizes.keys
    return Ids(slots, ids.length)


def one_size(
    subject: Subject,
    claim: str,
    sizes: Sizes,
    pattern: Callable[[Sizes, torch.Generator], Ids] = _with_gaps,
) -> None:
    """Values, in two types and in each declared form of a loss."""
    losses = subject.capability.losses
    of_loss = subject.stage in ("indexer_target", "indexer_loss")
    for one in subject.sharp_and_coarse():
        if not of_loss or "sparse" in losses:
            judge_stage(one, claim, make(one, sizes=sizes, ids=pattern))
        if of_loss and "dense" in losses and sizes.rows * sizes.keys <= DENSE_COLUMNS:
            judge_stage(one, f"{claim}, dense form", make(one, sizes=sizes, sparse=False))


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
    for one in subject.sharp_and_coarse():
        for poison in (False, True):
            held = f"{claim}, with NaN in every key that no slot names" if poison else claim
            judge_stage(one, held, make(one, sizes=sizes, ids=pattern, poison=poison), nan_hint=hint)


def tile_checks(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    """The checks of a stage that sums over keys, with their names."""
    sparse = subject.stage not in ("indexer_target", "indexer_loss") or "sparse" in subject.capability.losses
    possible = [width for width in widths(subject.capability.width) if width <= subject.extent.largest_width]
    wanted = next((width for width in subject.extent.widths if width > max(TILES)), TILES[1] + 3)
    width = next_run(possible, wanted) or (possible or [0])[-1]
    if sparse and width > TILES[0]:
        yield "tiles of holes", partial(tiles_of_holes, subject, width)
    for name, sizes in sizes_beyond(subject):
        claim = f"sizes beyond one tile: {name}"
        yield f"beyond a tile, {name}", partial(one_size, subject, claim, sizes)
    for name, sizes in sizes_apart(subject):
        pattern = _of_last_keys if sizes.keys == MANY_KEYS else _with_gaps
        yield f"size, {name}", partial(one_size, subject, f"sizes: {name}", sizes, pattern)
    dense = dataclasses.replace(subject.sizes, rows=FEW_ROWS, keys=subject.extent.keys)
    of_loss = subject.stage in ("indexer_target", "indexer_loss")
    if of_loss and "dense" in subject.capability.losses and servable(subject, dense):
        claim = f"sizes beyond one tile: {dense.keys} columns"
        yield f"beyond a tile, columns {dense.keys}", partial(one_size, subject, claim, dense)
