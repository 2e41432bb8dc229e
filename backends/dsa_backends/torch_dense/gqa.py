"""Grouped-query sparse attention, one key/value head after the other, so that the scratch is that of one."""

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
    scatter_add,
    scatter_buffers,
    slot_buffers,
    slot_numbers,
    used_width,
)
from dsa_backends.torch_dense._softmax import exponentials, normalise, to_score_gradient
from dsa_dispatch._call import RowLayout, StageOptions
from dsa_dispatch._contract import accumulation_dtype


def forward_plan(
    *, width: int, group: int, qk: int, v: int, dtype: torch.dtype, device_type: str, deterministic: bool
) -> BufferPlan:
    """``group`` query heads read one key/value head."""
    acc = accumulation_dtype(dtype)
    rows = (
        *slot_buffers(width),
        *key_buffers("keys", width, qk, dtype, acc),
        *key_buffers("values", width, v, dtype, acc),
        Buffer("query", group * qk, acc),
        Buffer("scores", group * width, acc),
        Buffer("peak", group, acc),
        Buffer("total", group, acc),
        Buffer("out", group * v, acc),
    )
    return in_blocks(BufferPlan(rows, (slot_numbers(width),)), device_type, deterministic)


def backward_plan(
    *, width: int, group: int, qk: int, v: int, dtype: torch.dtype, device_type: str, deterministic: bool
) -> BufferPlan:
    acc = accumulation_dtype(dtype)
    rows = (
        *slot_buffers(width),
        *key_buffers("keys, then dk", width, qk, dtype, acc),
        *key_buffers("values, then dv", width, v, dtype, acc),
        Buffer("query", group * qk, acc),
        Buffer("dout", group * v, acc),
        Buffer("probabilities", group * width, acc),
        Buffer("score gradient", group * width, acc),
        Buffer("dq", group * qk, acc),
        Buffer("peak, then mean gradient", group, acc),
        Buffer("total", group, acc),
    )
    loose = scatter_buffers(width, device_type, deterministic)
    return in_blocks(BufferPlan(rows, (slot_numbers(width),), loose), device_type, deterministic)


@stage_body
def gqa_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    length: Tensor,
    *,
    scale: float,
    rows: RowLayout,
    options: StageOptions,
) -> tuple[Tensor, Tensor]:
    """See ``dsa_dispatch._contract.GqaForward``."""
    count, heads, qk = q.shape
    group, values_width = heads // k.shape[1], v.shape[2]
    out = q.new_empty(count, heads, values_width)
    lse = q.new_empty(count, heads, dtype=accumulation_dtype(q.dtype))
    workspace = forward_plan(
        width=indices.shape[1],
        group=group,
        qk=qk,
        v=values_width,
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
        absent, safe = mark_slots(workspace, indices[block, :width], length[block], k.shape[0])
        for head in range(k.shape[1]):
            mine = slice(head * group, (head + 1) * group)
            keys = gather(workspace, "keys", k[:, head], absent, safe)
            query = workspace.take("query", n, group, qk).copy_(q[block, mine])
            scores = workspace.take("scores", n, group, width)
            torch.bmm(query, keys.transpose(1, 2), out=scores)
            scores.mul_(scale).masked_fill_(absent.unsqueeze(1), -math.inf)
            peak, total = workspace.take("peak", n, group, 1), workspace.take("total", n, group, 1)
            exponentials(scores, peak, total)
            lse_part = lse[block, mine].unsqueeze(-1)
            torch.log(total, out=lse_part).add_(peak)
            values = gather(workspace, "values", v[:, head], absent, safe)
            result = workspace.take("out", n, group, values_width)
            torch.bmm(scores, values, out=result)
            normalise(result, total)
            out[block, mine] = result
    return out, lse


@stage_body
def gqa_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    length: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    scale: float,
    need_dq: bool,
    dk: Tensor | None,
    dv: Tensor | None,
    rows: RowLayout,
    options: StageOptions,
) -> Tensor | None:
    """See ``dsa_dispatch._contract.GqaBackward``; the formulas are those of ``attention_backward``."""
    if not need_dq and dk is None and dv is None:
        return None
    count, heads, qk = q.shape
    group, values_width = heads // k.shape[1], v.shape[2]
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if need_dq else None
    workspace = backward_plan(
        width=indices.shape[1],
        group=group,
        qk=qk,
        v=values_width,
        dtype=q.dtype,
        device_type=q.device.type,
        deterministic=options.deterministic,
    ).allocate(count, q.device)
    for block in blocks(count, workspace.rows):
        width = used_width(length[block], indices.shape[1])
        if width == 0:
            continue
        n = block.stop - block.start
        absent, safe = mark_slots(workspace, indices[block, :width], length[block], k.shape[0])
        for head in range(k.shape[1]):
            mine = slice(head * group, (head + 1) * group)
            keys = gather(workspace, "keys, then dk", k[:, head], absent, safe)
            query = workspace.take("query", n, group, qk).copy_(q[block, mine])
            dout_part = workspace.take("dout", n, group, values_width).copy_(dout[block, mine])
            p = workspace.take("probabilities", n, group, width)
            torch.bmm(query, keys.transpose(1, 2), out=p)
            p.mul_(scale).masked_fill_(absent.unsqueeze(1), -math.inf)
            peak = workspace.take("peak, then mean gradient", n, group, 1)
            total = workspace.take("total", n, group, 1)
            exponentials(p, peak, total)
            normalise(p, total)
            p.masked_fill_(absent.unsqueeze(1), 0)
            if dq is not None or dk is not None:
                values = gather(workspace, "values, then dv", v[:, head], absent, safe)
                ds = workspace.take("score gradient", n, group, width)
                torch.bmm(dout_part, values.transpose(1, 2), out=ds)
                to_score_gradient(ds, p, mean=peak, scale=scale)
                ds.masked_fill_(absent.unsqueeze(1), 0)
                if dq is not None:
                    dq[block, mine] = torch.bmm(ds, keys, out=workspace.take("dq", n, group, qk))
                if dk is not None:
                    torch.bmm(ds.transpose(1, 2), query, out=keys)
                    scatter_add(dk[:, head], safe, keys, absent, options.deterministic)
            if dv is not None:
                part = workspace.take("values, then dv", n, width, values_width)
                torch.bmm(p.transpose(1, 2), dout_part, out=part)
                scatter_add(dv[:, head], safe, part, absent, options.deterministic)
    return dq
