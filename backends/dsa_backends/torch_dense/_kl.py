"""KL divergence of the indexer's softmax from the teacher's mass, and its gradient in the scores."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from dsa_backends.torch_dense._buffers import Buffer, Workspace
from dsa_backends.torch_dense._softmax import exponentials

FLOOR: Final = 1e-10
"""Lower bound of a row's mass and of a probability under the logarithm, as in the published loss."""


def kl_buffers(columns: int, acc: torch.dtype) -> tuple[Buffer, ...]:
    """Per row: what ``kl_rows`` needs beside the scores."""
    return (
        Buffer("probabilities", columns, acc),
        Buffer("target", columns, acc),
        Buffer("log target", columns, acc),
        Buffer("target is zero", columns, torch.bool),
        Buffer("peak", 1, acc),
        Buffer("total", 1, acc),
        Buffer("mass of the row", 1, acc),
    )


def kl_rows(workspace: Workspace, scores: Tensor, mass: Tensor, absent: Tensor, kl: Tensor) -> Tensor:
    """Fill ``kl [n]`` and return ``d kl / d score [n, C]``, which lies in the memory of ``scores``.

    ``T = mass / max(sum mass, 1e-10)``, ``kl = sum T (log max(T, 1e-10) - log P)``, gradient ``P sum T - T``.
    A column with ``T = 0`` adds nothing, even where ``log P`` is -inf.
    """
    n = scores.shape[0]
    scores.masked_fill_(absent, -math.inf)
    p = workspace.take("probabilities", *scores.shape).copy_(scores)
    peak, total = workspace.take("peak", n, 1), workspace.take("total", n, 1)
    exponentials(p, peak, total)
    p.div_(total.clamp_min_(1.0))
    log_p = scores.sub_(peak).sub_(total.log_())
    target = workspace.take("target", *scores.shape).copy_(mass).masked_fill_(absent, 0)
    row_mass = torch.sum(target, 1, keepdim=True, out=workspace.take("mass of the row", n, 1))
    target.div_(row_mass.clamp_min_(FLOOR))
    terms = torch.clamp_min(target, FLOOR, out=workspace.take("log target", *scores.shape))
    terms.log_().sub_(log_p).mul_(target)
    is_zero = torch.eq(target, 0, out=workspace.take("target is zero", *scores.shape))
    torch.sum(terms.masked_fill_(is_zero, 0), 1, out=kl)
    weight = torch.sum(target, 1, keepdim=True, out=row_mass)
    gradient = torch.mul(p, weight, out=scores)
    return gradient.sub_(target).masked_fill_(absent, 0)
