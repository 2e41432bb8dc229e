"""Applying a legalization: every step is exact, and undone on the way out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsa_dispatch._dispatch.check import Legalization
from dsa_dispatch._execution.copies import padded


def pad_channels(tensor: Tensor, legal: Legalization) -> Tensor:
    """Zero channels at the end: they add nothing to a dot product, and the value is a prefix."""
    found, given = legal.channels
    return tensor if found == given else padded(tensor, (*tensor.shape[:-1], given))


def pad_heads(tensor: Tensor, legal: Legalization, dim: int = 1) -> Tensor:
    """Zero heads at the end of dimension ``dim``: a zero query attends uniformly and is sliced off again."""
    found, given = legal.heads
    if found == given:
        return tensor
    return padded(tensor, (*tensor.shape[:dim], given, *tensor.shape[dim + 1 :]))


def pad_query(query: Tensor, legal: Legalization) -> Tensor:
    """``[T, H, D]`` to the kernel's heads and channels in one copy."""
    heads, channels = legal.heads, legal.channels
    if heads[0] == heads[1] and channels[0] == channels[1]:
        return query
    return padded(query, (query.shape[0], heads[1], channels[1]))


def legal_ids(ids: Tensor, length: Tensor, legal: Legalization) -> tuple[Tensor, Tensor]:
    """Ids ``[T, W]`` and prefix lengths ``[T]`` in the form the kernel bears. Ids are already -1 where invalid."""
    found, given = legal.width
    if legal.compact:
        slots = torch.arange(found, dtype=torch.int32, device=ids.device)
        empty = (ids < 0) | (slots >= length[:, None])
        # Stable, so that the order of the valid slots, and with it the sums, stays the caller's.
        order = empty.to(torch.uint8).argsort(dim=1, stable=True)
        ids = ids.masked_fill(empty, -1).gather(1, order)
        length = (found - empty.sum(dim=1)).to(torch.int32)
    if given != found:
        ids = F.pad(ids, (0, given - found), value=-1)
    return ids, length


def trim_columns(tensor: Tensor, legal: Legalization) -> Tensor:
    """Columns ``[T, W]`` of a padded width back to the caller's."""
    found, given = legal.width
    return tensor if found == given else tensor[:, :found]
