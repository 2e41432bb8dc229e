"""What every launch needs: aligned strides, the device's architecture, chunks of rows within a budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from dsa_backends.triton_kernels.tiles import Architecture, architecture

LOG2_E = 1.4426950408889634

FUSED: Final = {"enable_fp_fusion": True}
"""Said at every launch: from 3.9 Triton warns that the default is about to change, and warnings may be errors."""


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself where 16-byte copies can read its rows, else a contiguous copy.

    The kernels take strides in units of 8 elements: the compiler then knows their divisibility, whatever the length.
    """
    strides = tensor.stride()
    fits = (
        strides[-1] == 1 and all(stride % 8 == 0 for stride in strides[:-1]) and tensor.data_ptr() % 16 == 0
    )
    if fits:
        return tensor
    copy = tensor.contiguous()
    return copy if copy.data_ptr() % 16 == 0 else copy.clone()


def last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def part_width(value_channels: int) -> int:
    """Channels of the power-of-two tile that holds the value part."""
    return max(16, 1 << (value_channels - 1).bit_length())


def tail_width(tail_channels: int) -> int:
    return max(16, 1 << (max(tail_channels, 1) - 1).bit_length())


@lru_cache(maxsize=64)
def _device_facts(index: int) -> tuple[tuple[int, int], int]:
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count


def device_architecture(tensor: Tensor) -> Architecture:
    return architecture(_device_facts(tensor.get_device())[0]) if tensor.is_cuda else "small"


def processors(tensor: Tensor) -> int:
    """Multiprocessors of the GPU; a small number on the CPU, so that the interpreter sees split launches too."""
    return _device_facts(tensor.get_device())[1] if tensor.is_cuda else 8


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def precision(tensor: Tensor) -> str:
    """fp32 products are exact ("ieee"): the default, TF32, keeps 10 bits."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


def row_chunks(rows: int, row_bytes: int, budget: int) -> Iterator[tuple[int, int]]:
    """``(first, last)`` of chunks whose scratch stays within ``budget`` bytes; a chunk has at least one row."""
    size = max(1, min(rows, budget // max(row_bytes, 1)))
    for first in range(0, rows, size):
        yield first, min(rows, first + size)
