"""The stages written down in fp64 with plain loops over rows: what the kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def slots_of(indices: Tensor, length: Tensor, keys: int) -> list[Tensor]:
    """Per row, the slots that hold a key, ascending."""
    out = []
    for row, count in zip(indices, length.tolist(), strict=True):
        ids = row.to(torch.int64)
        valid = (ids >= 0) & (ids < keys) & (torch.arange(len(ids)) < count)
        out.append(valid.nonzero().flatten())
    return out


def attention(
    q: Tensor, kv: Tensor, indices: Tensor, length: Tensor, scale: float, dv: int
) -> tuple[Tensor, Tensor]:
    q64, kv64 = q.double(), kv.double()
    rows = []
    lses = []
    for row, slots in enumerate(slots_of(indices, length, len(kv))):
        if len(slots) == 0:
            rows.append(q64[row, :, :dv] * 0)
            lses.append(torch.full((q.shape[1],), -torch.inf, dtype=torch.float64))
            continue
        picked = kv64[indices[row, slots].long()]
        scores = scale * q64[row] @ picked.T
        lses.append(torch.logsumexp(scores, -1))
        rows.append(torch.softmax(scores, -1) @ picked[:, :dv])
    return torch.stack(rows), torch.stack(lses)


def attention_gradients(
    q: Tensor, kv: Tensor, indices: Tensor, length: Tensor, dout: Tensor, scale: float, dv: int
) -> tuple[Tensor, Tensor]:
    q64 = q.double().requires_grad_()
    kv64 = kv.double().requires_grad_()
    out, _ = attention(q64, kv64, indices, length, scale, dv)
    dq, dkv = torch.autograd.grad((out * dout.double()).sum(), (q64, kv64), allow_unused=True)
    zero_q, zero_kv = torch.zeros_like(q64), torch.zeros_like(kv64)
    return (zero_q if dq is None else dq), (zero_kv if dkv is None else dkv)


def relative(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of the exact result."""
    error = (got.double() - want.double()).norm()
    return float(error / want.double().norm().clamp_min(1e-30))
