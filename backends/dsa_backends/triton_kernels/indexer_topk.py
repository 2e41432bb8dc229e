"""``indexer_topk``: scores in a slab of the budget's size, the best k carried from one block of columns to the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_backends.triton_kernels.indexer_kernels import score_kernel, select_kernel
from dsa_backends.triton_kernels.launch import (
    FUSED,
    aligned,
    device_architecture,
    last_contiguous,
    on_device,
    precision,
    processors,
)
from dsa_backends.triton_kernels.scratch import COLUMN_BLOCKS, carry_width, column_block, topk_rows, total
from dsa_backends.triton_kernels.tiles import ScoreTile, score_tile, select_warps
from dsa_dispatch._call import RowLayout, StageOptions


@dataclass(frozen=True, slots=True)
class ItemRows:
    """Rows of this call that belong to one batch item, and the global ids of its keys."""

    first_row: int
    last_row: int
    first_key: int
    last_key: int


def items_of(total_rows: int, rows: RowLayout) -> Iterator[ItemRows]:
    """The call's rows, batch item by batch item: an item's rows share its keys."""
    item = rows.first_row // max(rows.rows, 1)
    at = 0
    while at < total_rows:
        last = min(total_rows, (item + 1) * rows.rows - rows.first_row)
        yield ItemRows(at, last, item * rows.keys, (item + 1) * rows.keys)
        at, item = last, item + 1


def indexer_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    rows: RowLayout,
    topk: int,
    use_relu: bool,
    options: StageOptions,
) -> tuple[Tensor, Tensor]:
    """See ``dsa_dispatch._contract.IndexerTopK``. Up to 128 heads, ``topk`` up to 4096; ids come out ascending."""
    columns = column_block(rows.keys)
    return launch_topk(
        q,
        k,
        w,
        starts,
        ends,
        rows=rows,
        topk=topk,
        use_relu=use_relu,
        budget=options.memory_budget,
        columns=columns,
    )


def launch_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    rows: RowLayout,
    topk: int,
    use_relu: bool,
    budget: int,
    columns: int,
) -> tuple[Tensor, Tensor]:
    """The selection with a given number of columns per block; what the tests vary."""
    q, k, w = aligned(q), aligned(k), last_contiguous(w)
    total_rows = q.shape[0]
    tile = score_tile(device_architecture(q), q.shape[1], q.element_size())
    indices = torch.empty((total_rows, topk), dtype=torch.int32, device=q.device)
    length = torch.empty((total_rows,), dtype=torch.int32, device=q.device)
    most = max(1, min(budget // total(topk_rows(rows.keys, topk, columns)), total_rows, 65535 * tile.rows))
    wave = processors(q)
    # Whole waves of the selection, one row per multiprocessor: a last wave of few rows would cost a full one.
    most = most // wave * wave if most > wave else most
    scores = torch.empty((most, columns), dtype=torch.float32, device=q.device)
    with on_device(q):
        for item in items_of(total_rows, rows):
            for first in range(item.first_row, item.last_row, most):
                part = slice(first, min(first + most, item.last_row))
                last_key = item.last_key
                if rows.bounds == "causal":
                    # Host knowledge: no row of this chunk sees past its last row's bound.
                    in_item = rows.first_row + part.stop - 1 - item.first_key // max(rows.keys, 1) * rows.rows
                    seen = rows.keys - rows.rows + in_item + 1
                    last_key = item.first_key + max(1, min(rows.keys, seen))
                blocks = ScoreBlocks(q[part], k, w[part], starts[part], ends[part], scores, use_relu, tile)
                blocks.select(item.first_key, last_key, topk, columns, indices[part], length[part])
    return indices, length


class ScoreBlocks:
    """Scores of a chunk of rows, block of columns by block, and the selection that follows each."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        starts: Tensor,
        ends: Tensor,
        scores: Tensor,
        use_relu: bool,
        tile: ScoreTile,
    ) -> None:
        self.q, self.k, self.w, self.starts, self.ends = q, k, w, starts, ends
        self.scores, self.use_relu, self.tile = scores, use_relu, tile

    def score(self, first_key: int, columns: int) -> None:
        rows, heads, dim = self.q.shape
        tile = self.tile
        score_kernel[(-(-columns // tile.keys), -(-rows // tile.rows))](
            self.q,
            self.k,
            self.w,
            self.starts,
            self.ends,
            self.scores,
            self.q.stride(0) // 8,
            self.q.stride(1) // 8,
            self.k.stride(0) // 8,
            self.w.stride(0),
            self.scores.stride(0),
            rows,
            first_key,
            columns,
            heads,
            DIM=dim,
            BLOCK_D=max(16, 1 << (dim - 1).bit_length()),
            BLOCK_H=max(16, 1 << (heads - 1).bit_length()),
            BLOCK_N=tile.keys,
            ROWS=tile.rows,
            RELU=self.use_relu,
            PRECISION=precision(self.q),
            num_warps=tile.warps,
            **FUSED,
            num_stages=tile.stages,
        )

    def select(
        self, first_key: int, last_key: int, topk: int, block: int, indices: Tensor, length: Tensor
    ) -> None:
        carry: Carry | None = None
        for start in range(first_key, last_key, block):
            columns = min(block, last_key - start)
            self.score(start, columns)
            last = start + block >= last_key
            carry = select_block(
                self.scores,
                self.starts,
                self.ends,
                start,
                columns,
                topk,
                block,
                carry,
                indices,
                length,
                last=last,
            )


@dataclass(frozen=True, slots=True)
class Carry:
    """What earlier blocks of columns chose: ids (ascending) and their orders, ``[rows, carry_width]``."""

    ids: Tensor
    order: Tensor
    spare: Carry | None = None


def select_block(
    scores: Tensor,
    starts: Tensor,
    ends: Tensor,
    first_key: int,
    columns: int,
    topk: int,
    block: int,
    carry: Carry | None,
    indices: Tensor,
    length: Tensor,
    *,
    last: bool,
) -> Carry | None:
    """Merge one block of scores ``[rows, columns]`` into what was chosen before; the last one writes the result."""
    rows = starts.shape[0]
    width = carry_width(topk)
    out: Carry | None = None
    if not last:
        if carry is not None and carry.spare is not None:
            out = Carry(carry.spare.ids, carry.spare.order, Carry(carry.ids, carry.order))
        else:
            fresh = torch.empty((2, rows, width), dtype=torch.int32, device=scores.device)
            out = Carry(fresh[0], fresh[1], None if carry is None else Carry(carry.ids, carry.order))
    target = indices if out is None else out.ids
    select_kernel[(rows,)](
        scores,
        starts,
        ends,
        target if carry is None else carry.ids,
        target if carry is None else carry.order,
        target,
        target if out is None else out.order,
        length,
        scores.stride(0),
        first_key,
        columns,
        topk,
        width,
        target.stride(0),
        int(last),
        BLOCK=block,
        BLOCK_K=width,
        CHUNK=min(block, 8192),
        RANKED=32,
        HAS_CARRY=carry is not None,
        num_warps=select_warps(block),
        **FUSED,
        num_stages=1,
    )
    return out


def select_from_scores(
    scores: Tensor, starts: Tensor, ends: Tensor, topk: int, *, columns: int = COLUMN_BLOCKS[-1]
) -> tuple[Tensor, Tensor]:
    """The selection by itself: ``scores [T, S]`` fp32 with contiguous rows, ranges ``starts``, ``ends [T]``.

    Returns ``indices [T, topk]`` and ``length [T]`` as ``indexer_topk`` does; ``columns`` a power of two.
    """
    keys = scores.shape[1]
    indices = torch.empty((scores.shape[0], topk), dtype=torch.int32, device=scores.device)
    length = torch.empty((scores.shape[0],), dtype=torch.int32, device=scores.device)
    carry: Carry | None = None
    with on_device(scores):
        for start in range(0, keys, columns):
            size = min(columns, keys - start)
            last = start + columns >= keys
            carry = select_block(
                scores[:, start:], starts, ends, start, size, topk, columns, carry, indices, length, last=last
            )
    return indices, length
