"""Small random inputs in the caller's layout, from a seed."""

from __future__ import annotations

import torch


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=torch.float64, scale=1.0, grad=False):
    values = torch.randn(shape, generator=generator(seed), dtype=torch.float64) * scale
    return values.to(dtype).requires_grad_(grad)


def ids(batch, rows, width, keys, seed=0, dtype=torch.int32, holes=True):
    """Ids of ``[-1, sk]`` with holes and, since they are drawn with replacement, duplicates."""
    low, high = (-1, keys + 1) if holes else (0, max(keys, 1))
    return torch.randint(low, high, (batch, rows, width), generator=generator(seed)).to(dtype)


def apart(rows, batch, heads, keys, channels, seed=0):
    """``q, k, w`` whose dots are away from zero and whose scores are away from each other, in fp64.

    Derivatives are asked at points where neither the ReLU nor the selection may flip under a finite difference.
    """
    for attempt in range(200):
        q = normal(rows, batch, heads, channels, seed=seed + 3 * attempt)
        k = normal(keys, batch, channels, seed=seed + 3 * attempt + 1)
        w = normal(rows, batch, heads, seed=seed + 3 * attempt + 2)
        dots = torch.einsum("ibhd,jbd->bihj", q, k)
        scores = (dots.relu() * w.permute(1, 0, 2)[..., None]).sum(2).flatten(0, 1)
        gaps = scores.sort(-1).values.diff(dim=-1) if keys > 1 else torch.ones(1)
        if dots.abs().min() > 1e-3 and gaps.min() > 1e-3:
            return q, k, w
    raise AssertionError("no draw kept its scores apart")
