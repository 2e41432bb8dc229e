"""Where the rows of a call stand: which batch item they belong to, and which keys they may see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_backends.torch_dense._buffers import Buffer, Workspace
from dsa_dispatch._call import RowLayout


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one batch item: ``rows`` counts in this call, ``keys`` in the flattened keys."""

    rows: slice
    keys: slice

    @property
    def count(self) -> int:
        return int(self.rows.stop - self.rows.start)


def segments(layout: RowLayout, count: int) -> Iterator[Segment]:
    """The rows of this call, cut where the batch item changes."""
    row = 0
    while row < count:
        item, inside = divmod(layout.first_row + row, layout.rows)
        stop = min(count, row + layout.rows - inside)
        yield Segment(slice(row, stop), slice(item * layout.keys, (item + 1) * layout.keys))
        row = stop


def host_ranges(
    layout: RowLayout, segment: Segment, starts: Tensor, ends: Tensor
) -> list[tuple[int, int]] | None:
    """Each row's range, counted from its item's first key, where it is known without asking the device."""
    first = segment.keys.start
    if layout.bounds == "causal":
        inside = (layout.first_row + segment.rows.start) % layout.rows
        last = layout.keys - layout.rows + inside + 1
        return [(0, max(0, last + row)) for row in range(segment.count)]
    if starts.device.type == "cpu":
        pairs = zip(starts[segment.rows].tolist(), ends[segment.rows].tolist(), strict=True)
        return [(start - first, end - first) for start, end in pairs]
    return None


def range_buffers(keys: int) -> tuple[Buffer, ...]:
    """Per row: what ``mark_range`` needs."""
    return (Buffer("key is out of range", keys, torch.bool), Buffer("range test", keys, torch.bool))


def key_numbers(keys: int) -> Buffer:
    """Fixed: the numbers of an item's keys, to compare with a row's range."""
    return Buffer("key numbers", keys, torch.int32)


def mark_range(workspace: Workspace, segment: Segment, starts: Tensor, ends: Tensor) -> Tensor:
    """``[n, keys]`` bool: the keys of the item that are outside the row's ``[start, end)``."""
    keys = segment.keys.stop - segment.keys.start
    numbers = workspace.take("key numbers", keys)
    torch.arange(segment.keys.start, segment.keys.stop, out=numbers)
    absent = workspace.take("key is out of range", segment.count, keys)
    test = workspace.take("range test", segment.count, keys)
    torch.lt(numbers, starts[segment.rows].unsqueeze(1), out=absent)
    torch.ge(numbers, ends[segment.rows].unsqueeze(1), out=test)
    return absent.logical_or_(test)
