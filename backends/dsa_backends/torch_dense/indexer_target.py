"""The teacher of the indexer: attention mass per key, summed over heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsa_backends.torch_dense._buffers import Buffer, BufferPlan, in_blocks
from dsa_backends.torch_dense._precision import stage_body
from dsa_backends.torch_dense._rows import key_numbers, mark_range, range_buffers, segments
from dsa_backends.torch_dense._slots import (
    blocks,
    gather,
    key_buffers,
    mark_slots,
    slot_buffers,
    slot_numbers,
    used_width,
)
from dsa_backends.torch_dense._softmax import exponentials, normalise, probabilities
from dsa_dispatch._call import RowLayout, StageOptions
from dsa_dispatch._contract import accumulation_dtype


def sparse_plan(
    *, width: int, heads: int, qk: int, dtype: torch.dtype, device_type: str, deterministic: bool
) -> BufferPlan:
    acc = accumulation_dtype(dtype)
    rows = (
        *slot_buffers(width),
        *key_buffers("keys", width, qk, dtype, acc),
        Buffer("query", heads * qk, acc),
        Buffer("scores", heads * width, acc),
        Buffer("peak or lse", heads, acc),
        Buffer("total", heads, acc),
        Buffer("mass", width, acc),
    )
    return in_blocks(BufferPlan(rows, (slot_numbers(width),)), device_type, deterministic)


def dense_plan(*, keys: int, qk: int, dtype: torch.dtype) -> BufferPlan:
    """One head at a time, so nothing has a size of rows × keys × heads."""
    acc = accumulation_dtype(dtype)
    rows = (
        *range_buffers(keys),
        Buffer("query", qk, acc),
        Buffer("scores", keys, acc),
        Buffer("peak or lse", 1, acc),
        Buffer("total", 1, acc),
    )
    return BufferPlan(rows, (key_numbers(keys), Buffer("keys", keys * qk, acc)))


@stage_body
def indexer_target(
    query: Tensor,
    key: Tensor,
    *,
    indices: Tensor | None,
    length: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    lse: Tensor | None,
    scale: float,
    rows: RowLayout,
    options: StageOptions,
) -> Tensor:
    """See ``dsa_dispatch._contract.IndexerTarget``."""
    if indices is None:
        return _dense(query, key, starts, ends, lse, scale, rows)
    assert length is not None
    return _sparse(query, key, indices, length, lse, scale, options)


def _sparse(
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    length: Tensor,
    lse: Tensor | None,
    scale: float,
    options: StageOptions,
) -> Tensor:
    count, heads, qk = query.shape
    mass = torch.zeros(indices.shape, dtype=accumulation_dtype(query.dtype), device=query.device)
    workspace = sparse_plan(
        width=indices.shape[1],
        heads=heads,
        qk=qk,
        dtype=query.dtype,
        device_type=query.device.type,
        deterministic=options.deterministic,
    ).allocate(count, query.device)
    for block in blocks(count, workspace.rows):
        width = used_width(length[block], indices.shape[1])
        if width == 0:
            continue
        n = block.stop - block.start
        absent, safe = mark_slots(workspace, indices[block, :width], length[block], key.shape[0])
        keys = gather(workspace, "keys", key, absent, safe)
        scores = workspace.take("scores", n, heads, width)
        torch.bmm(workspace.take("query", n, heads, qk).copy_(query[block]), keys.transpose(1, 2), out=scores)
        scores.mul_(scale).masked_fill_(absent.unsqueeze(1), -math.inf)
        _to_probabilities(
            scores,
            None if lse is None else lse[block].unsqueeze(-1),
            workspace.take("peak or lse", n, heads, 1),
            workspace.take("total", n, heads, 1),
        )
        mass[block, :width] = torch.sum(scores, 1, out=workspace.take("mass", n, width))
    return mass


def _dense(
    query: Tensor,
    key: Tensor,
    starts: Tensor,
    ends: Tensor,
    lse: Tensor | None,
    scale: float,
    rows: RowLayout,
) -> Tensor:
    count, heads, qk = query.shape
    mass = torch.zeros(count, rows.keys, dtype=accumulation_dtype(query.dtype), device=query.device)
    workspace = dense_plan(keys=rows.keys, qk=qk, dtype=query.dtype).allocate(count, query.device)
    for segment in segments(rows, count):
        n = segment.count
        absent = mark_range(workspace, segment, starts, ends)
        keys = workspace.take("keys", rows.keys, qk).copy_(key[segment.keys])
        scores = workspace.take("scores", n, rows.keys)
        for head in range(heads):
            head_query = workspace.take("query", n, qk).copy_(query[segment.rows, head])
            torch.mm(head_query, keys.t(), out=scores)
            scores.mul_(scale).masked_fill_(absent, -math.inf)
            _to_probabilities(
                scores,
                None if lse is None else lse[segment.rows, head].unsqueeze(-1),
                workspace.take("peak or lse", n, 1),
                workspace.take("total", n, 1),
            )
            mass[segment.rows].add_(scores)
    return mass


def _to_probabilities(scores: Tensor, lse: Tensor | None, peak: Tensor, total: Tensor) -> None:
    if lse is None:
        exponentials(scores, peak, total)
        normalise(scores, total)
    else:
        probabilities(scores, peak.copy_(lse))
