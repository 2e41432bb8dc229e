"""``attention_forward``: one of three kernels by architecture and head count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsa_backends.tilelang_kernels.compiler import kernel
from dsa_backends.tilelang_kernels.launch import (
    HOPPER,
    LOG2_E,
    aligned,
    capability,
    flat,
    last_contiguous,
    name_of,
    on_device,
    strides8,
)
from dsa_backends.tilelang_kernels.scratch import FEW
from dsa_dispatch._call import RowLayout, StageOptions

ROOMY = ((8, 0), (10, 0), (10, 3))
"""Compute capabilities that give a block the 113 KiB of the portable kernel for 32 heads."""


@dataclass(frozen=True, slots=True)
class Form:
    """A kernel with its constants, and the heads of one of its programs."""

    where: str
    static: tuple[Any, ...]
    heads: int


def forward_form(gpu: tuple[int, int], heads: int, tail: int, dtype: str) -> Form:
    """Few heads go transposed, blocks of 64 to specialised warp groups, other architectures to the portable kernel."""
    if gpu == HOPPER:
        if heads <= FEW:
            return Form("hopper_few_forward_kernel:hopper_few_forward", (tail, dtype), FEW)
        return Form("hopper_forward_kernel:hopper_forward", (tail, dtype), 64)
    block = 32 if gpu in ROOMY and heads > FEW else FEW
    return Form("portable_forward_kernel:portable_forward", (block, tail, dtype), block)


def attention_forward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    length: Tensor,
    *,
    scale: float,
    v_channels: int,
    rows: RowLayout,
    options: StageOptions,
) -> tuple[Tensor, Tensor]:
    """See ``dsa_dispatch._contract.AttentionForward``. bf16 or fp16, 512 value channels, 512 or 576 in the keys."""
    form = forward_form(capability(q), q.shape[1], q.shape[2] - v_channels, name_of(q.dtype))
    return launch_forward(q, kv, indices, length, scale=scale, v_channels=v_channels, form=form)


def launch_forward(
    q: Tensor, kv: Tensor, indices: Tensor, length: Tensor, *, scale: float, v_channels: int, form: Form
) -> tuple[Tensor, Tensor]:
    """The forward in a given form; what the benchmark and the tests vary."""
    q, kv, indices = aligned(q), aligned(kv), last_contiguous(indices)
    length = length.contiguous()
    rows, heads, _ = q.shape
    out = torch.empty((rows, heads, v_channels), dtype=q.dtype, device=q.device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    with on_device(q):
        kernel(q.device, form.where, *form.static)(
            *(flat(q), flat(kv), flat(indices), length, flat(out), flat(lse), scale * LOG2_E),
            *(*strides8(q), kv.stride(0) // 8, indices.stride(0)),
            *(rows, kv.shape[0], indices.shape[1], heads, -(-heads // form.heads)),
        )
    return out, lse
