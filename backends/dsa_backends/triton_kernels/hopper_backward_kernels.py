"""Attention backward for compute capability 9.0: P and dS for 64 heads."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsa_backends.triton_kernels.hopper_common import KEYS, barrier, gather, is_key, slot_ids


@gluon.jit(
    do_not_specialize=[
        "q_row8",
        "q_head8",
        "kv_row8",
        "idx_row",
        "dout_row8",
        "dout_head8",
        "keys",
        "width",
        "heads",
        "head_blocks",
        "pairs_row8",
    ],
    do_not_specialize_on_alignment=["idx", "length", "shift"],
)
def hopper_pairs_kernel(
    q,
    kv,
    idx,
    length,
    shift,
    dout,
    pairs,
    scale,
    scale_log2,
    q_row8,
    q_head8,
    kv_row8,
    idx_row,
    dout_row8,
    dout_head8,
    keys,
    width,
    heads,
    head_blocks,
    pairs_row8,
    DV: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_H: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Grid (rows * head_blocks,): P and dS of ``backward_kernels.query_gradient_kernel`` for 64 heads.

    Q and the output gradient leave room for one key tile only. It is kept in halves, each refilled as soon as the two
    products that read it are done, so that the gather runs under the other half's products and the softmax.
    """
    HALF: gl.constexpr = DV // 2
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 256 // WARPS, 16])
    main_copy: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    tail_copy: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // (TAIL // 8 if TAIL else 1), TAIL // 8 if TAIL else 1], [WARPS, 1], [1, 0]
    )
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    key_columns: gl.constexpr = gl.SliceLayout(0, scores_layout)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = kv.dtype.element_ty

    program = gl.program_id(0)
    row = (program // head_blocks).to(gl.int64)
    first_head = (program % head_blocks) * BLOCK_H
    first = 0
    last = gl.minimum(gl.load(length + row), width)
    idx += row * idx_row

    k_0 = gl.allocate_shared_memory(dtype, [KEYS, HALF], shared)
    k_1 = gl.allocate_shared_memory(dtype, [KEYS, HALF], shared)
    ids = slot_ids(idx, first, last, gl.SliceLayout(1, main_copy))
    gather(k_0, kv, ids, keys, kv_row8, 0, HALF, main_copy)
    gather(k_1, kv, ids, keys, kv_row8, HALF, HALF, main_copy)
    if TAIL > 0:
        tail_shared: gl.constexpr = gl.NVMMASharedLayout(TAIL * 2 if TAIL < 64 else 128, 16)
        k_tail = gl.allocate_shared_memory(dtype, [KEYS, TAIL], tail_shared)
        ids_t = slot_ids(idx, first, last, gl.SliceLayout(1, tail_copy))
        gather(k_tail, kv, ids_t, keys, kv_row8, DV, TAIL, tail_copy)
    async_copy.commit_group()

    q_0 = gl.allocate_shared_memory(dtype, [BLOCK_H, HALF], shared)
    q_1 = gl.allocate_shared_memory(dtype, [BLOCK_H, HALF], shared)
    g_0 = gl.allocate_shared_memory(dtype, [BLOCK_H, HALF], shared)
    g_1 = gl.allocate_shared_memory(dtype, [BLOCK_H, HALF], shared)
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, main_copy))
    channel = gl.arange(0, HALF, layout=gl.SliceLayout(0, main_copy))[None, :]
    has_head = (head < heads)[:, None]
    q_rows = q + row * q_row8 * 8 + head.to(gl.int64)[:, None] * (q_head8 * 8) + channel
    g_rows = dout + row * dout_row8 * 8 + head.to(gl.int64)[:, None] * (dout_head8 * 8) + channel
    q_0.store(gl.load(q_rows, mask=has_head, other=0.0))
    q_1.store(gl.load(q_rows + HALF, mask=has_head, other=0.0))
    g_0.store(gl.load(g_rows, mask=has_head, other=0.0))
    g_1.store(gl.load(g_rows + HALF, mask=has_head, other=0.0))
    if TAIL > 0:
        q_tail = gl.allocate_shared_memory(dtype, [BLOCK_H, TAIL], tail_shared)
        head_t = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, tail_copy))
        channel_t = DV + gl.arange(0, TAIL, layout=gl.SliceLayout(0, tail_copy))
        t_rows = q + row * q_row8 * 8 + head_t.to(gl.int64)[:, None] * (q_head8 * 8)
        q_tail.store(gl.load(t_rows + channel_t[None, :], mask=(head_t < heads)[:, None], other=0.0))

    head_s = first_head + gl.arange(0, BLOCK_H, layout=score_rows)
    base = gl.load(shift + (row * heads + head_s) * 2, mask=head_s < heads, other=float("inf"))
    delta = gl.load(shift + (row * heads + head_s) * 2 + 1, mask=head_s < heads, other=0.0)
    zero = gl.full([BLOCK_H, KEYS], 0.0, gl.float32, layout=scores_layout)
    head_p = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, store_layout))
    slot_p = gl.arange(0, KEYS, layout=gl.SliceLayout(0, store_layout))
    pitch = pairs_row8 * 8
    ds_rows = pairs + (row * 2 * heads + head_p.to(gl.int64))[:, None] * pitch + slot_p[None, :]
    p_rows = ds_rows + heads.to(gl.int64) * pitch
    store_mask = (head_p < heads)[:, None]

    ids = slot_ids(idx, first + KEYS, last, gl.SliceLayout(1, main_copy))
    if TAIL > 0:
        ids_t = slot_ids(idx, first + KEYS, last, gl.SliceLayout(1, tail_copy))
    ok = is_key(slot_ids(idx, first, last, key_columns), keys)
    for start in range(first, last, KEYS):
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        s = warpgroup_mma(q_0, k_0.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(g_0, k_0.permute((1, 0)), zero, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        barrier()
        gather(k_0, kv, ids, keys, kv_row8, 0, HALF, main_copy)
        s = warpgroup_mma(q_1, k_1.permute((1, 0)), s, is_async=True)
        dp = warpgroup_mma(g_1, k_1.permute((1, 0)), dp, is_async=True)
        if TAIL > 0:
            s = warpgroup_mma(q_tail, k_tail.permute((1, 0)), s, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        barrier()
        gather(k_1, kv, ids, keys, kv_row8, HALF, HALF, main_copy)
        if TAIL > 0:
            gather(k_tail, kv, ids_t, keys, kv_row8, DV, TAIL, tail_copy)
        async_copy.commit_group()
        next_ok = is_key(slot_ids(idx, start + KEYS, last, key_columns), keys)
        ids = slot_ids(idx, start + 2 * KEYS, last, gl.SliceLayout(1, main_copy))
        if TAIL > 0:
            ids_t = slot_ids(idx, start + 2 * KEYS, last, gl.SliceLayout(1, tail_copy))
        p = gl.where(ok[None, :], gl.exp2(s * scale_log2 - base[:, None]), 0.0)
        # The scale goes in before the rounding to 16 bits, which keeps large activations inside fp16.
        ds = p * (dp - delta[:, None]) * scale
        gl.store(ds_rows + start, gl.convert_layout(ds.to(dtype), store_layout), mask=store_mask)
        gl.store(p_rows + start, gl.convert_layout(p.to(dtype), store_layout), mask=store_mask)
        ok = next_ok
    async_copy.wait_group(0)
