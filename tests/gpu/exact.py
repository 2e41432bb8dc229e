"""Formulas in fp64 on the GPU, a chunk of rows at a time, and how far a result may be from them."""

from __future__ import annotations

import torch

CHUNK = 64

OUT, GRADIENT, LSE = 4e-3, 6e-3, 1e-4
"""The contract for bf16: relative Frobenius error against fp64, absolute for the lse; a row may be 3 times as bad."""


def valid_slots(indices, length, keys):
    ids = indices.to(torch.int64)
    return (ids >= 0) & (ids < keys) & (torch.arange(ids.shape[1], device=ids.device) < length[:, None])


def attention(q, kv, indices, length, dout, scale, dv):
    """``out, lse, dq, dkv`` in fp64 of flat rows: ``q [T, H, D]``, ``kv [S, D]``, ``indices [T, W]``."""
    valid = valid_slots(indices, length, len(kv))
    ids = torch.where(valid, indices.to(torch.int64), 0)
    # Keys that nobody names may hold NaN, which 0 * NaN would spread.
    used = torch.zeros(len(kv), dtype=torch.bool, device=kv.device)
    used[ids[valid]] = True
    kv64 = torch.where(used[:, None], kv.double(), 0.0)
    out, lse, dq = [], [], []
    dkv = torch.zeros_like(kv64)
    for first in range(0, len(q), CHUNK):
        part = slice(first, first + CHUNK)
        leaf = q[part].double().requires_grad_()
        picked = kv64[ids[part]].requires_grad_()
        scores = (scale * leaf @ picked.transpose(1, 2)).masked_fill(~valid[part][:, None], -torch.inf)
        here = torch.softmax(scores, -1).nan_to_num(0.0) @ picked[..., :dv]
        grads = torch.autograd.grad((here * dout[part].double()).sum(), (leaf, picked))
        out.append(here.detach())
        lse.append(torch.logsumexp(scores.detach(), -1))
        dq.append(grads[0].nan_to_num(0.0))
        weight = torch.where(valid[part][..., None], grads[1].nan_to_num(0.0), 0.0)
        dkv.index_add_(0, ids[part].flatten(), weight.flatten(0, 1))
    return torch.cat(out), torch.cat(lse), torch.cat(dq), dkv


def assert_close(got, want, limit, what, by_row=True):
    """Relative Frobenius error within ``limit``, and no row worse than 3 times that, by its own norm or the mean."""
    difference = (got.double() - want).flatten(1)
    want = want.flatten(1)
    assert not difference.isnan().any(), f"{what}: NaN"
    total = float(difference.norm() / want.norm().clamp_min(1e-300))
    assert total <= limit, f"{what}: relative error {total:.2g}, limit {limit:.2g}"
    if not by_row:
        return
    size = want.norm(dim=1).clamp_min(float(want.norm()) / max(len(want), 1) ** 0.5)
    worst = float((difference.norm(dim=1) / size.clamp_min(1e-300)).max())
    assert worst <= 3 * limit, f"{what}: a row with relative error {worst:.2g}, limit {3 * limit:.2g}"


def assert_lse(got, want, limit=LSE):
    finite = want.isfinite()
    assert torch.equal(got.isneginf(), want.isneginf())
    assert float((got.double() - want)[finite].abs().max()) <= limit
