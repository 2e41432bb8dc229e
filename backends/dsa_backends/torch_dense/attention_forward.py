"""Absorbed sparse attention: gather, dot, softmax, dot."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsa_backends.torch_dense._buffers import Buffer, BufferPlan, in_blocks
from dsa_backends.torch_dense._precision import stage_body
from dsa_backends.torch_dense._slots import (
    blocks,
    gather,
    key_buffers,
    mark_slots,
    slot_buffers,
    slot_numbers,
    used_width,
)
from dsa_backends.torch_dense._softmax import exponentials, normalise
from dsa_dispatch._call import RowLayout, StageOptions
from dsa_dispatch._contract import accumulation_dtype


def buffer_plan(
    *, width: int, heads: int, qk: int, v: int, dtype: torch.dtype, device_type: str, deterministic: bool
) -> BufferPlan:
    acc = accumulation_dtype(dtype)
    rows = (
        *slot_buffers(width),
        *key_buffers("keys", width, qk, dtype, acc),
        Buffer("query", heads * qk, acc),
        Buffer("scores", heads * width, acc),
        Buffer("peak", heads, acc),
        Buffer("total", heads, acc),
        Buffer("out", heads * v, acc),
    )
    return in_blocks(BufferPlan(rows, (slot_numbers(width),)), device_type, deterministic)


@stage_body
def attention_forward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    length: Tensor,
    *,
    scale: float,
    v_channels: int,
    rows: RowLayout,
    options: StageOptions,
) -> tuple[Tensor, Tensor]:
    """See ``dsa_dispatch._contract.AttentionForward``."""
    count, heads, qk = q.shape
    out = q.new_empty(count, heads, v_channels)
    lse = q.new_empty(count, heads, dtype=accumulation_dtype(q.dtype))
    workspace = buffer_plan(
        width=indices.shape[1],
        heads=heads,
        qk=qk,
        v=v_channels,
        dtype=q.dtype,
        device_type=q.device.type,
        deterministic=options.deterministic,
    ).allocate(count, q.device)
    for block in blocks(count, workspace.rows):
        width = used_width(length[block], indices.shape[1])
        if width == 0:
            out[block] = 0
            lse[block] = -math.inf
            continue
        n = block.stop - block.start
        absent, safe = mark_slots(workspace, indices[block, :width], length[block], kv.shape[0])
        keys = gather(workspace, "keys", kv, absent, safe)
        scores = workspace.take("scores", n, heads, width)
        query = workspace.take("query", n, heads, qk).copy_(q[block])
        torch.bmm(query, keys.transpose(1, 2), out=scores)
        scores.mul_(scale).masked_fill_(absent.unsqueeze(1), -math.inf)
        peak, total = workspace.take("peak", n, heads, 1), workspace.take("total", n, heads, 1)
        exponentials(scores, peak, total)
        lse_block = lse[block].unsqueeze(-1)
        torch.log(total, out=lse_block).add_(peak)
        result = workspace.take("out", n, heads, v_channels)
        torch.bmm(scores, keys[..., :v_channels], out=result)
        normalise(result, total)
        out[block] = result
    return out, lse
