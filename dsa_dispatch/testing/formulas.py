"""The stages as plain fp64 formulas over gathered keys: what a backend is compared with.

Everything is differentiable by autograd, so that gradients are derived and not written a second time. ``ids [T, W]``
are global and int64, -1 where a slot is no key; the dense forms are the same formulas with every key of the row as a
slot. ``k`` and ``v`` are ``[S, Hkv, D]``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_over(scores: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities over the last dimension, 0 where not ``valid``, and the natural logarithm of their sum."""
    scores = torch.where(valid, scores, 0.0)
    peak = torch.where(valid, scores.detach(), -torch.inf).amax(-1, keepdim=True)
    peak = torch.where(peak.isfinite(), peak, 0.0)
    masses = torch.where(valid, (scores - peak).exp(), 0.0)
    total = masses.sum(-1, keepdim=True)
    some = total > 0
    lse = torch.where(some, torch.where(some, total, 1.0).log() + peak, -torch.inf)
    return masses / torch.where(some, total, 1.0), lse[..., 0]


def gathered(keys: Tensor, ids: Tensor) -> Tensor:
    """``[T, W, ...]``: the named rows; zeros where a slot is no key, so that NaN elsewhere stays out."""
    valid = (ids >= 0).view(*ids.shape, *[1] * (keys.dim() - 1))
    return torch.where(valid, keys[ids.clamp(min=0)], 0.0)


def attention(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``out [T, H, Dv]`` and ``lse [T, H]``; query head ``h`` reads key head ``h // (H // Hkv)``."""
    rows, heads, channels = q.shape
    groups = k.shape[1]
    query = q.reshape(rows, groups, heads // groups, channels)
    scores = scale * torch.einsum("tngd,twnd->tngw", query, gathered(k, ids))
    probability, lse = softmax_over(scores, (ids >= 0)[:, None, None])
    out = torch.einsum("tngw,twnv->tngv", probability, gathered(v, ids))
    return out.reshape(rows, heads, -1), lse.reshape(rows, heads)


def teacher_mass(query: Tensor, key: Tensor, ids: Tensor, scale: float) -> Tensor:
    """``[T, W]``: attention probabilities summed over the heads."""
    scores = scale * torch.einsum("thd,twd->thw", query, gathered(key, ids))
    return softmax_over(scores, (ids >= 0)[:, None])[0].sum(1)


def index_scores(q: Tensor, k: Tensor, w: Tensor, ids: Tensor, use_relu: bool) -> Tensor:
    """``[T, W]``: ``sum_h w f(q . k)``."""
    dots = torch.einsum("thd,twd->thw", q, gathered(k, ids))
    return torch.einsum("thw,th->tw", dots.relu() if use_relu else dots, w)


def index_score_bound(q: Tensor, k: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    """``[T, W]``: the sum of absolute products, which a declared ``score_error`` is relative to."""
    return index_scores(q.abs(), k.abs(), w.abs(), ids, use_relu=False)


def divergence(q: Tensor, k: Tensor, w: Tensor, ids: Tensor, mass: Tensor, use_relu: bool) -> Tensor:
    """``kl [T]`` of the indexer's softmax from the normalised mass."""
    valid = ids >= 0
    target = mass / mass.sum(-1, keepdim=True).clamp(min=1e-10)
    scores = index_scores(q, k, w, ids, use_relu)
    _, lse = softmax_over(scores, valid)
    log_p = scores - torch.where(lse.isfinite(), lse, 0.0)[:, None]
    terms = target * (target.clamp(min=1e-10).log() - log_p)
    return torch.where(valid & (target > 0), terms, 0.0).sum(-1)
