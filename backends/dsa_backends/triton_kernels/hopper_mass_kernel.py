"""The teacher's mass for compute capability 9.0, given the lse: ``mass_kernel`` with the copies placed by hand."""

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
        "mass_row",
        "keys",
        "width",
        "heads",
        "head_blocks",
    ],
    do_not_specialize_on_alignment=["idx", "length", "lse", "mass"],
)
def hopper_mass_kernel(
    q,
    kv,
    idx,
    length,
    lse,
    mass,
    scale_log2,
    q_row8,
    q_head8,
    kv_row8,
    idx_row,
    mass_row,
    keys,
    width,
    heads,
    head_blocks,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_H: gl.constexpr,
):
    """Grid (rows * head_blocks,), 4 warps, two key buffers. Adds into ``mass [rows, W]``, zero on entry.

    By atomics, and still the same bits every time: there are at most two blocks of heads, and two numbers have one sum.
    """
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    main_copy: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    tail_lanes: gl.constexpr = TAIL // 8 if TAIL else 1
    tail_copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // tail_lanes, tail_lanes], [4, 1], [1, 0])
    key_columns: gl.constexpr = gl.SliceLayout(0, scores_layout)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = kv.dtype.element_ty

    program = gl.program_id(0)
    row = (program // head_blocks).to(gl.int64)
    first_head = (program % head_blocks) * BLOCK_H
    end = gl.minimum(gl.load(length + row), width)
    idx += row * idx_row
    mass += row * mass_row

    k_main = gl.allocate_shared_memory(dtype, [2, KEYS, MAIN], shared)
    ids = slot_ids(idx, 0, end, gl.SliceLayout(1, main_copy))
    gather(k_main.index(0), kv, ids, keys, kv_row8, 0, MAIN, main_copy)
    q_main = gl.allocate_shared_memory(dtype, [BLOCK_H, MAIN], shared)
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, main_copy))
    channel = gl.arange(0, MAIN, layout=gl.SliceLayout(0, main_copy))
    q_rows = q + row * q_row8 * 8 + head.to(gl.int64)[:, None] * (q_head8 * 8)
    # A block may reach past the last head: nothing there is read, and its lse of +inf makes its P zero.
    q_main.store(gl.load(q_rows + channel[None, :], mask=(head < heads)[:, None], other=0.0))
    if TAIL > 0:
        tail_shared: gl.constexpr = gl.NVMMASharedLayout(TAIL * 2 if TAIL < 64 else 128, 16)
        q_tail = gl.allocate_shared_memory(dtype, [BLOCK_H, TAIL], tail_shared)
        k_tail = gl.allocate_shared_memory(dtype, [2, KEYS, TAIL], tail_shared)
        ids_t = slot_ids(idx, 0, end, gl.SliceLayout(1, tail_copy))
        gather(k_tail.index(0), kv, ids_t, keys, kv_row8, MAIN, TAIL, tail_copy)
        head_t = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, tail_copy))
        channel_t = MAIN + gl.arange(0, TAIL, layout=gl.SliceLayout(0, tail_copy))
        t_rows = q + row * q_row8 * 8 + head_t.to(gl.int64)[:, None] * (q_head8 * 8)
        q_tail.store(gl.load(t_rows + channel_t[None, :], mask=(head_t < heads)[:, None], other=0.0))
    async_copy.commit_group()

    head_s = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, scores_layout))
    base = gl.load(lse + row * heads + head_s, mask=head_s < heads, other=float("inf"))
    base = gl.where(base == float("-inf"), float("inf"), base * 1.4426950408889634)
    zero = gl.full([BLOCK_H, KEYS], 0.0, gl.float32, layout=scores_layout)
    column = gl.arange(0, KEYS, layout=key_columns)
    ids = slot_ids(idx, KEYS, end, gl.SliceLayout(1, main_copy))
    if TAIL > 0:
        ids_t = slot_ids(idx, KEYS, end, gl.SliceLayout(1, tail_copy))
    at = end * 0
    for start in range(0, end, KEYS):
        ok = is_key(slot_ids(idx, start, end, key_columns), keys)
        async_copy.wait_group(0)
        fence_async_shared()
        # The tile has arrived for all warps, and all are done with the other buffer.
        barrier()
        score = warpgroup_mma(q_main, k_main.index(at).permute((1, 0)), zero, use_acc=False, is_async=True)
        if TAIL > 0:
            score = warpgroup_mma(q_tail, k_tail.index(at).permute((1, 0)), score, is_async=True)
        gather(k_main.index(1 - at), kv, ids, keys, kv_row8, 0, MAIN, main_copy)
        if TAIL > 0:
            gather(k_tail.index(1 - at), kv, ids_t, keys, kv_row8, MAIN, TAIL, tail_copy)
        async_copy.commit_group()
        ids = slot_ids(idx, start + 2 * KEYS, end, gl.SliceLayout(1, main_copy))
        if TAIL > 0:
            ids_t = slot_ids(idx, start + 2 * KEYS, end, gl.SliceLayout(1, tail_copy))
        s = warpgroup_mma_wait(0, deps=[score])
        here = gl.sum(gl.exp2(s * scale_log2 - base[:, None]), 0)
        gl.atomic_add(mass + start + column, here, mask=ok, sem="relaxed")
        at = 1 - at
    async_copy.wait_group(0)
