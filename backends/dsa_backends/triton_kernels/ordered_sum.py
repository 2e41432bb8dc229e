"""Sums of scattered rows in a fixed order: the deterministic alternative to atomics.

``partial [rows * width, C]`` holds one row per slot. Per key, its slots are added one after the other in ascending
(row, slot) order onto what the key already has. The result is the same bits for any cut of the rows into chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_backends.triton_kernels.launch import FUSED


class SlotOrder(NamedTuple):
    """Slots grouped by key: ``slots[begin[key] : begin[key + 1]]``, ascending."""

    slots: Tensor
    begin: Tensor


def slot_order(indices: Tensor, length: Tensor, keys: int) -> SlotOrder:
    """Group the valid slots of ``indices [T, W]`` by key with a stable sort; no host synchronisation."""
    width = indices.shape[1]
    slot = torch.arange(width, device=indices.device, dtype=torch.int32)
    valid = (indices >= 0) & (indices < keys) & (slot < length[:, None])
    # Invalid slots sort behind every key and are in no group.
    ids = torch.where(valid, indices, keys).flatten()
    ordered, slots = torch.sort(ids, stable=True)
    begin = torch.searchsorted(ordered, torch.arange(keys + 1, device=ids.device, dtype=ids.dtype))
    return SlotOrder(slots, begin)


def add_in_order(partial: Tensor, order: SlotOrder, target: Tensor) -> None:
    """``target [keys, C] += `` the partial rows of each key; fp32, last dimensions contiguous."""
    channels = target.shape[1]
    block = min(256, max(16, 1 << (channels - 1).bit_length()))
    ordered_sum_kernel[(target.shape[0], -(-channels // block))](
        partial,
        order.slots,
        order.begin,
        target,
        partial.stride(0) // 4,
        target.stride(0) // 4,
        channels,
        BLOCK=block,
        num_warps=2,
        **FUSED,
    )


@triton.jit(
    do_not_specialize=["partial_row4", "target_row4", "channels"],
    do_not_specialize_on_alignment=["slots", "begin"],
)
def ordered_sum_kernel(
    partial, slots, begin, target, partial_row4, target_row4, channels, BLOCK: tl.constexpr
):
    """Grid (keys, channel blocks). Four rows are in flight at a time; they are still added one by one."""
    key = tl.program_id(0).to(tl.int64)
    first = tl.load(begin + key)
    last = tl.load(begin + key + 1)
    if first < last:
        offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < channels
        place = target + key * target_row4 * 4 + offs
        acc = tl.load(place, mask=mask, other=0.0)
        rows = partial + offs
        pitch = partial_row4 * 4
        for at in range(first, last, 4):
            slot_0 = tl.load(slots + at)
            slot_1 = tl.load(slots + at + 1, mask=at + 1 < last, other=0)
            slot_2 = tl.load(slots + at + 2, mask=at + 2 < last, other=0)
            slot_3 = tl.load(slots + at + 3, mask=at + 3 < last, other=0)
            row_0 = tl.load(rows + slot_0 * pitch, mask=mask, other=0.0)
            row_1 = tl.load(
                rows + slot_1 * pitch, mask=offs < tl.where(at + 1 < last, channels, 0), other=0.0
            )
            row_2 = tl.load(
                rows + slot_2 * pitch, mask=offs < tl.where(at + 2 < last, channels, 0), other=0.0
            )
            row_3 = tl.load(
                rows + slot_3 * pitch, mask=offs < tl.where(at + 3 < last, channels, 0), other=0.0
            )
            # where, not "+ 0": -0.0 + 0.0 is +0.0, and then the bits would depend on where a group of four ends.
            acc = acc + row_0
            acc = tl.where(at + 1 < last, acc + row_1, acc)
            acc = tl.where(at + 2 < last, acc + row_2, acc)
            acc = tl.where(at + 3 < last, acc + row_3, acc)
        tl.store(place, acc, mask=mask)
