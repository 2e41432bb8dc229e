"""The rows of a call as the frontend's dense kernels see them: one batch item at a time, mask from the top left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsa_dispatch._call import RowLayout

COLUMN_STEP = 128


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``[first, last)`` of the call, of one batch item, with the keys ``[key, key + columns)`` they may see."""

    first: int
    last: int
    key: int
    """Global id of the item's key 0."""
    columns: int
    """Keys that any of the rows can see."""
    offset: int
    """Position of the first row among the item's keys: row ``r`` sees columns up to ``offset + r``. At least 0."""
    causal: bool

    @property
    def rows(self) -> int:
        return self.last - self.first

    def causal_offsets(self, device: torch.device) -> Tensor:
        """``q_causal_offsets``, without which the kernels take every chunk for the first rows of its sequence."""
        return torch.full((1,), self.offset, dtype=torch.int32, device=device)


def segments(rows: RowLayout, count: int) -> Iterator[Segment]:
    """Cut ``count`` rows from ``rows.first_row`` on where a batch item ends; rows without any key are left out."""
    row = rows.first_row
    end = rows.first_row + count
    while row < end:
        item = row // rows.rows
        stop = min(end, (item + 1) * rows.rows)
        if rows.bounds != "causal":
            # One of the kernels refuses more rows than keys, whatever the offsets say.
            stop = min(stop, row + rows.keys)
        segment = _segment(rows, item, row, stop)
        if segment.rows > 0:
            yield segment
        row = stop


def _segment(rows: RowLayout, item: int, row: int, stop: int) -> Segment:
    first, key = row - rows.first_row, item * rows.keys
    if rows.bounds != "causal":
        return Segment(first, stop - rows.first_row, key, rows.keys, rows.keys, False)
    offset = rows.keys - rows.rows + row - item * rows.rows
    empty = min(max(0, -offset), stop - row)
    last = offset + stop - row
    columns = min(rows.keys, -(-max(last, 0) // COLUMN_STEP) * COLUMN_STEP)
    return Segment(first + empty, stop - rows.first_row, key, columns, offset + empty, True)


def scores_of(dsa: Any, q: Tensor, k: Tensor, w: Tensor, segment: Segment) -> Tensor:
    """Indexer scores ``[rows, columns]`` in fp32; -inf where the causal mask forbids."""
    part = slice(segment.first, segment.last)
    keys = k[segment.key : segment.key + segment.columns]
    result = dsa.indexer_forward_wrapper(
        q[part][None],
        keys[None, :, None],
        w[part][None],
        ratio=1,
        sm_scale=1.0,
        q_causal_offsets=segment.causal_offsets(q.device),
    )
    scores: Tensor = result["scores"]
    return scores[0]
