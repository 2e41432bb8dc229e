"""``indexer_loss``: one kernel over chunks of rows; the keys' gradient by atomics."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_backends.tilelang_kernels.compiler import kernel
from dsa_backends.tilelang_kernels.launch import (
    aligned,
    flat,
    head_block,
    last_contiguous,
    on_device,
    row_chunks,
    strides8,
)
from dsa_backends.tilelang_kernels.scratch import SLOTS, loss_rows, tiles, total
from dsa_dispatch._call import RowLayout, StageOptions
from dsa_dispatch._contract import LossTerms


def indexer_loss(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    *,
    indices: Tensor | None,
    length: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    mass: Tensor,
    rows: RowLayout,
    use_relu: bool,
    need_dq: bool,
    need_dw: bool,
    dk: Tensor | None,
    options: StageOptions,
) -> LossTerms:
    """See ``dsa_dispatch._contract.IndexerLoss``. The sparse form, bf16, up to 64 index heads."""
    assert indices is not None
    assert length is not None
    q, k, w = aligned(q), aligned(k), last_contiguous(w)
    indices, length, mass = last_contiguous(indices), length.contiguous(), last_contiguous(mass)
    count, heads, dim = q.shape
    width = indices.shape[1]

    def fresh(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    kl = fresh(count)
    dq = fresh(count, heads, dim) if need_dq else None
    dw = fresh(count, heads) if need_dw else None
    with on_device(q):
        run = kernel(q.device, "loss_kernel:index_loss", head_block(heads), dim, use_relu)
        for first, last in row_chunks(count, total(loss_rows(width, heads)), options.memory_budget):
            part = slice(first, last)
            weights = w[part].float()
            scores = fresh(last - first, tiles(width) * SLOTS)
            run(
                *(flat(q[part]), flat(k), flat(weights), flat(indices[part]), length[part], flat(mass[part])),
                *(flat(scores), kl[part]),
                *(flat(scores if part_of is None else part_of[part]) for part_of in (dq, dw)),
                flat(scores if dk is None else dk),
                *(*strides8(q), k.stride(0) // 8, weights.stride(0), indices.stride(0), mass.stride(0)),
                *(scores.stride(0), 0 if dk is None else dk.stride(0)),
                *(last - first, k.shape[0], width, heads, int(need_dq), int(need_dw), int(dk is not None)),
            )
    return LossTerms(kl, dq, dw)
