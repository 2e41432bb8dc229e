"""Choosing keys: scores with reproducible bits, then an exact selection."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_backends.torch_dense._buffers import Buffer, BufferPlan
from dsa_backends.torch_dense._precision import stage_body
from dsa_backends.torch_dense._rows import (
    Segment,
    host_ranges,
    key_numbers,
    mark_range,
    range_buffers,
    segments,
)
from dsa_backends.torch_dense._select import select, select_buffers
from dsa_backends.torch_dense.scores import product_is_position_free, score_tiles, tile_buffers, tile_of
from dsa_dispatch._call import RowLayout, StageOptions
from dsa_dispatch._contract import accumulation_dtype


def buffer_plan(
    *, keys: int, topk: int, heads: int, channels: int, dtype: torch.dtype, device_type: str
) -> BufferPlan:
    """Where ``topk >= keys`` every key in range is chosen and nothing is scored."""
    prefix = Buffer("slot is used", topk, torch.bool)
    if topk >= keys:
        return BufferPlan((prefix,), (Buffer("slot numbers", topk, torch.int32),))
    acc = accumulation_dtype(dtype)
    rows = (
        Buffer("scores", keys, acc),
        *range_buffers(keys),
        *select_buffers(keys, topk, acc),
        prefix,
    )
    fixed = (
        Buffer("slot numbers", topk, torch.int32),
        key_numbers(keys),
        *tile_buffers(tile_of(device_type), heads, channels, acc),
    )
    loose = (
        Buffer("row and key of each choice", 2 * topk, torch.int64),
        Buffer("chosen ids", topk, torch.int32),
    )
    return BufferPlan(rows, fixed, loose)


@stage_body
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
    exact: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``dsa_dispatch._contract.IndexerTopK``. Ids come in ascending order.

    ``exact`` forces the channel-by-channel scores, or the products; None asks the probe of ``scores``.
    """
    count, heads, channels = q.shape
    device = q.device
    if exact is None and topk < rows.keys:
        exact = not product_is_position_free(accumulation_dtype(q.dtype), channels, device)
    length = (ends - starts).clamp_(0, topk).to(torch.int32)
    workspace = buffer_plan(
        keys=rows.keys, topk=topk, heads=heads, channels=channels, dtype=q.dtype, device_type=device.type
    ).allocate(count, device)
    slots = workspace.take("slot numbers", topk)
    torch.arange(topk, out=slots)
    used = torch.lt(slots, length.unsqueeze(1), out=workspace.take("slot is used", count, topk))
    if topk >= rows.keys:
        indices = torch.add(
            slots, starts.unsqueeze(1), out=torch.empty(count, topk, dtype=torch.int32, device=device)
        )
        return indices.masked_fill_(used.logical_not_(), -1), length
    indices = torch.full((count, topk), -1, dtype=torch.int32, device=device)
    for segment in segments(rows, count):
        scores = workspace.take("scores", segment.count, rows.keys)
        score_tiles(
            workspace,
            scores,
            q[segment.rows],
            k[segment.keys],
            w[segment.rows],
            windows=_windows_to_score(rows, segment, starts, ends, topk),
            use_relu=use_relu,
            exact=bool(exact),
        )
        absent = mark_range(workspace, segment, starts, ends)
        selected = select(workspace, scores, absent, length[segment.rows], topk)
        indices[segment.rows].masked_scatter_(used[segment.rows], _ids(selected, segment))
    return indices, length


def _windows_to_score(
    rows: RowLayout, segment: Segment, starts: Tensor, ends: Tensor, topk: int
) -> list[tuple[int, int]] | None:
    """The ranges that need scores: a row with no more keys than ``topk`` takes them all."""
    ranges = host_ranges(rows, segment, starts, ends)
    if ranges is None:
        return None
    return [(low, high) if high - low > topk else (0, 0) for low, high in ranges]


def _ids(selected: Tensor, segment: Segment) -> Tensor:
    """The global ids of the selected keys, row after row, ascending."""
    return selected.nonzero()[:, 1].to(torch.int32).add_(segment.keys.start)
