"""``attention_backward``: chunks of rows through one to three kernels; dkv by atomics or in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_backends.triton_kernels.backward_kernels import (
    key_gradient_kernel,
    query_gradient_kernel,
    query_product_kernel,
    row_shift_kernel,
)
from dsa_backends.triton_kernels.launch import (
    FUSED,
    LOG2_E,
    aligned,
    device_architecture,
    last_contiguous,
    on_device,
    part_width,
    precision,
    row_chunks,
    tail_width,
)
from dsa_backends.triton_kernels.ordered_sum import add_in_order, slot_order
from dsa_backends.triton_kernels.scratch import backward_rows, padded_slots, total
from dsa_backends.triton_kernels.tiles import BackwardTiles, HopperTile, backward_tiles
from dsa_dispatch._call import RowLayout, StageOptions

_HEADS_AT_ONCE = 128
"""Heads summed inside one product of the key kernel; more would not fit shared memory."""


def attention_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    length: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    scale: float,
    v_channels: int,
    need_dq: bool,
    dkv: Tensor | None,
    rows: RowLayout,
    options: StageOptions,
) -> Tensor | None:
    """See ``dsa_dispatch._contract.AttentionBackward``. ``dkv`` fp32 with contiguous channels."""
    if not need_dq and dkv is None:
        return None
    tiles = backward_tiles(device_architecture(q), q.shape[1], q.shape[2], v_channels, q.element_size())
    return launch_backward(
        q,
        kv,
        indices,
        length,
        out,
        lse,
        dout,
        scale=scale,
        v_channels=v_channels,
        need_dq=need_dq,
        dkv=dkv,
        tiles=tiles,
        deterministic=options.deterministic,
        budget=options.memory_budget,
    )


def launch_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    length: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    scale: float,
    v_channels: int,
    need_dq: bool,
    dkv: Tensor | None,
    tiles: BackwardTiles,
    deterministic: bool,
    budget: int,
) -> Tensor | None:
    """The backward with given tiles; what the benchmark and the tests vary."""
    q, kv, out, dout = aligned(q), aligned(kv), aligned(out), aligned(dout)
    indices, lse = last_contiguous(indices), lse.contiguous()
    total_rows, heads, channels = q.shape
    width = indices.shape[1]
    whole = tiles.whole if dkv is not None else None
    pairs_needed = whole is None and (dkv is not None or not tiles.fused)
    ordered = deterministic and dkv is not None
    row_bytes = total(
        backward_rows(heads, channels, width, q.element_size(), pairs=pairs_needed, deterministic=ordered)
    )
    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if need_dq else None
    with on_device(q):
        for first, last in row_chunks(total_rows, row_bytes, budget):
            part = slice(first, last)
            chunk = _Chunk(q[part], kv, indices[part], length[part], dout[part], scale, v_channels, tiles)
            shift = chunk.shift(out[part], lse[part])
            chunk_dq = None if dq is None else dq[part]
            if dkv is None:
                target = None
            elif deterministic:
                target = torch.empty((last - first) * width, channels, dtype=torch.float32, device=q.device)
            else:
                target = dkv
            if whole is not None and target is not None:
                chunk.whole(whole, shift, chunk_dq, target, atomic=not deterministic)
            else:
                pairs = chunk.pairs(shift, chunk_dq if tiles.fused else None, pairs_needed)
                if chunk_dq is not None and not tiles.fused:
                    chunk.query_product(pairs, chunk_dq)
                if target is not None:
                    chunk.key_gradient(pairs, target, atomic=not deterministic)
            if dkv is not None and target is not None and deterministic:
                add_in_order(target, slot_order(indices[part], length[part], kv.shape[0]), dkv)
    return dq


class _Chunk:
    """The launches over one chunk of rows, in their order."""

    def __init__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        length: Tensor,
        dout: Tensor,
        scale: float,
        v_channels: int,
        tiles: BackwardTiles,
    ) -> None:
        self.q, self.kv, self.indices, self.length, self.dout = q, kv, indices, length, dout
        self.scale, self.dv, self.tiles = scale, v_channels, tiles
        self.rows, self.heads, channels = q.shape
        self.width = indices.shape[1]
        self.tail = channels - v_channels
        self.slots8 = padded_slots(self.width) // 8

    def shift(self, out: Tensor, lse: Tensor) -> Tensor:
        shift = torch.empty((self.rows, self.heads, 2), dtype=torch.float32, device=self.q.device)
        row_shift_kernel[(self.rows * self.heads,)](
            out,
            self.dout,
            lse,
            shift,
            out.stride(0) // 8,
            out.stride(1) // 8,
            self.dout.stride(0) // 8,
            self.dout.stride(1) // 8,
            self.heads,
            DV=self.dv,
            BLOCK_DV=part_width(self.dv),
            num_warps=1,
            **FUSED,
        )
        return shift

    def whole(
        self, tile: HopperTile, shift: Tensor, dq: Tensor | None, target: Tensor, *, atomic: bool
    ) -> None:
        # Imported late, as the others below: only compute capability 9.0 needs it.
        from dsa_backends.triton_kernels.hopper_backward_few_kernel import hopper_backward_few_kernel

        hopper_backward_few_kernel[(self.rows,)](
            self.q,
            self.kv,
            self.indices,
            self.length,
            shift,
            self.dout,
            self.q if dq is None else dq,
            target,
            self.scale,
            self.scale * LOG2_E,
            self.q.stride(0) // 8,
            self.q.stride(1) // 8,
            self.kv.stride(0) // 8,
            self.indices.stride(0),
            self.dout.stride(0) // 8,
            self.dout.stride(1) // 8,
            target.stride(0) // 4,
            self.kv.shape[0],
            self.width,
            self.heads,
            DV=self.dv,
            TAIL=self.tail,
            BLOCK_H=tile.heads,
            BUFFERS=tile.buffers,
            NEED_DQ=dq is not None,
            ATOMIC=atomic,
            num_warps=tile.warps,
            **FUSED,
        )

    def pairs(self, shift: Tensor, dq: Tensor | None, store: bool) -> Tensor:
        tile = self.tiles.pairs
        shape = (self.rows, 2, self.heads, self.slots8 * 8) if store else (1,)
        pairs = torch.empty(shape, dtype=self.q.dtype, device=self.q.device)
        head_blocks = -(-self.heads // tile.heads)
        tensors = (self.q, self.kv, self.indices, self.length, shift, self.dout)
        if isinstance(tile, HopperTile):
            from dsa_backends.triton_kernels.hopper_backward_kernels import hopper_pairs_kernel

            hopper_pairs_kernel[(self.rows * head_blocks,)](
                *tensors,
                pairs,
                *self._scalars(head_blocks),
                DV=self.dv,
                TAIL=self.tail,
                BLOCK_H=tile.heads,
                num_warps=tile.warps,
                **FUSED,
            )
            return pairs
        block = part_width(self.dv)
        parts = 2 if tile.parts == 2 and block >= 512 and block == self.dv else 1
        query_gradient_kernel[(self.rows * head_blocks,)](
            *tensors,
            pairs if dq is None else dq,
            pairs,
            *self._scalars(head_blocks),
            DV=self.dv,
            TAIL=self.tail,
            BLOCK_PART=block // parts,
            PARTS=parts,
            BLOCK_TAIL=tail_width(self.tail),
            BLOCK_H=tile.heads,
            BLOCK_N=tile.keys,
            PRECISION=precision(self.q),
            NEED_DQ=dq is not None,
            NEED_PAIRS=store,
            num_warps=tile.warps,
            **FUSED,
            num_stages=tile.stages,
        )
        return pairs

    def _scalars(self, head_blocks: int) -> tuple[float | int, ...]:
        return (
            self.scale,
            self.scale * LOG2_E,
            self.q.stride(0) // 8,
            self.q.stride(1) // 8,
            self.kv.stride(0) // 8,
            self.indices.stride(0),
            self.dout.stride(0) // 8,
            self.dout.stride(1) // 8,
            self.kv.shape[0],
            self.width,
            self.heads,
            head_blocks,
            self.slots8,
        )

    def query_product(self, pairs: Tensor, dq: Tensor) -> None:
        tile = self.tiles.query
        assert tile is not None
        block_h = min(tile.heads, max(16, 1 << (self.heads - 1).bit_length()))
        if isinstance(tile, HopperTile):
            block_h = tile.heads
        head_blocks = -(-self.heads // block_h)
        tensors = (self.kv, self.indices, self.length, pairs, dq)
        scalars = (
            self.kv.stride(0) // 8,
            self.indices.stride(0),
            self.kv.shape[0],
            self.width,
            self.heads,
            head_blocks,
            self.slots8,
        )
        if isinstance(tile, HopperTile):
            from dsa_backends.triton_kernels.hopper_backward_kernels import hopper_query_kernel

            hopper_query_kernel[(self.rows * head_blocks,)](
                *tensors, *scalars, DV=self.dv, TAIL=self.tail, BLOCK_H=block_h, num_warps=tile.warps, **FUSED
            )
            return
        slices, block_c, block_tail = self._slices(tile.parts)
        query_product_kernel[(self.rows * head_blocks * slices,)](
            *tensors,
            *scalars,
            DV=self.dv,
            TAIL=self.tail,
            BLOCK_C=block_c,
            SLICES=slices,
            BLOCK_TAIL=block_tail,
            BLOCK_H=block_h,
            BLOCK_N=tile.keys,
            PRECISION=precision(self.q),
            num_warps=tile.warps,
            **FUSED,
            num_stages=tile.stages,
        )

    def key_gradient(self, pairs: Tensor, target: Tensor, *, atomic: bool) -> None:
        tile = self.tiles.key
        slices, block_c, block_tail = self._slices(tile.parts)
        block_h = min(_HEADS_AT_ONCE, max(16, 1 << (self.heads - 1).bit_length()))
        for first_head in range(0, self.heads, block_h):
            key_gradient_kernel[(self.rows * slices,)](
                self.q,
                self.dout,
                self.indices,
                self.length,
                pairs,
                target,
                self.q.stride(0) // 8,
                self.q.stride(1) // 8,
                self.dout.stride(0) // 8,
                self.dout.stride(1) // 8,
                target.stride(0) // 4,
                self.indices.stride(0),
                self.kv.shape[0],
                self.width,
                self.heads,
                first_head,
                self.slots8,
                DV=self.dv,
                TAIL=self.tail,
                BLOCK_C=block_c,
                SLICES=slices,
                BLOCK_TAIL=block_tail,
                BLOCK_H=block_h,
                BLOCK_N=tile.keys,
                PRECISION=precision(self.q),
                ATOMIC=atomic,
                ADD=first_head > 0,
                num_warps=tile.warps,
                **FUSED,
                num_stages=tile.stages,
            )

    def _slices(self, slice_width: int) -> tuple[int, int, int]:
        """Slices of the value channels, channels of one, and tail channels each carries beside them."""
        block = part_width(self.dv)
        block_c = min(slice_width, block)
        slices = block // block_c
        return slices, block_c, tail_width(-(-self.tail // slices))
