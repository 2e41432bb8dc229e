"""Gradients of absorbed sparse attention, written out; probabilities are computed anew.

With ``P = softmax(scale * q k)``, ``dP = dout v`` and ``dS = scale * P * (dP - sum P dP)``: ``dq = dS k``
and ``dk = dS^T q``, to which the value part adds ``P^T dout`` in the first ``v_channels``. The saved ``out`` and
``lse`` would spare two sums, but ``dout * out`` carries the rounding of a bf16 ``out``: with activations scaled
by 30, where softmax saturates and ``dS`` is a small difference, that made dq wrong by 2 %.
"""

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


def buffer_plan(
    *, width: int, heads: int, qk: int, dtype: torch.dtype, device_type: str, deterministic: bool
) -> BufferPlan:
    acc = accumulation_dtype(dtype)
    rows = (
        *slot_buffers(width),
        *key_buffers("keys, then their gradient", width, qk, dtype, acc),
        Buffer("query, dout, query", 3 * heads * qk, acc),
        Buffer("probabilities and score gradient", 2 * heads * width, acc),
        Buffer("dq", heads * qk, acc),
        Buffer("peak, then mean gradient", heads, acc),
        Buffer("total", heads, acc),
    )
    loose = scatter_buffers(width, device_type, deterministic)
    return in_blocks(BufferPlan(rows, (slot_numbers(width),), loose), device_type, deterministic)


@stage_body
def attention_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    length: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    scale: float,
    v_channels: int,
    need_dq: bool,
    dkv: Tensor | None,
    rows: RowLayout,
    options: StageOptions,
) -> Tensor | None:
    """See ``dsa_dispatch._contract.AttentionBackward``."""
    if not need_dq and dkv is None:
        return None
    count, heads, qk = q.shape
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if need_dq else None
    workspace = buffer_plan(
        width=indices.shape[1],
        heads=heads,
        qk=qk,
        dtype=q.dtype,
        device_type=q.device.type,
        deterministic=options.deterministic,
    ).allocate(count, q.device)
    for block in blocks(count, workspace.rows):
        width = used_width(length[block], indices.shape[1])
        if width == 0:
            continue
        n = block.stop - block.start
        absent, safe = mark_slots(workspace, indices[block, :width], length[block], kv.shape[0])
        keys = gather(workspace, "keys, then their gradient", kv, absent, safe)
        # One product gives scores and dout·v, one gives both parts of the key gradient: dout is padded to the
        # key's width with zeros, and q stands on both sides of it.
        stack = workspace.take("query, dout, query", n, 3 * heads, qk)
        stack[:, :heads] = q[block]
        stack[:, heads : 2 * heads, :v_channels] = dout[block]
        stack[:, heads : 2 * heads, v_channels:] = 0
        stack[:, 2 * heads :] = q[block]
        both = workspace.take("probabilities and score gradient", n, 2 * heads, width)
        torch.bmm(stack[:, : 2 * heads], keys.transpose(1, 2), out=both)
        p, ds = both[:, :heads], both[:, heads:]
        p.mul_(scale).masked_fill_(absent.unsqueeze(1), -math.inf)
        peak = workspace.take("peak, then mean gradient", n, heads, 1)
        total = workspace.take("total", n, heads, 1)
        exponentials(p, peak, total)
        normalise(p, total)
        to_score_gradient(ds, p, mean=peak, scale=scale)
        both.masked_fill_(absent.unsqueeze(1), 0)
        if dq is not None:
            dq[block] = torch.bmm(ds, keys, out=workspace.take("dq", n, heads, qk))
        if dkv is not None:
            torch.bmm(both.transpose(1, 2), stack[:, heads:], out=keys)
            scatter_add(dkv, safe, keys, absent, options.deterministic)
    return dq
