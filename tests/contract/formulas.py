"""The contract as dense fp64 formulas over all keys: no ids are gathered, no row is chunked, nothing is fused.

Everything is differentiable by autograd, so that gradients are derived and not written a second time. Shapes are the
caller's: ``q [sq, b, h, d]``, ``k [sk, b, hkv, d]``, ids ``[b, sq, W]``, masks and counts ``[b, sq, sk]``.
"""

from __future__ import annotations

import math

import torch

NO_KEY = -1e300
"""Below every finite score: where a row has no key, it stands for the maximum of nothing."""


def naming_counts(indices, length, keys):
    """How often each row names each key, ``[b, sq, sk]`` fp64: ids judged one by one, in Python's integers."""
    batch, rows, width = indices.shape
    counts = torch.zeros(batch, rows, keys, dtype=torch.float64)
    for item in range(batch):
        for row in range(rows):
            used = width if length is None else min(max(int(length[item, row]), 0), width)
            for slot in indices[item, row, :used].tolist():
                if 0 <= slot < keys:
                    counts[item, row, slot] += 1
    return counts


def grouped(query, key, value, counts, scale):
    """``out [sq, b, h, dv]`` and ``lse [b, sq, h]``; a key named n times weighs n times."""
    group = query.shape[2] // key.shape[2]
    query = query.double()
    key, value = (tensor.double().repeat_interleave(group, 2) for tensor in (key, value))
    scores = scale * torch.einsum("ibhd,jbhd->bihj", query, key)
    weight = counts[:, :, None]
    peak = scores.detach().masked_fill(weight == 0, NO_KEY).amax(-1, keepdim=True)
    masses = weight * torch.where(weight > 0, scores - peak, 0).exp()
    total = masses.sum(-1, keepdim=True)
    lse = torch.where(total > 0, total.log() + peak, -math.inf)[..., 0]
    probabilities = masses / torch.where(total > 0, total, 1)
    return torch.einsum("bihj,jbhv->ibhv", probabilities, value), lse


def absorbed(query, key, counts, scale, v_channels):
    return grouped(query, key, key[..., :v_channels], counts, scale)


def bounds_mask(starts, ends, rows, batch, keys):
    """``[b, sq, sk]`` bool: the keys that a row may choose."""
    mask = torch.zeros(batch, rows, keys, dtype=torch.bool)
    for item in range(batch):
        for row in range(rows):
            if starts is None:
                first, last = 0, keys - rows + row + 1
            else:
                first, last = (
                    int(bound[row] if bound.dim() == 1 else bound[item, row]) for bound in (starts, ends)
                )
            mask[item, row, max(first, 0) : max(min(last, keys), max(first, 0))] = True
    return mask


def index_scores(q, k, weights, use_relu):
    """``[b, sq, sk]``: ``sum_h w f(q . k)``."""
    dots = torch.einsum("ibhd,jbd->bihj", q.double(), k.double())
    return torch.einsum("bihj,ibh->bij", dots.relu() if use_relu else dots, weights.double())


def best_keys(scores, allowed, topk):
    """Ids of one row: higher score first, then lower id. ``scores`` and ``allowed`` are Python lists."""
    candidates = [key for key, fits in enumerate(allowed) if fits]
    return set(sorted(candidates, key=lambda key: (-(scores[key] + 0.0), key))[:topk])


def chosen_mask(scores, mask, topk):
    """``[b, sq, sk]`` bool: the selection of every row."""
    chosen = torch.zeros_like(mask)
    for item in range(mask.shape[0]):
        for row in range(mask.shape[1]):
            for key in best_keys(scores[item, row].tolist(), mask[item, row].tolist(), topk):
                chosen[item, row, key] = True
    return chosen


def teacher(query, key, support, scale):
    """``[b, sq, sk]``: attention over the support, summed over heads and normalised; 0 where there is none."""
    scores = scale * torch.einsum("ibhd,jbd->bihj", query.double(), key[:, :, 0].double())
    mass = _softmax(scores, support[:, :, None]).sum(2)
    return mass / mass.sum(-1, keepdim=True).clamp_min(1e-10)


def loss(q, k, weights, query, key, support, valid, scale, coefficient, per_token, use_relu):
    """KL of the indexer's softmax from the teacher over ``support``, over the number of valid rows."""
    if not support.numel():
        return 0.0 * (q.sum() + k.sum() + weights.sum()).double()
    target = teacher(query, key, support, scale).detach()
    scores = index_scores(q, k, weights, use_relu)
    peak = scores.detach().masked_fill(~support, NO_KEY).amax(-1, keepdim=True)
    shifted = torch.where(support, scores - peak, 0)
    total = torch.where(support, shifted.exp(), 0).sum(-1, keepdim=True)
    log_p = shifted - torch.where(total > 0, total, 1).log()
    terms = torch.where(support & (target > 0), target * (target.clamp_min(1e-10).log() - log_p), 0)
    rows = (
        torch.ones(support.shape[:2], dtype=torch.bool) if valid is None else valid.expand(support.shape[:2])
    )
    total_kl = (terms.sum(-1) * rows).sum()
    return coefficient * (total_kl if per_token else total_kl / max(1, int(rows.sum())))


def _softmax(scores, support):
    peak = scores.masked_fill(~support, NO_KEY).amax(-1, keepdim=True)
    masses = torch.where(support, (scores - peak).clamp_max(0).exp(), 0)
    total = masses.sum(-1, keepdim=True)
    return masses / torch.where(total > 0, total, 1)


def relative(got, wanted):
    """Relative Frobenius norm of the difference, over the whole tensor."""
    wanted = wanted.double()
    return float((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-300))


def check_form(indices, length, batch, rows, topk):
    """int32, contiguous, as wide as asked; valid ids first and each once, then -1; no gradient."""
    assert (indices.dtype, indices.shape, indices.is_contiguous()) == (torch.int32, (batch, rows, topk), True)
    assert (length.dtype, length.shape, length.is_contiguous()) == (torch.int32, (batch, rows), True)
    used = torch.arange(topk) < length[..., None]
    assert (indices[used] >= 0).all()
    assert (indices[~used] == -1).all()
    assert not indices.requires_grad
    for row in indices.flatten(0, 1):
        ids = row[row >= 0].tolist()
        assert len(ids) == len(set(ids))
