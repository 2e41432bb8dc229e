"""``indexer_loss``: scores, then divergence and gradients, in chunks of rows; dk by atomics or in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_backends.triton_kernels.launch import (
    FUSED,
    aligned,
    device_architecture,
    last_contiguous,
    on_device,
    precision,
    row_chunks,
)
from dsa_backends.triton_kernels.loss_kernels import loss_gradient_kernel, loss_score_kernel
from dsa_backends.triton_kernels.ordered_sum import add_in_order, slot_order
from dsa_backends.triton_kernels.scratch import loss_rows, total
from dsa_backends.triton_kernels.slots import Slots
from dsa_backends.triton_kernels.tiles import LossTiles, loss_tiles
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
    """See ``dsa_dispatch._contract.IndexerLoss``. Up to 128 index heads; ``dk`` fp32 with contiguous channels."""
    return launch_loss(
        q,
        k,
        w,
        Slots(indices, length, starts, ends, rows),
        mass,
        use_relu=use_relu,
        need_dq=need_dq,
        need_dw=need_dw,
        dk=dk,
        tiles=loss_tiles(device_architecture(q), q.shape[1], q.element_size()),
        options=options,
    )


def launch_loss(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    slots: Slots,
    mass: Tensor,
    *,
    use_relu: bool,
    need_dq: bool,
    need_dw: bool,
    dk: Tensor | None,
    tiles: LossTiles,
    options: StageOptions,
) -> LossTerms:
    """The loss with given tiles; what the benchmark and the tests vary."""
    q, k, w, mass = aligned(q), aligned(k), last_contiguous(w), last_contiguous(mass)
    total_rows, heads, dim = q.shape
    ordered = options.deterministic and dk is not None
    row_bytes = total(loss_rows(slots.width, dim, slots.dense_keys, deterministic=ordered))

    def fresh(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    kl = fresh(total_rows)
    dq = fresh(total_rows, heads, dim) if need_dq else None
    dw = fresh(total_rows, heads) if need_dw else None
    shape = {
        "DIM": dim,
        "BLOCK_D": max(16, 1 << (dim - 1).bit_length()),
        "BLOCK_H": max(16, 1 << (heads - 1).bit_length()),
        "RELU": use_relu,
    }
    upcast = q.dtype == torch.float16
    with on_device(q):
        for first, last in row_chunks(total_rows, row_bytes, options.memory_budget):
            part = slice(first, last)
            ids, length = slots.chunk(first, last)
            scores, facts = fresh(last - first, slots.width), fresh(last - first, 2)
            inputs = (q[part], k, w[part], ids, length, mass[part], scores, facts)
            strides = (
                q.stride(0) // 8,
                q.stride(1) // 8,
                k.stride(0) // 8,
                w.stride(0),
                ids.stride(0),
                mass.stride(0),
                scores.stride(0),
            )
            sizes = (k.shape[0], slots.width, heads)
            loss_score_kernel[(last - first,)](
                *inputs,
                *strides,
                *sizes,
                **shape,
                BLOCK_N=tiles.score.keys,
                PRECISION=precision(q),
                num_warps=tiles.score.warps,
                **FUSED,
                num_stages=tiles.score.stages,
            )
            partial = fresh((last - first) * slots.width, dim) if ordered else None
            target = partial if partial is not None else dk
            loss_gradient_kernel[(last - first,)](
                *inputs,
                kl[part],
                facts if dq is None else dq[part],
                facts if dw is None else dw[part],
                facts if target is None else target,
                *strides,
                0 if target is None else target.stride(0) // 4,
                *sizes,
                **shape,
                BLOCK_N=tiles.gradient.keys,
                PRECISION=precision(q),
                UPCAST=upcast,
                NEED_DQ=need_dq,
                NEED_DW=need_dw,
                DK="none" if dk is None else "rows" if ordered else "atomic",
                num_warps=tiles.gradient.warps,
                **FUSED,
                num_stages=tiles.gradient.stages,
            )
            if partial is not None and dk is not None:
                add_in_order(partial, slot_order(ids, length, k.shape[0]), dk)
    return LossTerms(kl, dq, dw)
