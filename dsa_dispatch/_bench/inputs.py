"""The tensors of a case, in the shapes of the public operations. What an external peer is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_dispatch._bench.case import Case
from dsa_dispatch._bench.patterns import indices_of


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """``query [rows, 1, heads, qk]``, ``key [keys, 1, 1, qk]``, ``indices [1, rows, topk]`` int32, all valid, ``dout
    [rows, 1, heads, v]``."""

    case: Case
    query: Tensor
    key: Tensor
    indices: Tensor
    dout: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TopKInputs:
    """``q [rows, 1, index heads, channels]``, ``k [keys, 1, channels]``, ``weights [rows, 1, index heads]`` fp32.
    Causal."""

    case: Case
    q: Tensor
    k: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """The sparse loss of the keys in ``attention.indices``, its teacher ``attention.query`` and ``attention.key``."""

    case: Case
    indexer: TopKInputs
    attention: AttentionInputs


Inputs = AttentionInputs | TopKInputs | LossInputs


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Normal numbers, the same on every run. Raises ``ConfigError`` where the pattern does not fit the case."""
    if case.stage == "indexer_topk":
        return _topk(case, device)
    if case.stage == "indexer_loss":
        attention = _attention(case, device)
        return LossInputs(case, _topk(case, device), attention)
    return _attention(case, device)


def _attention(case: Case, device: torch.device) -> AttentionInputs:
    # First, since a pattern may not fit the case: nothing large has been made then.
    indices = indices_of(case, device)[None]
    draw = _Draw(case, device)
    return AttentionInputs(
        case,
        draw(case.rows, 1, case.heads, case.qk_channels),
        draw(case.keys, 1, 1, case.qk_channels),
        indices,
        draw(case.rows, 1, case.heads, case.v_channels),
    )


def _topk(case: Case, device: torch.device) -> TopKInputs:
    draw = _Draw(case, device)
    weights = draw(case.rows, 1, case.index_heads).float()
    return TopKInputs(
        case,
        draw(case.rows, 1, case.index_heads, case.index_channels),
        draw(case.keys, 1, case.index_channels),
        weights * (case.index_heads * case.index_channels) ** -0.5,
    )


class _Draw:
    def __init__(self, case: Case, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(0)
        self.dtype, self.device = getattr(torch, case.dtype), device

    def __call__(self, *shape: int) -> Tensor:
        # In the type itself: an fp32 draw of a long sequence would need more memory than the case.
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
