"""``indexer_topk``: scores of as many rows as the budget holds, then their exact selection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_backends.tilelang_kernels.compiler import kernel
from dsa_backends.tilelang_kernels.launch import (
    aligned,
    flat,
    head_block,
    is_hopper,
    last_contiguous,
    name_of,
    on_device,
    strides8,
)
from dsa_backends.tilelang_kernels.scratch import padded_keys, topk_rows, total
from dsa_dispatch._call import RowLayout, StageOptions

TILE_ROWS = 32
TILE_KEYS = 256
"""Of ``score_kernel``, which cannot be imported without TileLang."""


@dataclass(frozen=True, slots=True)
class ItemRows:
    """Rows of this call that belong to one batch item, and the global id of its first key."""

    first_row: int
    last_row: int
    first_key: int


def items_of(total_rows: int, rows: RowLayout) -> Iterator[ItemRows]:
    """The call's rows, batch item by batch item: an item's rows share its keys."""
    item = rows.first_row // max(rows.rows, 1)
    at = 0
    while at < total_rows:
        last = min(total_rows, (item + 1) * rows.rows - rows.first_row)
        yield ItemRows(at, last, item * rows.keys)
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
    """See ``dsa_dispatch._contract.IndexerTopK``. Up to 64 heads, any ``topk``."""
    q, k, w = aligned(q), aligned(k), last_contiguous(w)
    starts, ends = starts.contiguous(), ends.contiguous()
    total_rows, heads, dim = q.shape
    indices = torch.empty((total_rows, topk), dtype=torch.int32, device=q.device)
    length = torch.empty((total_rows,), dtype=torch.int32, device=q.device)
    most = max(1, min(options.memory_budget // total(topk_rows(rows.keys, heads)), total_rows))
    # Whole tiles of rows: a tile of few rows costs as much as a full one.
    most = most // TILE_ROWS * TILE_ROWS if most > TILE_ROWS else most
    scores = torch.empty((most, padded_keys(rows.keys)), dtype=torch.float32, device=q.device)
    with on_device(q):
        score = kernel(
            q.device,
            "score_kernel:index_scores",
            *(head_block(heads), dim, name_of(q.dtype), use_relu, is_hopper(q)),
        )
        for item in items_of(total_rows, rows):
            for first in range(item.first_row, item.last_row, most):
                part = slice(first, min(first + most, item.last_row))
                count = part.stop - part.start
                weights = w[part].float()
                columns = rows.keys
                if rows.bounds == "causal":
                    # Host knowledge: no row of this chunk sees past its last row's bound.
                    in_item = rows.first_row + part.stop - 1 - item.first_key // max(rows.keys, 1) * rows.rows
                    columns = max(1, min(rows.keys, rows.keys - rows.rows + in_item + 1))
                key_tiles = -(-columns // TILE_KEYS)
                score(
                    *(flat(q[part]), flat(k), flat(weights), starts[part], ends[part], flat(scores)),
                    *(*strides8(q), k.stride(0) // 8, weights.stride(0), scores.stride(0)),
                    *(count, item.first_key, columns, heads, key_tiles, -(-count // TILE_ROWS)),
                )
                launch_select(
                    scores, starts[part], ends[part], indices[part], length[part], item.first_key, columns
                )
    return indices, length


def launch_select(
    scores: Tensor,
    starts: Tensor,
    ends: Tensor,
    indices: Tensor,
    length: Tensor,
    first_key: int,
    columns: int,
) -> None:
    """Selection from ``scores [at least rows, columns]`` fp32, rows 16-byte aligned; ids count from ``first_key``."""
    kernel(scores.device, "select_kernel:select_best")(
        *(flat(scores), starts, ends, flat(indices), length),
        *(scores.stride(0) // 4, indices.stride(0), starts.shape[0], first_key, columns, indices.shape[1]),
    )


def select_from_scores(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The selection by itself: ``scores [T, S]`` fp32, contiguous, ``S`` a multiple of 4; ranges ``[T]`` int32.

    Returns ``indices [T, topk]`` and ``length [T]`` as ``indexer_topk`` does.
    """
    indices = torch.empty((scores.shape[0], topk), dtype=torch.int32, device=scores.device)
    length = torch.empty((scores.shape[0],), dtype=torch.int32, device=scores.device)
    with on_device(scores):
        launch_select(scores, starts, ends, indices, length, 0, scores.shape[1])
    return indices, length
