"""Rotary position embedding in the two conventions that sparse-attention models mix."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch.errors import InvalidInputError

Rope = Literal["half_split", "interleaved"]
"""A pair is channel ``p`` with ``p + r / 2`` (DeepSeek-V3.2's indexer), or two neighbours (GLM-5's)."""


def rope_angles(positions: Tensor, channels: int, theta: float = 10000.0) -> Tensor:
    """``angle[i, p] = positions[i] * theta ** (-2 p / channels)`` in fp32, ``[..., channels / 2]`` (arXiv
    2104.09864)."""
    pairs = torch.arange(0, channels, 2, device=positions.device, dtype=torch.float32)
    return positions[..., None].float() * theta ** (-pairs / channels)


def rotate(x: Tensor, angles: Tensor, rope: Rope) -> Tensor:
    """Turn the first ``r`` channels of ``x [s, b, ..., d]`` by ``angles [s, r / 2]`` or ``[s, b, r / 2]``; the others
    stay.

    Computed in fp32 (fp64), returned in x's dtype. The conventions differ by a permutation of channels, so a query and
    its key need the same one. Raises ``InvalidInputError`` for a convention that is neither.
    """
    if rope not in get_args(Rope):
        raise InvalidInputError(f"rotate: rope: got {rope!r}, expected 'half_split' or 'interleaved'")
    turning, still = x[..., : 2 * angles.shape[-1]], x[..., 2 * angles.shape[-1] :]
    between = x.dim() - angles.dim()
    angles = angles.reshape(*angles.shape[:-1], *[1] * between, angles.shape[-1])
    cos, sin = angles.cos(), angles.sin()
    wide = turning.to(accumulation_dtype(x.dtype))
    if rope == "interleaved":
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    joined = torch.stack(turned, dim=-1).flatten(-2) if rope == "interleaved" else torch.cat(turned, dim=-1)
    return torch.cat([joined.to(x.dtype), still], dim=-1)
