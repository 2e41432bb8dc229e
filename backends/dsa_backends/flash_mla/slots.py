"""What the vendor adapters share: ids that end at their row's length, and operands that 16-byte copies can read."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

LN2 = 0.6931471805599453


def ids_within_length(indices: Tensor, length: Tensor) -> Tensor:
    """``indices [T, W]`` with -1 at and past ``length [T]``, for a kernel that a length alone does not do for: it loads
    whole tiles, and a key behind the length that holds NaN leaks through a zero probability."""
    slots = torch.arange(indices.shape[1], dtype=torch.int32, device=indices.device)
    return torch.where(slots < length[:, None], indices, -1).contiguous()


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous and every row starts at 16 bytes, else a copy."""
    size = tensor.element_size()
    fits = tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
    if fits and all(stride * size % 16 == 0 for stride in tensor.stride()[:-1]):
        return tensor
    return packed(tensor)


def packed(tensor: Tensor) -> Tensor:
    """The tensor itself where it is contiguous and starts at 16 bytes, else a copy that does."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def natural_lse(lse: Tensor, factor: float) -> Tensor:
    """A provider's lse times ``factor``, in place; it says +inf for a row without a key."""
    if factor != 1.0:
        lse.mul_(factor)
    return torch.nan_to_num_(lse, nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Providers read the architecture of, and launch on, the current device, whatever their tensors say."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
