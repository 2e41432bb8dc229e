"""``attention_forward``: cuts the call in programs, splits the slots where rows do not fill the GPU, merges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsa_backends.triton_kernels.forward_kernels import forward_kernel, merge_kernel
from dsa_backends.triton_kernels.launch import (
    FUSED,
    LOG2_E,
    aligned,
    device_architecture,
    last_contiguous,
    on_device,
    part_width,
    precision,
    processors,
    tail_width,
)
from dsa_backends.triton_kernels.tiles import AttentionTile, HopperTile, forward_tile, split_count
from dsa_dispatch._call import RowLayout, StageOptions


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
    """See ``dsa_dispatch._contract.AttentionForward``. ``q`` bf16, fp16 or fp32; channels multiples of 16."""
    width = indices.shape[1]
    heads = q.shape[1]
    tile = forward_tile(device_architecture(q), heads, q.shape[2], v_channels, q.element_size())
    head_blocks = -(-heads // tile.heads)
    splits = split_count(q.shape[0], head_blocks, width, tile.keys, processors(q), options.deterministic)
    part_bytes = q.shape[0] * heads * (v_channels + 1) * 4
    splits = max(1, min(splits, options.memory_budget // part_bytes))
    return launch_forward(
        q, kv, indices, length, scale=scale, v_channels=v_channels, tile=tile, splits=splits
    )


def hopper_forward(heads: int) -> Any:
    """The kernel for a block of 64 heads, or of fewer. Imported late: only compute capability 9.0 needs it."""
    from dsa_backends.triton_kernels import hopper_forward_kernels as kernels

    return kernels.hopper_forward_kernel if heads == 64 else kernels.hopper_forward_few_kernel


def launch_forward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    length: Tensor,
    *,
    scale: float,
    v_channels: int,
    tile: AttentionTile | HopperTile,
    splits: int,
) -> tuple[Tensor, Tensor]:
    """The forward with a given tile and number of splits; what the benchmark and the tests vary."""
    q, kv, indices = aligned(q), aligned(kv), last_contiguous(indices)
    rows, heads, channels = q.shape
    width = indices.shape[1]
    slots = -(-width // splits)
    span = -(-slots // tile.keys) * tile.keys
    splits = -(-width // span)
    block = part_width(v_channels)
    tail = channels - v_channels
    head_blocks = -(-heads // tile.heads)
    out = torch.empty((rows, heads, v_channels), dtype=q.dtype, device=q.device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    part, part_lse = out, lse
    if splits > 1:
        part = torch.empty((splits, rows, heads, v_channels), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((splits, rows, heads), dtype=torch.float32, device=q.device)
    arguments = (
        q,
        kv,
        indices,
        length,
        part,
        part_lse,
        scale * LOG2_E,
        q.stride(0) // 8,
        q.stride(1) // 8,
        kv.stride(0) // 8,
        indices.stride(0),
        rows,
        kv.shape[0],
        width,
        heads,
        head_blocks,
        span,
    )
    grid = (rows * head_blocks, splits)
    with on_device(q):
        if isinstance(tile, HopperTile):
            hopper_forward(tile.heads)[grid](
                *arguments,
                DV=v_channels,
                TAIL=tail,
                BLOCK_H=tile.heads,
                BUFFERS=tile.buffers,
                num_warps=tile.warps,
                **FUSED,
                maxnreg=tile.registers,
            )
        else:
            forward_kernel[grid](
                *arguments,
                DV=v_channels,
                TAIL=tail,
                BLOCK_PART=block // tile.parts,
                PARTS=tile.parts,
                BLOCK_TAIL=tail_width(tail),
                BLOCK_H=tile.heads,
                BLOCK_N=tile.keys,
                PRECISION=precision(q),
                CHAIN=device_architecture(q) != "sm100",
                num_warps=tile.warps,
                **FUSED,
                num_stages=tile.stages,
            )
        if splits > 1:
            merge_kernel[(rows * heads,)](
                part,
                part_lse,
                out,
                lse,
                rows * heads,
                splits,
                DV=v_channels,
                BLOCK_DV=block,
                num_warps=4,
                **FUSED,
            )
    return out, lse
