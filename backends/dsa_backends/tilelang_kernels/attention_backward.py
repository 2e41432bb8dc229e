"""``attention_backward``: chunks of rows through the kernels that make P and dS, dQ, and the keys' gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_backends.tilelang_kernels.compiler import kernel
from dsa_backends.tilelang_kernels.launch import (
    LOG2_E,
    aligned,
    flat,
    head_block,
    last_contiguous,
    name_of,
    on_device,
    row_chunks,
    strides8,
)
from dsa_backends.tilelang_kernels.scratch import FEW, SLOTS, backward_rows, tiles, total
from dsa_dispatch._call import RowLayout, StageOptions

HEADS_AT_ONCE = 128
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
    """See ``dsa_dispatch._contract.AttentionBackward``. ``dkv`` fp32 with contiguous channels, rows 16-byte aligned."""
    if not need_dq and dkv is None:
        return None
    q, kv, out, dout = aligned(q), aligned(kv), aligned(out), aligned(dout)
    indices, length, lse = last_contiguous(indices), length.contiguous(), lse.contiguous()
    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if need_dq else None
    row_bytes = total(backward_rows(q.shape[1], indices.shape[1]))
    with on_device(q):
        for first, last in row_chunks(q.shape[0], row_bytes, options.memory_budget):
            part = slice(first, last)
            chunk = _Chunk(q[part], kv, indices[part], length[part], out[part], dout[part], scale, v_channels)
            shift = chunk.shift(lse[part])
            chunk_dq = None if dq is None else dq[part]
            if chunk.heads <= FEW:
                pairs = chunk.few(shift, chunk_dq, store=dkv is not None)
                if dkv is not None:
                    chunk.balance(pairs, shift, head_major=False)
            else:
                pairs = chunk.pairs(shift)
                chunk.balance(pairs, shift, head_major=True)
                if chunk_dq is not None:
                    chunk.query_gradient(pairs, chunk_dq)
            if dkv is not None:
                chunk.key_gradient(pairs, dkv)
    return dq


class _Chunk:
    """The launches over one chunk of rows, in their order."""

    def __init__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        length: Tensor,
        out: Tensor,
        dout: Tensor,
        scale: float,
        v_channels: int,
    ) -> None:
        self.q, self.kv, self.indices, self.length = q, kv, indices, length
        self.out, self.dout = out, dout
        self.scale = scale
        self.rows, self.heads, channels = q.shape
        self.width = indices.shape[1]
        self.static = (channels - v_channels, name_of(q.dtype))
        self.blocks = -(-self.heads // 64)

    def shift(self, lse: Tensor) -> Tensor:
        shift = torch.empty((self.rows, self.heads, 2), dtype=torch.float32, device=self.q.device)
        kernel(self.q.device, "pairs_kernels:row_shift", self.static[1])(
            *(flat(self.out), flat(self.dout), flat(lse), flat(shift)),
            *(*strides8(self.out), *strides8(self.dout), self.rows * self.heads, self.heads),
        )
        return shift

    def _stored(self, *tile: int) -> Tensor:
        return torch.empty((self.rows, tiles(self.width), 2, *tile), dtype=self.q.dtype, device=self.q.device)

    def _strides(self) -> tuple[int, ...]:
        return (
            *strides8(self.q),
            self.kv.stride(0) // 8,
            self.indices.stride(0),
            *strides8(self.dout),
        )

    def _inputs(self, shift: Tensor) -> tuple[Tensor, ...]:
        return (
            flat(self.q),
            flat(self.kv),
            flat(self.indices),
            self.length,
            flat(shift),
            flat(self.dout),
        )

    def few(self, shift: Tensor, dq: Tensor | None, *, store: bool) -> Tensor:
        pairs = self._stored(SLOTS, FEW) if store else self.q.new_empty(8)
        kernel(self.q.device, "hopper_few_backward_kernel:hopper_few_backward", *self.static)(
            *self._inputs(shift),
            *(flat(self.out), flat(pairs), flat(pairs if dq is None else dq)),
            *(self.scale, self.scale * LOG2_E, *self._strides(), *strides8(self.out)),
            *(self.rows, self.kv.shape[0], self.width, self.heads, 0, int(store), int(dq is not None)),
        )
        return pairs

    def pairs(self, shift: Tensor) -> Tensor:
        pairs = self._stored(self.heads, SLOTS)
        kernel(self.q.device, "pairs_kernels:hopper_pairs", *self.static)(
            *self._inputs(shift),
            *(flat(pairs), self.scale, self.scale * LOG2_E, *self._strides()),
            *(self.rows, self.kv.shape[0], self.width, self.heads, self.blocks),
        )
        return pairs

    def balance(self, pairs: Tensor, shift: Tensor, *, head_major: bool) -> None:
        kernel(self.q.device, "balance_kernel:balance", head_major, self.static[1])(
            *(self.length, flat(shift), flat(pairs)),
            *(self.rows, self.width, self.heads, self.heads if head_major else FEW),
        )

    def query_gradient(self, pairs: Tensor, dq: Tensor) -> None:
        kernel(self.q.device, "query_gradient_kernel:hopper_query_gradient", *self.static)(
            *(flat(self.kv), flat(self.indices), self.length, flat(pairs), flat(dq)),
            *(self.kv.stride(0) // 8, self.indices.stride(0)),
            *(self.rows, self.kv.shape[0], self.width, self.heads, self.blocks),
        )

    def key_gradient(self, pairs: Tensor, dkv: Tensor) -> None:
        few = self.heads <= FEW
        block = FEW if few else max(64, min(HEADS_AT_ONCE, head_block(self.heads)))
        add = kernel(self.q.device, "key_gradient_kernel:hopper_key_gradient", block, *self.static, few)
        for first_head in range(0, self.heads, block):
            add(
                *(flat(self.q), flat(self.dout), flat(self.indices), self.length, flat(pairs), flat(dkv)),
                *(*strides8(self.q), *strides8(self.dout), self.indices.stride(0), dkv.stride(0) // 4),
                *(self.rows, self.kv.shape[0], self.width, self.heads, first_head),
            )
