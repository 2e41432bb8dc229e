"""Attention forward for compute capability 9.0: for 64 heads, and transposed for 16."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from dsa_backends.triton_kernels.hopper_common import KEYS, barrier, gather, is_key, slot_ids

_FLOOR = gl.constexpr(-1.0e30)


@gluon.jit(
    do_not_specialize=[
        "q_row8",
        "q_head8",
        "kv_row8",
        "idx_row",
        "keys",
        "width",
        "heads",
        "head_blocks",
        "span",
        "rows",
    ],
    do_not_specialize_on_alignment=["idx", "length", "lse"],
)
def hopper_forward_kernel(
    q,
    kv,
    idx,
    length,
    out,
    lse,
    scale_log2,
    q_row8,
    q_head8,
    kv_row8,
    idx_row,
    rows,
    keys,
    width,
    heads,
    head_blocks,
    span,
    DV: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_H: gl.constexpr,
):
    """Grid (rows * head_blocks, splits), 8 warps: two warp groups share 64 heads, each owns half of keys and channels.

    Two key buffers. The copies of tile i + 1 start when the value product of tile i - 1 is done, which is while the
    scores of tile i are computed; they have until the next step to arrive.
    """
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    main_copy: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    tail_copy: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // (TAIL // 8 if TAIL else 1), TAIL // 8 if TAIL else 1], [8, 1], [1, 0]
    )
    key_columns: gl.constexpr = gl.SliceLayout(0, scores_layout)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = kv.dtype.element_ty

    program = gl.program_id(0)
    split = gl.program_id(1)
    row = (program // head_blocks).to(gl.int64)
    first_head = (program % head_blocks) * BLOCK_H
    begin = split * span
    end = gl.minimum(gl.load(length + row), width)
    end = gl.minimum(end, begin + span)
    idx += row * idx_row

    q_main = gl.allocate_shared_memory(dtype, [BLOCK_H, DV], shared)
    k_main = gl.allocate_shared_memory(dtype, [2, KEYS, DV], shared)
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, main_copy))
    channel = gl.arange(0, DV, layout=gl.SliceLayout(0, main_copy))
    q_rows = q + row * q_row8 * 8 + head.to(gl.int64)[:, None] * (q_head8 * 8)
    # A block may reach past the last head: nothing there is read or written.
    q_main.store(gl.load(q_rows + channel[None, :], mask=(head < heads)[:, None], other=0.0))
    ids = slot_ids(idx, begin, end, gl.SliceLayout(1, main_copy))
    gather(k_main.index(0), kv, ids, keys, kv_row8, 0, DV, main_copy)
    if TAIL > 0:
        tail_shared: gl.constexpr = gl.NVMMASharedLayout(TAIL * 2 if TAIL < 64 else 128, 16)
        q_tail = gl.allocate_shared_memory(dtype, [BLOCK_H, TAIL], tail_shared)
        k_tail = gl.allocate_shared_memory(dtype, [2, KEYS, TAIL], tail_shared)
        head_t = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, tail_copy))
        channel_t = DV + gl.arange(0, TAIL, layout=gl.SliceLayout(0, tail_copy))
        t_rows = q + row * q_row8 * 8 + head_t.to(gl.int64)[:, None] * (q_head8 * 8)
        q_tail.store(gl.load(t_rows + channel_t[None, :], mask=(head_t < heads)[:, None], other=0.0))
        ids_t = slot_ids(idx, begin, end, gl.SliceLayout(1, tail_copy))
        gather(k_tail.index(0), kv, ids_t, keys, kv_row8, DV, TAIL, tail_copy)
    async_copy.commit_group()

    top = gl.full([BLOCK_H], _FLOOR, gl.float32, layout=score_rows)
    total = gl.full([BLOCK_H], 0.0, gl.float32, layout=score_rows)
    zero_scores = gl.full([BLOCK_H, KEYS], 0.0, gl.float32, layout=scores_layout)
    acc = warpgroup_mma_init(gl.full([BLOCK_H, DV], 0.0, gl.float32, layout=out_layout))
    ids = slot_ids(idx, begin + KEYS, end, gl.SliceLayout(1, main_copy))
    if TAIL > 0:
        ids_t = slot_ids(idx, begin + KEYS, end, gl.SliceLayout(1, tail_copy))
    ok = is_key(slot_ids(idx, begin, end, key_columns), keys)
    at = begin * 0
    for start in range(begin, end, KEYS):
        # Waiting for the value product by itself, with the scores in flight, would make the assembler serialise both.
        held = warpgroup_mma_wait(0, deps=[acc])
        async_copy.wait_group(0)
        fence_async_shared()
        # The tile has arrived for all, and both warp groups are done with the other buffer.
        barrier()
        k_now = k_main.index(at)
        score = warpgroup_mma(q_main, k_now.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
        if TAIL > 0:
            score = warpgroup_mma(q_tail, k_tail.index(at).permute((1, 0)), score, is_async=True)
        gather(k_main.index(1 - at), kv, ids, keys, kv_row8, 0, DV, main_copy)
        if TAIL > 0:
            gather(k_tail.index(1 - at), kv, ids_t, keys, kv_row8, DV, TAIL, tail_copy)
        async_copy.commit_group()
        next_ok = is_key(slot_ids(idx, start + KEYS, end, key_columns), keys)
        ids = slot_ids(idx, start + 2 * KEYS, end, gl.SliceLayout(1, main_copy))
        if TAIL > 0:
            ids_t = slot_ids(idx, start + 2 * KEYS, end, gl.SliceLayout(1, tail_copy))

        s = warpgroup_mma_wait(0, deps=[score])
        s = gl.where(ok[None, :], s * scale_log2, float("-inf"))
        new_top = gl.maximum(top, gl.max(s, 1))
        shrink = gl.exp2(top - new_top)
        p = gl.exp2(s - new_top[:, None])
        total = total * shrink + gl.sum(p, 1)
        top = new_top
        p_now = gl.convert_layout(p.to(dtype), p_layout)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, out_layout))
        acc = warpgroup_mma(p_now, k_now, held * shrink[:, None], is_async=True)
        ok = next_ok
        at = 1 - at

    held = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    some = total > 0.0
    safe = gl.where(some, total, 1.0)
    natural = gl.where(some, (top + gl.log2(safe)) * 0.6931471805599453, float("-inf"))
    head_s = first_head + gl.arange(0, BLOCK_H, layout=score_rows)
    place = (split.to(gl.int64) * rows + row) * heads
    gl.store(lse + place + head_s, natural, mask=head_s < heads)
    inverse = gl.convert_layout(1.0 / safe, gl.SliceLayout(1, out_layout))
    held = held * inverse[:, None]
    result = gl.convert_layout(held.to(out.dtype.element_ty), main_copy)
    o_rows = out + (place + head.to(gl.int64))[:, None] * DV
    gl.store(o_rows + channel[None, :], result, mask=(head < heads)[:, None])


@gluon.jit(
    do_not_specialize=[
        "q_row8",
        "q_head8",
        "kv_row8",
        "idx_row",
        "keys",
        "width",
        "heads",
        "head_blocks",
        "span",
        "rows",
    ],
    do_not_specialize_on_alignment=["idx", "length", "out", "lse"],
)
def hopper_forward_few_kernel(
    q,
    kv,
    idx,
    length,
    out,
    lse,
    scale_log2,
    q_row8,
    q_head8,
    kv_row8,
    idx_row,
    rows,
    keys,
    width,
    heads,
    head_blocks,
    span,
    DV: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_H: gl.constexpr,
):
    """As ``hopper_forward_kernel`` for 16 heads, 4 warps, with everything transposed: keys or channels are the M side.

    A warp group product has 64 rows at least, and 16 heads would leave three quarters of them empty. ``S^T = K Q^T`` is
    ``[64, 16]`` and ``out^T = V^T P^T`` is ``[512, 16]``; each tile is then read from shared memory just twice, where
    products of 16 rows also read all of Q again in every warp. One key buffer only, so that two programs share a
    multiprocessor: one gathers while the other computes.
    """
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    main_copy: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    tail_copy: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // (TAIL // 8 if TAIL else 1), TAIL // 8 if TAIL else 1], [4, 1], [1, 0]
    )
    key_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    head_columns: gl.constexpr = gl.SliceLayout(0, scores_layout)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = kv.dtype.element_ty

    program = gl.program_id(0)
    split = gl.program_id(1)
    row = (program // head_blocks).to(gl.int64)
    first_head = (program % head_blocks) * BLOCK_H
    begin = split * span
    end = gl.minimum(gl.load(length + row), width)
    end = gl.minimum(end, begin + span)
    idx += row * idx_row

    q_main = gl.allocate_shared_memory(dtype, [BLOCK_H, DV], shared)
    k_main = gl.allocate_shared_memory(dtype, [KEYS, DV], shared)
    p_shared = gl.allocate_shared_memory(dtype, [KEYS, BLOCK_H], gl.NVMMASharedLayout(BLOCK_H * 2, 16))
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, main_copy))
    channel = gl.arange(0, DV, layout=gl.SliceLayout(0, main_copy))
    q_rows = q + row * q_row8 * 8 + head.to(gl.int64)[:, None] * (q_head8 * 8)
    # A block may reach past the last head: nothing there is read or written.
    q_main.store(gl.load(q_rows + channel[None, :], mask=(head < heads)[:, None], other=0.0))
    ids = slot_ids(idx, begin, end, gl.SliceLayout(1, main_copy))
    gather(k_main, kv, ids, keys, kv_row8, 0, DV, main_copy)
    if TAIL > 0:
        tail_shared: gl.constexpr = gl.NVMMASharedLayout(TAIL * 2 if TAIL < 64 else 128, 16)
        q_tail = gl.allocate_shared_memory(dtype, [BLOCK_H, TAIL], tail_shared)
        k_tail = gl.allocate_shared_memory(dtype, [KEYS, TAIL], tail_shared)
        head_t = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, tail_copy))
        channel_t = DV + gl.arange(0, TAIL, layout=gl.SliceLayout(0, tail_copy))
        t_rows = q + row * q_row8 * 8 + head_t.to(gl.int64)[:, None] * (q_head8 * 8)
        q_tail.store(gl.load(t_rows + channel_t[None, :], mask=(head_t < heads)[:, None], other=0.0))
        ids_t = slot_ids(idx, begin, end, gl.SliceLayout(1, tail_copy))
        gather(k_tail, kv, ids_t, keys, kv_row8, DV, TAIL, tail_copy)
    async_copy.commit_group()

    top = gl.full([BLOCK_H], _FLOOR, gl.float32, layout=head_columns)
    # Per key row of the tile: nothing but the maximum is reduced inside the loop.
    total = gl.full([KEYS, BLOCK_H], 0.0, gl.float32, layout=scores_layout)
    zero_scores = gl.full([KEYS, BLOCK_H], 0.0, gl.float32, layout=scores_layout)
    held = gl.full([DV, BLOCK_H], 0.0, gl.float32, layout=scores_layout)
    ok = is_key(slot_ids(idx, begin, end, key_rows), keys)
    for start in range(begin, end, KEYS):
        # This also brings the ids of the next tile near, so that reading them again for the gather costs little; held
        # in registers until then, they would spill.
        next_ok = is_key(slot_ids(idx, start + KEYS, end, key_rows), keys)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        score = warpgroup_mma(k_main, q_main.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
        if TAIL > 0:
            score = warpgroup_mma(k_tail, q_tail.permute((1, 0)), score, is_async=True)
        s = warpgroup_mma_wait(0, deps=[score])
        s = gl.where(ok[:, None], s * scale_log2, float("-inf"))
        new_top = gl.maximum(top, gl.max(s, 0))
        shrink = gl.exp2(top - new_top)
        p = gl.exp2(s - new_top[None, :])
        total = total * shrink[None, :] + p
        top = new_top
        p_shared.store(p.to(dtype))
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(k_main.permute((1, 0)), p_shared, held * shrink[None, :], is_async=True)
        if TAIL > 0:
            # All warps are done with the tail: the barrier above came after the scores.
            ids_t = slot_ids(idx, start + KEYS, end, gl.SliceLayout(1, tail_copy))
            gather(k_tail, kv, ids_t, keys, kv_row8, DV, TAIL, tail_copy)
        held = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        ids = slot_ids(idx, start + KEYS, end, gl.SliceLayout(1, main_copy))
        gather(k_main, kv, ids, keys, kv_row8, 0, DV, main_copy)
        async_copy.commit_group()
        ok = next_ok

    async_copy.wait_group(0)
    whole = gl.sum(total, 0)
    some = whole > 0.0
    safe = gl.where(some, whole, 1.0)
    natural = gl.where(some, (top + gl.log2(safe)) * 0.6931471805599453, float("-inf"))
    head_s = first_head + gl.arange(0, BLOCK_H, layout=head_columns)
    place = (split.to(gl.int64) * rows + row) * heads
    gl.store(lse + place + head_s, natural, mask=head_s < heads)
    held = held * (1.0 / safe)[None, :]
    result = gl.convert_layout(gl.permute(held.to(out.dtype.element_ty), (1, 0)), main_copy)
    o_rows = out + (place + head.to(gl.int64))[:, None] * DV
    gl.store(o_rows + channel[None, :], result, mask=(head < heads)[:, None])
