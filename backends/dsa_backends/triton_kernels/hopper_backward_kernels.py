"""Attention backward for compute capability 9.0 and 64 heads: P and dS, and then dQ from the stored dS."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsa_backends.triton_kernels.hopper_common import (
    KEYS,
    PRODUCER_REGISTERS,
    PRODUCER_WARPS,
    advance,
    barrier,
    flags,
    gather,
    is_key,
    key_buffers,
    load_heads,
    slot_ids,
    start_copy,
)


@gluon.jit
def _produce_halves(kv, kv_row8, slots, ring, HALF: gl.constexpr, TAIL: gl.constexpr):
    """Key rows of one tile in two halves, the tail with the second; each is refilled when its products are done."""
    main_copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [PRODUCER_WARPS, 1], [1, 0])
    lanes: gl.constexpr = TAIL // 8 if TAIL else 8
    tail_copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [PRODUCER_WARPS, 1], [1, 0])
    idx, begin, end, keys = slots
    k_half, k_tail, full, empty = ring
    ids = slot_ids(idx, begin, end, gl.SliceLayout(1, main_copy))
    phase = begin * 0 + 1
    for start in range(begin, end, KEYS):
        following = slot_ids(idx, start + KEYS, end, gl.SliceLayout(1, main_copy))
        mbarrier.wait(empty.index(0), phase)
        gather(k_half.index(0), kv, ids, keys, kv_row8, 0, HALF, main_copy)
        async_copy.mbarrier_arrive(full.index(0), increment_count=False)
        mbarrier.wait(empty.index(1), phase)
        gather(k_half.index(1), kv, ids, keys, kv_row8, HALF, HALF, main_copy)
        if TAIL > 0:
            ids_t = gl.convert_layout(ids, gl.SliceLayout(1, tail_copy))
            gather(k_tail.index(0), kv, ids_t, keys, kv_row8, 2 * HALF, TAIL, tail_copy)
        async_copy.mbarrier_arrive(full.index(1), increment_count=False)
        ids = following
        phase = 1 - phase


@gluon.jit
def _consume_halves(
    slots,
    ring,
    queries,
    gradients,
    shift,
    pairs,
    pairs_row8,
    scale,
    scale_log2,
    row,
    first_head,
    heads,
    TAIL: gl.constexpr,
    BLOCK_H: gl.constexpr,
):
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key_columns: gl.constexpr = gl.SliceLayout(0, scores_layout)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    idx, begin, end, keys = slots
    k_half, k_tail, full, empty = ring
    q_0, q_1, q_tail = queries
    g_0, g_1 = gradients
    dtype: gl.constexpr = k_half.dtype
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
    ok = is_key(slot_ids(idx, begin, end, key_columns), keys)
    phase = begin * 0
    for start in range(begin, end, KEYS):
        mbarrier.wait(full.index(0), phase)
        fence_async_shared()
        k_0 = k_half.index(0).permute((1, 0))
        s = warpgroup_mma(q_0, k_0, zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(g_0, k_0, zero, use_acc=False, is_async=True)
        next_ok = is_key(slot_ids(idx, start + KEYS, end, key_columns), keys)
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        barrier()
        mbarrier.arrive(empty.index(0))
        mbarrier.wait(full.index(1), phase)
        fence_async_shared()
        k_1 = k_half.index(1).permute((1, 0))
        s = warpgroup_mma(q_1, k_1, s, is_async=True)
        dp = warpgroup_mma(g_1, k_1, dp, is_async=True)
        if TAIL > 0:
            s = warpgroup_mma(q_tail, k_tail.index(0).permute((1, 0)), s, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        barrier()
        mbarrier.arrive(empty.index(1))
        p = gl.where(ok[None, :], gl.exp2(s * scale_log2 - base[:, None]), 0.0)
        # The scale goes in before the rounding to 16 bits, which keeps large activations inside fp16.
        ds = p * (dp - delta[:, None]) * scale
        gl.store(ds_rows + start, gl.convert_layout(ds.to(dtype), store_layout), mask=store_mask)
        gl.store(p_rows + start, gl.convert_layout(p.to(dtype), store_layout), mask=store_mask)
        ok = next_ok
        phase = 1 - phase


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
):
    """Grid (rows * head_blocks,), 4 + 4 warps: P and dS of ``backward_kernels.query_gradient_kernel`` for 64 heads.

    Q and the output gradient leave room for one key tile only. It is kept in halves, so that the gather of one runs
    under the other half's products and the softmax.
    """
    HALF: gl.constexpr = DV // 2
    program = gl.program_id(0)
    row = (program // head_blocks).to(gl.int64)
    first_head = (program % head_blocks) * BLOCK_H
    end = gl.minimum(gl.load(length + row), width)
    q += row * q_row8 * 8
    dout += row * dout_row8 * 8
    k_half = key_buffers(kv.dtype.element_ty, 2, HALF)
    k_tail = key_buffers(kv.dtype.element_ty, 1, TAIL)
    q_0 = load_heads(q, q_head8, first_head, heads, 0, HALF, BLOCK_H, 4)
    q_1 = load_heads(q, q_head8, first_head, heads, HALF, HALF, BLOCK_H, 4)
    q_tail = load_heads(q, q_head8, first_head, heads, DV, TAIL, BLOCK_H, 4) if TAIL > 0 else q_1
    g_0 = load_heads(dout, dout_head8, first_head, heads, 0, HALF, BLOCK_H, 4)
    g_1 = load_heads(dout, dout_head8, first_head, heads, HALF, HALF, BLOCK_H, 4)
    full = flags(2, PRODUCER_WARPS * 32)
    empty = flags(2, 1)
    fence_async_shared()
    barrier()
    slots = (idx + row * idx_row, end * 0, end, keys)
    ring = (k_half, k_tail, full, empty)
    queries = (q_0, q_1, q_tail)
    gradients = (g_0, g_1)
    gl.warp_specialize(
        [
            (
                _consume_halves,
                (
                    slots,
                    ring,
                    queries,
                    gradients,
                    shift,
                    pairs,
                    pairs_row8,
                    scale,
                    scale_log2,
                    row,
                    first_head,
                    heads,
                    TAIL,
                    BLOCK_H,
                ),
            ),
            (_produce_halves, (kv, kv_row8, slots, ring, HALF, TAIL)),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce_with_ds(
    kv,
    kv_row8,
    slots,
    ring,
    ds_rows,
    pitch,
    head_count,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_H: gl.constexpr,
):
    """Whole key rows, and beside them the tile of dS."""
    main_copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [PRODUCER_WARPS, 1], [1, 0])
    lanes: gl.constexpr = TAIL // 8 if TAIL else 8
    tail_copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [PRODUCER_WARPS, 1], [1, 0])
    idx, begin, end, keys = slots
    k_main, k_tail, ds_tile, full, empty = ring
    head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, main_copy))
    slot = gl.arange(0, KEYS, layout=gl.SliceLayout(0, main_copy))
    place = ds_rows + head.to(gl.int64)[:, None] * pitch + slot[None, :]
    has_head = (head < head_count)[:, None]
    ids = slot_ids(idx, begin, end, gl.SliceLayout(1, main_copy))
    at = begin * 0
    phase = at + 1
    for start in range(begin, end, KEYS):
        following = slot_ids(idx, start + KEYS, end, gl.SliceLayout(1, main_copy))
        mbarrier.wait(empty.index(at), phase)
        # Whole tiles were written by the first kernel, so only the heads need a mask.
        start_copy(ds_tile.index(at), place + start, mask=has_head)
        gather(k_main.index(at), kv, ids, keys, kv_row8, 0, MAIN, main_copy)
        if TAIL > 0:
            ids_t = gl.convert_layout(ids, gl.SliceLayout(1, tail_copy))
            gather(k_tail.index(at), kv, ids_t, keys, kv_row8, MAIN, TAIL, tail_copy)
        async_copy.mbarrier_arrive(full.index(at), increment_count=False)
        ids = following
        at, phase = advance(at, phase, 2)


@gluon.jit
def _consume_ds(slots, ring, dq, head_count, DV: gl.constexpr, TAIL: gl.constexpr, BLOCK_H: gl.constexpr):
    main_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    tail_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TAIL // 2 if TAIL else 8, 16])
    _, begin, end, _ = slots
    k_main, k_tail, ds_tile, full, empty = ring
    main = gl.full([BLOCK_H, DV], 0.0, gl.float32, layout=main_layout)
    if TAIL > 0:
        tail = gl.full([BLOCK_H, TAIL], 0.0, gl.float32, layout=tail_layout)
    at = begin * 0
    phase = at
    for _start in range(begin, end, KEYS):
        mbarrier.wait(full.index(at), phase)
        fence_async_shared()
        ds = ds_tile.index(at)
        next_main = warpgroup_mma(ds, k_main.index(at), main, is_async=True)
        if TAIL > 0:
            next_tail = warpgroup_mma(ds, k_tail.index(at), tail, is_async=True)
            main, tail = warpgroup_mma_wait(0, deps=[next_main, next_tail])
        else:
            main = warpgroup_mma_wait(0, deps=[next_main])
        barrier()
        mbarrier.arrive(empty.index(at))
        at, phase = advance(at, phase, 2)
    head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, main_layout))
    channel = gl.arange(0, DV, layout=gl.SliceLayout(0, main_layout))
    place = dq + head.to(gl.int64)[:, None] * (DV + TAIL) + channel[None, :]
    gl.store(place, main.to(dq.dtype.element_ty), mask=(head < head_count)[:, None])
    if TAIL > 0:
        head_t = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, tail_layout))
        channel_t = DV + gl.arange(0, TAIL, layout=gl.SliceLayout(0, tail_layout))
        place_t = dq + head_t.to(gl.int64)[:, None] * (DV + TAIL) + channel_t[None, :]
        gl.store(place_t, tail.to(dq.dtype.element_ty), mask=(head_t < head_count)[:, None])


@gluon.jit(
    do_not_specialize=["kv_row8", "idx_row", "keys", "width", "heads", "head_blocks", "pairs_row8"],
    do_not_specialize_on_alignment=["idx", "length"],
)
def hopper_query_kernel(
    kv,
    idx,
    length,
    pairs,
    dq,
    kv_row8,
    idx_row,
    keys,
    width,
    heads,
    head_blocks,
    pairs_row8,
    DV: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_H: gl.constexpr,
):
    """Grid (rows * head_blocks,), 8 + 4 warps: ``dq = dS K`` of ``backward_kernels.query_product_kernel``, 64 heads.

    All channels in one program, so that a key row is gathered once per 64 heads.
    """
    program = gl.program_id(0)
    row = (program // head_blocks).to(gl.int64)
    first_head = (program % head_blocks) * BLOCK_H
    end = gl.minimum(gl.load(length + row), width)
    pitch = pairs_row8 * 8
    k_main = key_buffers(kv.dtype.element_ty, 2, DV)
    k_tail = key_buffers(kv.dtype.element_ty, 2, TAIL)
    ds_tile = gl.allocate_shared_memory(
        kv.dtype.element_ty, [2, BLOCK_H, KEYS], gl.NVMMASharedLayout(128, 16)
    )
    full = flags(2, PRODUCER_WARPS * 32)
    empty = flags(2, 1)
    barrier()
    slots = (idx + row * idx_row, end * 0, end, keys)
    ring = (k_main, k_tail, ds_tile, full, empty)
    ds_rows = pairs + (row * 2 * heads + first_head) * pitch
    dq += (row * heads + first_head) * (DV + TAIL)
    head_count = heads - first_head
    gl.warp_specialize(
        [
            (_consume_ds, (slots, ring, dq, head_count, DV, TAIL, BLOCK_H)),
            (_produce_with_ds, (kv, kv_row8, slots, ring, ds_rows, pitch, head_count, DV, TAIL, BLOCK_H)),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )
