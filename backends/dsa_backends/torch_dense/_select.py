"""The best keys of a row: higher score, then lower id. -0.0 equals +0.0, -inf is lowest, NaN highest."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_backends.torch_dense._buffers import Buffer, Workspace


def _ordered_type(acc: torch.dtype) -> torch.dtype:
    return torch.int64 if acc == torch.float64 else torch.int32


def select_buffers(keys: int, chosen: int, acc: torch.dtype) -> tuple[Buffer, ...]:
    """Per row: what ``select`` needs to choose ``chosen`` of ``keys``."""
    order = _ordered_type(acc)
    return (
        Buffer("sign bits, then ties so far", keys, order),
        Buffer("selected", keys, torch.bool),
        Buffer("selection test", keys, torch.bool),
        Buffer("best scores", chosen, order),
        Buffer("best places", chosen, torch.int64),
        Buffer("lowest best score", 1, order),
        Buffer("above it", 1, torch.int64),
        Buffer("room for ties", 1, order),
    )


def as_ordered_integers(workspace: Workspace, scores: Tensor, absent: Tensor) -> Tensor:
    """The scores, in place, as integers of the same order: the least where absent, the greatest for NaN."""
    kind = _ordered_type(scores.dtype)
    limits = torch.iinfo(kind)
    is_nan = workspace.take("selected", *scores.shape)
    torch.ne(scores, scores, out=is_nan)
    scores.add_(0.0)  # -0.0 becomes +0.0
    order = scores.view(kind)
    sign = workspace.take("sign bits, then ties so far", *scores.shape)
    torch.bitwise_right_shift(order, limits.bits - 1, out=sign)
    order.bitwise_xor_(sign.bitwise_and_(limits.max))  # a negative float's bits run backwards
    return order.masked_fill_(is_nan, limits.max).masked_fill_(absent, limits.min)


def select(workspace: Workspace, scores: Tensor, absent: Tensor, length: Tensor, chosen: int) -> Tensor:
    """``[n, keys]`` bool: the ``length[t] <= chosen`` best present keys of a row. ``scores`` is overwritten.

    The threshold is the worst of torch's ``chosen`` best, which is exact whatever torch does with ties; of
    the keys that equal it, the first ones are taken.
    """
    order = as_ordered_integers(workspace, scores, absent)
    rows = order.shape[0]
    best = workspace.take("best scores", rows, chosen)
    places = workspace.take("best places", rows, chosen)
    torch.topk(order, chosen, dim=1, sorted=False, out=(best, places))
    lowest = torch.amin(best, 1, keepdim=True, out=workspace.take("lowest best score", rows, 1))
    above = workspace.take("above it", rows, 1)
    torch.sum(torch.gt(best, lowest, out=places), 1, keepdim=True, out=above)
    # In the type of ``ties``: a comparison of two integer types converts a whole table first.
    room = workspace.take("room for ties", rows, 1).copy_(length.unsqueeze(1)).sub_(above)
    selected = workspace.take("selected", *order.shape)
    test = workspace.take("selection test", *order.shape)
    ties = workspace.take("sign bits, then ties so far", *order.shape)
    torch.eq(order, lowest, out=selected)
    torch.cumsum(ties.copy_(selected), 1, dtype=ties.dtype, out=ties)
    selected.logical_and_(torch.le(ties, room, out=test))
    selected.logical_or_(torch.gt(order, lowest, out=test))
    return selected.logical_and_(torch.logical_not(absent, out=test))
