# ruff: noqa: ANN
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention for compute capability 9.0, with the copies placed by hand.

Same mathematics as ``forward_kernels`` and ``backward_kernels``. What differs is when things happen: the pipeliner issues
the copies of the next key tile at the end of a step and waits for them at the top of the next one, so that with the two
buffers shared memory has room for, the gather overlaps with nothing. Here a buffer is refilled as soon as the products
that read it are done, and the copies run under the rest of the step.

16-bit inputs, 512 value channels, a tail of none or a power of two from 16 up. A tile is 64 keys.
"""

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

_KEYS = gl.constexpr(64)
_FLOOR = gl.constexpr(-1.0e30)


@gluon.jit
def _key_span(idx, begin, end, keys, WARPS: gl.constexpr):
    """``(spare, first, last)`` as ``forward_kernels.key_span`` in tiles of 64 slots; ``spare`` is 0 without a key."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    offs = gl.arange(0, 512, layout=layout)
    best = gl.full([512], -1, gl.int32, layout=layout)
    lowest = gl.full([512], 2147483647, gl.int32, layout=layout)
    highest = gl.full([512], -1, gl.int32, layout=layout)
    for start in range(begin, end, 512):
        slots = start + offs
        ids = gl.load(idx + slots, mask=slots < end, other=-1)
        ok = (ids >= 0) & (ids < keys)
        best = gl.maximum(best, gl.where(ok, ids, -1))
        lowest = gl.minimum(lowest, gl.where(ok, slots, 2147483647))
        highest = gl.maximum(highest, gl.where(ok, slots, -1))
    spare = gl.max(best, 0)
    first = gl.minimum(gl.min(lowest, 0), end)
    first = begin + (first - begin) // _KEYS * _KEYS
    last = gl.where(spare >= 0, gl.max(highest, 0) + 1, first)
    return gl.maximum(spare, 0), first, last


@gluon.jit
def _ids(idx, start, last, keys, spare, layout: gl.constexpr):
    """Rows to gather for the 64 slots from ``start``: their ids, or the spare row where there is no key."""
    slots = start + gl.arange(0, _KEYS, layout=layout)
    ids = gl.load(idx + slots, mask=slots < last, other=-1)
    return gl.where((ids >= 0) & (ids < keys), ids, spare)


@gluon.jit
def _valid(idx, start, last, keys, layout: gl.constexpr):
    slots = start + gl.arange(0, _KEYS, layout=layout)
    ids = gl.load(idx + slots, mask=slots < last, other=-1)
    return (ids >= 0) & (ids < keys)


@gluon.jit
def _gather(buffer, kv, ids, kv_row8, first_channel, CHANNELS: gl.constexpr, layout: gl.constexpr):
    """Start copying ``CHANNELS`` channels of 64 rows into ``buffer``; 16 bytes per thread and copy."""
    channels = first_channel + gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, layout))
    rows = kv + ids.to(gl.int64)[:, None] * (kv_row8 * 8)
    async_copy.async_copy_global_to_shared(buffer, rows + channels[None, :])


