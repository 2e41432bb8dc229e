"""What every launch needs: flat views with aligned strides, the device's architecture, chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
HOPPER = (9, 0)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself where 16-byte copies can read its rows, else a contiguous copy."""
    strides = tensor.stride()
    if strides[-1] == 1 and all(stride % 8 == 0 for stride in strides[:-1]) and tensor.data_ptr() % 16 == 0:
        return tensor
    copy = tensor.contiguous()
    return copy if copy.data_ptr() % 16 == 0 else copy.clone()


def last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def flat(tensor: Tensor) -> Tensor:
    """Everything from the first element to the last one as one dimension, gaps included, without a copy."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,))


def strides8(tensor: Tensor) -> tuple[int, ...]:
    """Strides of all dimensions but the last, in units of 8 elements."""
    return tuple(stride // 8 for stride in tensor.stride()[:-1])


@lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(tensor: Tensor) -> tuple[int, int]:
    return _capability(tensor.get_device())


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Kernels launch on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def is_hopper(tensor: Tensor) -> bool:
    return capability(tensor) == HOPPER


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def row_chunks(rows: int, row_bytes: int, budget: int) -> Iterator[tuple[int, int]]:
    """``(first, last)`` of chunks whose scratch stays within ``budget`` bytes; a chunk has at least one row."""
    size = max(1, min(rows, budget // max(row_bytes, 1)))
    for first in range(0, rows, size):
        yield first, min(rows, first + size)


def head_block(heads: int) -> int:
    """The smallest power of two from 16 that holds ``heads``."""
    return max(16, 1 << (heads - 1).bit_length())
