"""Softmax over slots in place, finite for rows without a key."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def exponentials(scores: Tensor, peak: Tensor, total: Tensor) -> None:
    """``scores [..., W]`` become ``exp(score - peak)`` in place; fills ``peak`` and ``total [..., 1]``.

    -inf marks what is no key. A row of nothing but -inf has peak 0 and total 0, so that its
    ``log(total) + peak`` is -inf.
    """
    torch.amax(scores, -1, keepdim=True, out=peak)
    peak.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=0.0)
    scores.sub_(peak).exp_()
    torch.sum(scores, -1, keepdim=True, out=total)


def normalise(values: Tensor, total: Tensor) -> None:
    """Divide by the total of ``exponentials``: at least 1 where there is a key, and 1 where there is none."""
    total.clamp_min_(1.0)
    values.div_(total)


def probabilities(scores: Tensor, lse: Tensor) -> None:
    """``scores`` become ``exp(score - lse)`` in place, 0 for an lse of -inf (no key). Overwrites ``lse``."""
    lse.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=math.inf)
    scores.sub_(lse).exp_()


def to_score_gradient(gradient: Tensor, p: Tensor, *, mean: Tensor, scale: float) -> None:
    """``dP`` becomes ``scale * P * (dP - sum P dP)`` in place. ``mean [..., 1]`` receives the sum."""
    gradient.mul_(p)
    torch.sum(gradient, -1, keepdim=True, out=mean)
    gradient.addcmul_(p, mean, value=-1).mul_(scale)