@gluon.jit(
    do_not_specialize=[
        "q_row8", "q_head8", "kv_row8", "idx_row", "keys", "width", "heads", "head_blocks", "span", "rows",
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
    tail_copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (TAIL // 8 if TAIL else 1), TAIL // 8 if TAIL else 1], [8, 1], [1, 0])
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
    spare, begin, end = _key_span(idx, begin, end, keys, 8)

    q_main = gl.allocate_shared_memory(dtype, [BLOCK_H, DV], shared)
    k_main = gl.allocate_shared_memory(dtype, [2, _KEYS, DV], shared)
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, main_copy))
    channel = gl.arange(0, DV, layout=gl.SliceLayout(0, main_copy))
    q_rows = q + row * q_row8 * 8 + head.to(gl.int64)[:, None] * (q_head8 * 8)
    # A block may reach past the last head: nothing there is read or written.
    q_main.store(gl.load(q_rows + channel[None, :], mask=(head < heads)[:, None], other=0.0))
    ids = _ids(idx, begin, end, keys, spare, gl.SliceLayout(1, main_copy))
    _gather(k_main.index(0), kv, ids, kv_row8, 0, DV, main_copy)
    if TAIL > 0:
        tail_shared: gl.constexpr = gl.NVMMASharedLayout(TAIL * 2 if TAIL < 64 else 128, 16)
        q_tail = gl.allocate_shared_memory(dtype, [BLOCK_H, TAIL], tail_shared)
        k_tail = gl.allocate_shared_memory(dtype, [2, _KEYS, TAIL], tail_shared)
        head_t = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, tail_copy))
        channel_t = DV + gl.arange(0, TAIL, layout=gl.SliceLayout(0, tail_copy))
        t_rows = q + row * q_row8 * 8 + head_t.to(gl.int64)[:, None] * (q_head8 * 8)
        q_tail.store(gl.load(t_rows + channel_t[None, :], mask=(head_t < heads)[:, None], other=0.0))
        ids_t = _ids(idx, begin, end, keys, spare, gl.SliceLayout(1, tail_copy))
        _gather(k_tail.index(0), kv, ids_t, kv_row8, DV, TAIL, tail_copy)
    async_copy.commit_group()

    top = gl.full([BLOCK_H], _FLOOR, gl.float32, layout=score_rows)
    total = gl.full([BLOCK_H], 0.0, gl.float32, layout=score_rows)
    zero_scores = gl.full([BLOCK_H, _KEYS], 0.0, gl.float32, layout=scores_layout)
    acc = warpgroup_mma_init(gl.full([BLOCK_H, DV], 0.0, gl.float32, layout=out_layout))
    ids = _ids(idx, begin + _KEYS, end, keys, spare, gl.SliceLayout(1, main_copy))
    if TAIL > 0:
        ids_t = _ids(idx, begin + _KEYS, end, keys, spare, gl.SliceLayout(1, tail_copy))
    ok = _valid(idx, begin, end, keys, key_columns)
    at = begin * 0
    for start in range(begin, end, _KEYS):
        # Waiting for the value product by itself, with the scores in flight, would make the assembler serialise both.
        held = warpgroup_mma_wait(0, deps=[acc])
        async_copy.wait_group(0)
        fence_async_shared()
        # The tile has arrived for all, and both warp groups are done with the other buffer.
        gl.thread_barrier()
        k_now = k_main.index(at)
        score = warpgroup_mma(q_main, k_now.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
        if TAIL > 0:
            score = warpgroup_mma(q_tail, k_tail.index(at).permute((1, 0)), score, is_async=True)
        _gather(k_main.index(1 - at), kv, ids, kv_row8, 0, DV, main_copy)
        if TAIL > 0:
            _gather(k_tail.index(1 - at), kv, ids_t, kv_row8, DV, TAIL, tail_copy)
        async_copy.commit_group()
        next_ok = _valid(idx, start + _KEYS, end, keys, key_columns)
        ids = _ids(idx, start + 2 * _KEYS, end, keys, spare, gl.SliceLayout(1, main_copy))
        if TAIL > 0:
            ids_t = _ids(idx, start + 2 * _KEYS, end, keys, spare, gl.SliceLayout(1, tail_copy))

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
        "q_row8", "q_head8", "kv_row8", "idx_row", "keys", "width", "heads", "head_blocks", "span", "rows",
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
    products of 16 rows also read all of Q again in every warp.
    """
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    main_copy: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    tail_copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (TAIL // 8 if TAIL else 1), TAIL // 8 if TAIL else 1], [4, 1], [1, 0])
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
    spare, begin, end = _key_span(idx, begin, end, keys, 4)

    q_main = gl.allocate_shared_memory(dtype, [BLOCK_H, DV], shared)
    k_main = gl.allocate_shared_memory(dtype, [2, _KEYS, DV], shared)
    p_shared = gl.allocate_shared_memory(dtype, [_KEYS, BLOCK_H], gl.NVMMASharedLayout(BLOCK_H * 2, 16))
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, main_copy))
    channel = gl.arange(0, DV, layout=gl.SliceLayout(0, main_copy))
    q_rows = q + row * q_row8 * 8 + head.to(gl.int64)[:, None] * (q_head8 * 8)
    # A block may reach past the last head: nothing there is read or written.
    q_main.store(gl.load(q_rows + channel[None, :], mask=(head < heads)[:, None], other=0.0))
    ids = _ids(idx, begin, end, keys, spare, gl.SliceLayout(1, main_copy))
    _gather(k_main.index(0), kv, ids, kv_row8, 0, DV, main_copy)
    if TAIL > 0:
        tail_shared: gl.constexpr = gl.NVMMASharedLayout(TAIL * 2 if TAIL < 64 else 128, 16)
        q_tail = gl.allocate_shared_memory(dtype, [BLOCK_H, TAIL], tail_shared)
        k_tail = gl.allocate_shared_memory(dtype, [2, _KEYS, TAIL], tail_shared)
        head_t = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, tail_copy))
        channel_t = DV + gl.arange(0, TAIL, layout=gl.SliceLayout(0, tail_copy))
        t_rows = q + row * q_row8 * 8 + head_t.to(gl.int64)[:, None] * (q_head8 * 8)
        q_tail.store(gl.load(t_rows + channel_t[None, :], mask=(head_t < heads)[:, None], other=0.0))
        ids_t = _ids(idx, begin, end, keys, spare, gl.SliceLayout(1, tail_copy))
        _gather(k_tail.index(0), kv, ids_t, kv_row8, DV, TAIL, tail_copy)
    async_copy.commit_group()

    top = gl.full([BLOCK_H], _FLOOR, gl.float32, layout=head_columns)
    # Per key row of the tile: nothing but the maximum is reduced inside the loop.
    total = gl.full([_KEYS, BLOCK_H], 0.0, gl.float32, layout=scores_layout)
    zero_scores = gl.full([_KEYS, BLOCK_H], 0.0, gl.float32, layout=scores_layout)
    acc = warpgroup_mma_init(gl.full([DV, BLOCK_H], 0.0, gl.float32, layout=scores_layout))
    ids = _ids(idx, begin + _KEYS, end, keys, spare, gl.SliceLayout(1, main_copy))
    if TAIL > 0:
        ids_t = _ids(idx, begin + _KEYS, end, keys, spare, gl.SliceLayout(1, tail_copy))
    ok = _valid(idx, begin, end, keys, key_rows)
    at = begin * 0
    for start in range(begin, end, _KEYS):
        held = warpgroup_mma_wait(0, deps=[acc])
        async_copy.wait_group(0)
        fence_async_shared()
        # The tile has arrived for all warps, and all are done with the other buffer.
        gl.thread_barrier()
        k_now = k_main.index(at)
        score = warpgroup_mma(k_now, q_main.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
        if TAIL > 0:
            score = warpgroup_mma(k_tail.index(at), q_tail.permute((1, 0)), score, is_async=True)
        _gather(k_main.index(1 - at), kv, ids, kv_row8, 0, DV, main_copy)
        if TAIL > 0:
            _gather(k_tail.index(1 - at), kv, ids_t, kv_row8, DV, TAIL, tail_copy)
        async_copy.commit_group()
        next_ok = _valid(idx, start + _KEYS, end, keys, key_rows)
        ids = _ids(idx, start + 2 * _KEYS, end, keys, spare, gl.SliceLayout(1, main_copy))
        if TAIL > 0:
            ids_t = _ids(idx, start + 2 * _KEYS, end, keys, spare, gl.SliceLayout(1, tail_copy))

        s = warpgroup_mma_wait(0, deps=[score])
        s = gl.where(ok[:, None], s * scale_log2, float("-inf"))
        new_top = gl.maximum(top, gl.max(s, 0))
        shrink = gl.exp2(top - new_top)
        p = gl.exp2(s - new_top[None, :])
        total = total * shrink[None, :] + p
        top = new_top
        p_shared.store(p.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        held = held * shrink[None, :]
        acc = warpgroup_mma(k_now.permute((1, 0)), p_shared, held, is_async=True)
        ok = next_ok
        at = 1 - at

    held = warpgroup_mma_wait(0, deps=[acc])
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


@gluon.jit(
    do_not_specialize=[
        "q_row8", "q_head8", "kv_row8", "idx_row", "dout_row8", "dout_head8", "keys", "width", "heads", "head_blocks",
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
    tail_copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (TAIL // 8 if TAIL else 1), TAIL // 8 if TAIL else 1], [WARPS, 1], [1, 0])
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    key_columns: gl.constexpr = gl.SliceLayout(0, scores_layout)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = kv.dtype.element_ty

    program = gl.program_id(0)
    row = (program // head_blocks).to(gl.int64)
    first_head = (program % head_blocks) * BLOCK_H
    end = gl.minimum(gl.load(length + row), width)
    idx += row * idx_row
    spare, first, last = _key_span(idx, 0, end, keys, WARPS)

    k_0 = gl.allocate_shared_memory(dtype, [_KEYS, HALF], shared)
    k_1 = gl.allocate_shared_memory(dtype, [_KEYS, HALF], shared)
    ids = _ids(idx, first, last, keys, spare, gl.SliceLayout(1, main_copy))
    _gather(k_0, kv, ids, kv_row8, 0, HALF, main_copy)
    _gather(k_1, kv, ids, kv_row8, HALF, HALF, main_copy)
    if TAIL > 0:
        tail_shared: gl.constexpr = gl.NVMMASharedLayout(TAIL * 2 if TAIL < 64 else 128, 16)
        k_tail = gl.allocate_shared_memory(dtype, [_KEYS, TAIL], tail_shared)
        ids_t = _ids(idx, first, last, keys, spare, gl.SliceLayout(1, tail_copy))
        _gather(k_tail, kv, ids_t, kv_row8, DV, TAIL, tail_copy)
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
    zero = gl.full([BLOCK_H, _KEYS], 0.0, gl.float32, layout=scores_layout)
    head_p = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, store_layout))
    slot_p = gl.arange(0, _KEYS, layout=gl.SliceLayout(0, store_layout))
    pitch = pairs_row8 * 8
    ds_rows = pairs + (row * 2 * heads + head_p.to(gl.int64))[:, None] * pitch + slot_p[None, :]
    p_rows = ds_rows + heads.to(gl.int64) * pitch
    store_mask = (head_p < heads)[:, None]

    ids = _ids(idx, first + _KEYS, last, keys, spare, gl.SliceLayout(1, main_copy))
    if TAIL > 0:
        ids_t = _ids(idx, first + _KEYS, last, keys, spare, gl.SliceLayout(1, tail_copy))
    ok = _valid(idx, first, last, keys, key_columns)
    for start in range(first, last, _KEYS):
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        s = warpgroup_mma(q_0, k_0.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(g_0, k_0.permute((1, 0)), zero, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        gl.thread_barrier()
        _gather(k_0, kv, ids, kv_row8, 0, HALF, main_copy)
        s = warpgroup_mma(q_1, k_1.permute((1, 0)), s, is_async=True)
        dp = warpgroup_mma(g_1, k_1.permute((1, 0)), dp, is_async=True)
        if TAIL > 0:
            s = warpgroup_mma(q_tail, k_tail.permute((1, 0)), s, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        gl.thread_barrier()
        _gather(k_1, kv, ids, kv_row8, HALF, HALF, main_copy)
        if TAIL > 0:
            _gather(k_tail, kv, ids_t, kv_row8, DV, TAIL, tail_copy)
        async_copy.commit_group()
        next_ok = _valid(idx, start + _KEYS, last, keys, key_columns)
        ids = _ids(idx, start + 2 * _KEYS, last, keys, spare, gl.SliceLayout(1, main_copy))
        if TAIL > 0:
            ids_t = _ids(idx, start + 2 * _KEYS, last, keys, spare, gl.SliceLayout(1, tail_copy))
        p = gl.where(ok[None, :], gl.exp2(s * scale_log2 - base[:, None]), 0.0)
        # The scale goes in before the rounding to 16 bits, which keeps large activations inside fp16.
        ds = p * (dp - delta[:, None]) * scale
        gl.store(ds_rows + start, gl.convert_layout(ds.to(dtype), store_layout), mask=store_mask)
        gl.store(p_rows + start, gl.convert_layout(p.to(dtype), store_layout), mask=store_mask)
        ok = next_ok
    async_copy.wait_group(0)
