"""``indexer_target``: the attention mass of each slot, summed over heads, streamed over key tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_backends.triton_kernels.launch import (
    FUSED,
    LOG2_E,
    aligned,
    device_architecture,
    on_device,
    part_width,
    precision,
    row_chunks,
    tail_width,
)
from dsa_backends.triton_kernels.loss_kernels import mass_kernel
from dsa_backends.triton_kernels.scratch import target_rows, total
from dsa_backends.triton_kernels.slots import Slots
from dsa_backends.triton_kernels.tiles import AttentionTile, HopperTile, mass_tile
from dsa_dispatch._call import RowLayout, StageOptions


def indexer_target(
    query: Tensor,
    key: Tensor,
    *,
    indices: Tensor | None,
    length: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    lse: Tensor | None,
    scale: float,
    rows: RowLayout,
    options: StageOptions,
) -> Tensor:
    """See ``dsa_dispatch._contract.IndexerTarget``. Channels multiples of 16; a missing lse costs one more pass."""
    heads, channels = query.shape[1:]
    tile = mass_tile(device_architecture(query), heads, channels, query.element_size())
    return launch_target(
        query,
        key,
        Slots(indices, length, starts, ends, rows),
        lse=lse,
        scale=scale,
        tile=tile,
        budget=options.memory_budget,
    )


def launch_target(
    query: Tensor,
    key: Tensor,
    slots: Slots,
    *,
    lse: Tensor | None,
    scale: float,
    tile: AttentionTile | HopperTile,
    budget: int,
) -> Tensor:
    """The target with a given tile; what the benchmark and the tests vary."""
    query, key = aligned(query), aligned(key)
    total_rows, heads, channels = query.shape
    mass = torch.zeros((total_rows, slots.width), dtype=torch.float32, device=query.device)
    # The widest power of two, and what is left over: 576 = 512 + 64.
    main = channels if channels <= 16 else 1 << (channels.bit_length() - 1)
    tail = channels - main
    parts = 2 if isinstance(tile, AttentionTile) and tile.parts == 2 and main >= 512 else 1
    with on_device(query):
        for first, last in row_chunks(total_rows, total(target_rows(heads, slots.dense_keys)), budget):
            ids, length = slots.chunk(first, last)
            q = query[first:last]
            part = mass[first:last]
            if lse is None:
                base = torch.empty((last - first, heads), dtype=torch.float32, device=query.device)
            else:
                base = lse[first:last].contiguous()
            for find_lse in (True, False) if lse is None else (False,):
                if isinstance(tile, HopperTile):
                    _hopper_mass(q, key, ids, length, base, part, scale, slots.width, main, tile, find_lse)
                    continue
                mass_kernel[(last - first,)](
                    q,
                    key,
                    ids,
                    length,
                    base,
                    part,
                    scale * LOG2_E,
                    q.stride(0) // 8,
                    q.stride(1) // 8,
                    key.stride(0) // 8,
                    ids.stride(0),
                    part.stride(0),
                    key.shape[0],
                    slots.width,
                    heads,
                    MAIN=main,
                    TAIL=tail,
                    BLOCK_PART=part_width(main) // parts,
                    PARTS=parts,
                    BLOCK_TAIL=tail_width(tail),
                    BLOCK_H=tile.heads,
                    BLOCK_N=tile.keys,
                    PRECISION=precision(q),
                    FIND_LSE=find_lse,
                    num_warps=tile.warps,
                    **FUSED,
                    num_stages=tile.stages,
                )
    return mass


def _hopper_mass(
    q: Tensor,
    key: Tensor,
    ids: Tensor,
    length: Tensor,
    lse: Tensor,
    mass: Tensor,
    scale: float,
    width: int,
    main: int,
    tile: HopperTile,
    find_lse: bool,
) -> None:
    # Imported late: only compute capability 9.0 needs it.
    from dsa_backends.triton_kernels.hopper_mass_kernel import hopper_mass_kernel

    rows, heads, channels = q.shape
    head_blocks = -(-heads // tile.heads)
    hopper_mass_kernel[(rows * head_blocks,)](
        *(q, key, ids, length, lse, mass),
        scale * LOG2_E,
        q.stride(0) // 8,
        q.stride(1) // 8,
        key.stride(0) // 8,
        ids.stride(0),
        mass.stride(0),
        key.shape[0],
        width,
        heads,
        head_blocks,
        MAIN=main,
        TAIL=channels - main,
        BLOCK_H=tile.heads,
        FIND_LSE=find_lse,
        num_warps=tile.warps,
        **FUSED,
    )
