"""Rotary position embedding in the two layouts that sparse-attention models mix."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_dispatch._run_config import ModelShape
from dsa_dispatch._run_config.shape import Rope


def angles(rows: int, shape: ModelShape, device: torch.device) -> Tensor:
    """Angle of each position and pair of channels, ``[rows, qk_rope / 2]``, fp32.

    ``angle[i, p] = i * theta ** (-2 p / qk_rope)`` (RoFormer, arXiv 2104.09864).
    """
    pairs = torch.arange(0, shape.qk_rope, 2, device=device, dtype=torch.float32)
    theta = 10000.0 if shape.rope_theta is None else shape.rope_theta
    frequency = theta ** (-pairs / max(shape.qk_rope, 1))
    return torch.outer(torch.arange(rows, device=device, dtype=torch.float32), frequency)


def rotate(x: Tensor, angle: Tensor, layout: Rope) -> Tensor:
    """Rotate pairs of channels of ``x [s, b, ..., r]`` by ``angle [s, r / 2]``, in fp32; x's dtype comes back.

    A pair is two neighbours (``interleaved``) or channel ``p`` and ``p + r / 2`` (``half_split``). The results differ
    by a permutation, so a query and its key must use the same one.
    """
    if layout == "none" or x.shape[-1] == 0:
        return x
    angle = angle.view(angle.shape[0], *[1] * (x.dim() - 2), angle.shape[1])
    cos, sin = angle.cos(), angle.sin()
    wide = x.float()
    if layout == "interleaved":
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    joined = torch.stack(turned, dim=-1).flatten(-2) if layout == "interleaved" else torch.cat(turned, dim=-1)
    return joined.to(x.dtype)
