"""Attention forward for compute capability 9.0: for 64 heads, and transposed for 16 or 32."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from dsa_backends.triton_kernels.hopper_common import (
    KEYS,
    PRODUCER_REGISTERS,
    PRODUCER_WARPS,
    advance,
    barrier,
    flags,
    is_key,
    key_buffers,
    load_heads,
    produce_keys,
    slot_ids,
)

_FLOOR = gl.constexpr(-1.0e30)


@gluon.jit
def _consume_many(
    slots,
    ring,
    q_main,
    q_tail,
    scale_log2,
    result,
    first_head,
    heads,
    DV: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_H: gl.constexpr,
):
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    key_columns: gl.constexpr = gl.SliceLayout(0, scores_layout)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    idx, begin, end, keys = slots
    k_main, k_tail, full, empty = ring
    out, lse, place = result
    dtype: gl.constexpr = k_main.dtype
    top = gl.full([BLOCK_H], _FLOOR, gl.float32, layout=score_rows)
    total = gl.full([BLOCK_H], 0.0, gl.float32, layout=score_rows)
    zero_scores = gl.full([BLOCK_H, KEYS], 0.0, gl.float32, layout=scores_layout)
    acc = warpgroup_mma_init(gl.full([BLOCK_H, DV], 0.0, gl.float32, layout=out_layout))
    ok = is_key(slot_ids(idx, begin, end, key_columns), keys)
    at = begin * 0
    phase = at
    for start in range(begin, end, KEYS):
        # Waiting for the value product by itself, with the scores in flight, would make the assembler serialise both.
        held = warpgroup_mma_wait(0, deps=[acc])
        # Both warp groups are done with the other buffer.
        barrier()
        mbarrier.arrive(empty.index(1 - at), pred=start > begin)
        mbarrier.wait(full.index(at), phase)
        fence_async_shared()
        k_now = k_main.index(at)
        score = warpgroup_mma(q_main, k_now.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
        if TAIL > 0:
            score = warpgroup_mma(q_tail, k_tail.index(at).permute((1, 0)), score, is_async=True)
        next_ok = is_key(slot_ids(idx, start + KEYS, end, key_columns), keys)
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
        at, phase = advance(at, phase, 2)

    held = warpgroup_mma_wait(0, deps=[acc])
    some = total > 0.0
    safe = gl.where(some, total, 1.0)
    natural = gl.where(some, (top + gl.log2(safe)) * 0.6931471805599453, float("-inf"))
    head_s = first_head + gl.arange(0, BLOCK_H, layout=score_rows)
    gl.store(lse + place + head_s, natural, mask=head_s < heads)
    inverse = gl.convert_layout(1.0 / safe, gl.SliceLayout(1, out_layout))
    held = held * inverse[:, None]
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, out_layout))
    channel = gl.arange(0, DV, layout=gl.SliceLayout(0, out_layout))
    o_rows = out + (place + head.to(gl.int64))[:, None] * DV
    gl.store(o_rows + channel[None, :], held.to(out.dtype.element_ty), mask=(head < heads)[:, None])


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
    BUFFERS: gl.constexpr,
):
    """Grid (rows * head_blocks, splits), 8 + 4 warps: two warp groups share 64 heads, each has half of all else.

    A buffer is given back when the value product of its tile is done, so the next gather has the whole of the other
    tile's step to arrive.
    """
    program = gl.program_id(0)
    split = gl.program_id(1)
    row = (program // head_blocks).to(gl.int64)
    first_head = (program % head_blocks) * BLOCK_H
    begin = split * span
    end = gl.minimum(gl.load(length + row), width)
    end = gl.minimum(end, begin + span)
    idx += row * idx_row
    q += row * q_row8 * 8
    k_main = key_buffers(kv.dtype.element_ty, BUFFERS, DV)
    k_tail = key_buffers(kv.dtype.element_ty, BUFFERS, TAIL)
    q_main = load_heads(q, q_head8, first_head, heads, 0, DV, BLOCK_H, 8)
    q_tail = load_heads(q, q_head8, first_head, heads, DV, TAIL, BLOCK_H, 8) if TAIL > 0 else q_main
    full = flags(BUFFERS, PRODUCER_WARPS * 32)
    empty = flags(BUFFERS, 1)
    fence_async_shared()
    barrier()
    place = (split.to(gl.int64) * rows + row) * heads
    slots = (idx, begin, end, keys)
    ring = (k_main, k_tail, full, empty)
    result = (out, lse, place)
    gl.warp_specialize(
        [
            (
                _consume_many,
                (slots, ring, q_main, q_tail, scale_log2, result, first_head, heads, DV, TAIL, BLOCK_H),
            ),
            (produce_keys, (kv, kv_row8, slots, ring, DV, TAIL, BUFFERS)),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )


@gluon.jit
def _consume_few(
    slots,
    ring,
    q_main,
    q_tail,
    scale_log2,
    result,
    first_head,
    heads,
    DV: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    store: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    key_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    head_columns: gl.constexpr = gl.SliceLayout(0, scores_layout)
    idx, begin, end, keys = slots
    k_main, k_tail, full, empty = ring
    out, lse, place = result
    dtype: gl.constexpr = k_main.dtype
    p_shared = gl.allocate_shared_memory(dtype, [KEYS, BLOCK_H], gl.NVMMASharedLayout(BLOCK_H * 2, 16))
    top = gl.full([BLOCK_H], _FLOOR, gl.float32, layout=head_columns)
    # Per key row of the tile: nothing but the maximum is reduced inside the loop.
    total = gl.full([KEYS, BLOCK_H], 0.0, gl.float32, layout=scores_layout)
    zero_scores = gl.full([KEYS, BLOCK_H], 0.0, gl.float32, layout=scores_layout)
    held = gl.full([DV, BLOCK_H], 0.0, gl.float32, layout=scores_layout)
    ok = is_key(slot_ids(idx, begin, end, key_rows), keys)
    at = begin * 0
    phase = at
    for start in range(begin, end, KEYS):
        next_ok = is_key(slot_ids(idx, start + KEYS, end, key_rows), keys)
        mbarrier.wait(full.index(at), phase)
        fence_async_shared()
        k_now = k_main.index(at)
        score = warpgroup_mma(k_now, q_main.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
        if TAIL > 0:
            score = warpgroup_mma(k_tail.index(at), q_tail.permute((1, 0)), score, is_async=True)
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
        acc = warpgroup_mma(k_now.permute((1, 0)), p_shared, held * shrink[None, :], is_async=True)
        held = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(empty.index(at))
        ok = next_ok
        at, phase = advance(at, phase, BUFFERS)

    whole = gl.sum(total, 0)
    some = whole > 0.0
    safe = gl.where(some, whole, 1.0)
    natural = gl.where(some, (top + gl.log2(safe)) * 0.6931471805599453, float("-inf"))
    head_s = first_head + gl.arange(0, BLOCK_H, layout=head_columns)
    gl.store(lse + place + head_s, natural, mask=head_s < heads)
    held = held * (1.0 / safe)[None, :]
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, store))
    channel = gl.arange(0, DV, layout=gl.SliceLayout(0, store))
    turned = gl.convert_layout(gl.permute(held.to(out.dtype.element_ty), (1, 0)), store)
    o_rows = out + (place + head.to(gl.int64))[:, None] * DV
    gl.store(o_rows + channel[None, :], turned, mask=(head < heads)[:, None])


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
    BUFFERS: gl.constexpr,
):
    """As ``hopper_forward_kernel`` for 16 or 32 heads, 4 + 4 warps, transposed: keys or channels are the M side.

    A warp group product has 64 rows at least, and 16 heads would leave three quarters of them empty. ``S^T = K Q^T`` is
    ``[64, 16]`` and ``out^T = V^T P^T`` is ``[512, 16]``; each tile is then read from shared memory just twice, where
    products of 16 rows also read all of Q again in every warp. With one key buffer two programs share a multiprocessor:
    one gathers while the other computes.
    """
    program = gl.program_id(0)
    split = gl.program_id(1)
    row = (program // head_blocks).to(gl.int64)
    first_head = (program % head_blocks) * BLOCK_H
    begin = split * span
    end = gl.minimum(gl.load(length + row), width)
    end = gl.minimum(end, begin + span)
    idx += row * idx_row
    q += row * q_row8 * 8
    k_main = key_buffers(kv.dtype.element_ty, BUFFERS, DV)
    k_tail = key_buffers(kv.dtype.element_ty, BUFFERS, TAIL)
    q_main = load_heads(q, q_head8, first_head, heads, 0, DV, BLOCK_H, 4)
    q_tail = load_heads(q, q_head8, first_head, heads, DV, TAIL, BLOCK_H, 4) if TAIL > 0 else q_main
    full = flags(BUFFERS, PRODUCER_WARPS * 32)
    empty = flags(BUFFERS, 1)
    fence_async_shared()
    barrier()
    place = (split.to(gl.int64) * rows + row) * heads
    slots = (idx, begin, end, keys)
    ring = (k_main, k_tail, full, empty)
    result = (out, lse, place)
    gl.warp_specialize(
        [
            (
                _consume_few,
                (
                    slots,
                    ring,
                    q_main,
                    q_tail,
                    scale_log2,
                    result,
                    first_head,
                    heads,
                    DV,
                    TAIL,
                    BLOCK_H,
                    BUFFERS,
                ),
            ),
            (produce_keys, (kv, kv_row8, slots, ring, DV, TAIL, BUFFERS)),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )
