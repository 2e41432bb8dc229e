"""Softmax over slots in place, finite for rows without a key."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def exponentials(scores: Tensor, peak: Tensor, total: Tensor) -> None:
    """``scores [..., W]`` become ``exp(score - peak)`` in place; ``peak`` and ``total [..., 1]`` are filled.

    -inf marks what is no key. A row of nothing but -inf has peak 0 and total 0, so ``log(total) + peak`` is -inf.
    """
    torch.amax(scores, -1, keepdim=True, out=peak)
    peak.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=0.0)
    scores.sub_(peak).exp_()
    torch.sum(scores, -1, keepdim=True, out=total)


def normalise(values: Tensor, total: Tensor) -> None:
    """Divide by the total of ``exponentials``: at least 1 wherever there is a key, and 0 divided by 1 where not."""
    total.clamp_min_(1.0)
    values.div_(total)


def probabilities(scores: Tensor, lse: Tensor) -> None:
    """``scores`` become ``exp(score - lse)`` in place; an lse of -inf (no key) gives 0. ``lse`` is overwritten."""
    lse.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=math.inf)
    scores.sub_(lse).exp_()
