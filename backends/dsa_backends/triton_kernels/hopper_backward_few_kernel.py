"""Attention backward for compute capability 9.0 and at most 32 heads, in one kernel that stores nothing in between."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
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
    is_key,
    key_buffers,
    load_heads,
    produce_keys,
    slot_ids,
)

_SCATTER_WARPS = gl.constexpr(4)
_SCATTER_REGISTERS = gl.constexpr(200)
_SLICE = gl.constexpr(128)
"""Channels of the key gradient that are in registers at a time."""


@gluon.jit
def _make_pairs(
    slots,
    ring,
    handover,
    rows_of,
    shift,
    dq,
    scale,
    scale_log2,
    row,
    first_head,
    heads,
    DV: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BUFFERS: gl.constexpr,
    NEED_DQ: gl.constexpr,
):
    """P^T and dS^T ``[64, BLOCK_H]`` of every tile, handed over in shared memory, and dQ^T ``[Dqk, BLOCK_H]``."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    key_rows: gl.constexpr = gl.SliceLayout(1, layout)
    head_columns: gl.constexpr = gl.SliceLayout(0, layout)
    idx, begin, end, keys = slots
    k_main, k_tail, full, empty = ring
    pair_tiles, made, taken = handover
    q_main, q_tail, g_main = rows_of
    dtype: gl.constexpr = k_main.dtype
    head = first_head + gl.arange(0, BLOCK_H, layout=head_columns)
    base = gl.load(shift + (row * heads + head) * 2, mask=head < heads, other=float("inf"))
    delta = gl.load(shift + (row * heads + head) * 2 + 1, mask=head < heads, other=0.0)
    zero = gl.full([KEYS, BLOCK_H], 0.0, gl.float32, layout=layout)
    main = gl.full([DV, BLOCK_H], 0.0, gl.float32, layout=layout)
    if TAIL > 0:
        tail = gl.full([TAIL, BLOCK_H], 0.0, gl.float32, layout=layout)
    ok = is_key(slot_ids(idx, begin, end, key_rows), keys)
    at = begin * 0
    phase = at
    side = at
    turn = at + 1
    for start in range(begin, end, KEYS):
        next_ok = is_key(slot_ids(idx, start + KEYS, end, key_rows), keys)
        mbarrier.wait(full.index(at), phase)
        fence_async_shared()
        k_now = k_main.index(at)
        s = warpgroup_mma(k_now, q_main.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(k_now, g_main.permute((1, 0)), zero, use_acc=False, is_async=True)
        if TAIL > 0:
            s = warpgroup_mma(k_tail.index(at), q_tail.permute((1, 0)), s, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        p = gl.where(ok[:, None], gl.exp2(s * scale_log2 - base[None, :]), 0.0)
        # The scale goes in before the rounding to 16 bits, which keeps large activations inside fp16.
        ds = p * (dp - delta[None, :]) * scale
        mbarrier.wait(taken.index(side), turn)
        ds_tile = pair_tiles.index(2 * side)
        ds_tile.store(ds.to(dtype))
        pair_tiles.index(2 * side + 1).store(p.to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(made.index(side))
        if NEED_DQ:
            next_main = warpgroup_mma(k_now.permute((1, 0)), ds_tile, main, is_async=True)
            if TAIL > 0:
                k_t = k_tail.index(at).permute((1, 0))
                next_tail = warpgroup_mma(k_t, ds_tile, tail, is_async=True)
                main, tail = warpgroup_mma_wait(0, deps=[next_main, next_tail])
            else:
                main = warpgroup_mma_wait(0, deps=[next_main])
            barrier()
        mbarrier.arrive(empty.index(at))
        mbarrier.arrive(taken.index(side))
        ok = next_ok
        side, turn = advance(side, turn, 2)
        at, phase = advance(at, phase, BUFFERS)
    if NEED_DQ:
        place = dq + (row * heads + head.to(gl.int64))[None, :] * (DV + TAIL)
        channel = gl.arange(0, DV, layout=key_rows)
        gl.store(place + channel[:, None], main.to(dq.dtype.element_ty), mask=(head < heads)[None, :])
        if TAIL > 0:
            channel_t = DV + gl.arange(0, TAIL, layout=key_rows)
            gl.store(place + channel_t[:, None], tail.to(dq.dtype.element_ty), mask=(head < heads)[None, :])


@gluon.jit
def _target_rows(slots, start, first_slot, target, target_row4, ATOMIC: gl.constexpr, layout: gl.constexpr):
    """Where the rows of a tile's key gradient go, and which of them are keys."""
    idx, _, end, keys = slots
    ids = slot_ids(idx, start, end, layout)
    here = is_key(ids, keys)
    # Without the mask an id of -1 would add (a zero) to the row before the tensor.
    key_row = gl.where(here, ids, 0).to(gl.int64)
    rows = key_row if ATOMIC else first_slot + start + gl.arange(0, KEYS, layout=layout)
    return target + rows * (target_row4 * 4), here


@gluon.jit
def _put(place, value, here, ATOMIC: gl.constexpr):
    if ATOMIC:
        gl.atomic_add(place, value, mask=here[:, None], sem="relaxed")
    else:
        gl.store(place, value, mask=here[:, None])


@gluon.jit
def _scatter(
    slots,
    handover,
    rows_of,
    target,
    target_row4,
    first_slot,
    DV: gl.constexpr,
    TAIL: gl.constexpr,
    ATOMIC: gl.constexpr,
):
    """``dK = dS^T Q + P^T G`` of every tile, ``_SLICE`` channels at a time, to where its ids say.

    A warp writes a row's 512 bytes at once: reductions of eight bytes a thread, straight from the products' layout,
    took 9.0 ms where these take 6.2.
    """
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SLICE, 16])
    tail_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL if TAIL else 8, 16])
    out_layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    tail_out: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    _, begin, end, _ = slots
    pair_tiles, made, taken = handover
    q_main, q_tail, g_main = rows_of
    zero = gl.full([KEYS, _SLICE], 0.0, gl.float32, layout=grad_layout)
    channel = gl.arange(0, _SLICE, layout=gl.SliceLayout(0, out_layout))
    if TAIL > 0:
        zero_t = gl.full([KEYS, TAIL], 0.0, gl.float32, layout=tail_layout)
        channel_t = DV + gl.arange(0, TAIL, layout=gl.SliceLayout(0, tail_out))
    side = begin * 0
    turn = side
    for start in range(begin, end, KEYS):
        rows, here = _target_rows(
            slots, start, first_slot, target, target_row4, ATOMIC, gl.SliceLayout(1, out_layout)
        )
        if TAIL > 0:
            rows_t, here_t = _target_rows(
                slots, start, first_slot, target, target_row4, ATOMIC, gl.SliceLayout(1, tail_out)
            )
        mbarrier.wait(made.index(side), turn)
        ds = pair_tiles.index(2 * side).load(gl.DotOperandLayout(0, grad_layout, 2))
        p = pair_tiles.index(2 * side + 1).load(gl.DotOperandLayout(0, grad_layout, 2))
        barrier()
        mbarrier.arrive(taken.index(side))
        for at in gl.static_range(DV // _SLICE):
            q_part = q_main.slice(at * _SLICE, _SLICE, dim=1)
            g_part = g_main.slice(at * _SLICE, _SLICE, dim=1)
            grad = warpgroup_mma(ds, q_part, zero, use_acc=False, is_async=True)
            grad = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, g_part, grad, is_async=True)])
            place = rows[:, None] + (at * _SLICE + channel)[None, :]
            _put(place, gl.convert_layout(grad, out_layout), here, ATOMIC)
        if TAIL > 0:
            ds_t = gl.convert_layout(ds, gl.DotOperandLayout(0, tail_layout, 2))
            grad_t = warpgroup_mma(ds_t, q_tail, zero_t, use_acc=False, is_async=True)
            grad_t = warpgroup_mma_wait(0, deps=[grad_t])
            _put(rows_t[:, None] + channel_t[None, :], gl.convert_layout(grad_t, tail_out), here_t, ATOMIC)
        side, turn = advance(side, turn, 2)


@gluon.jit(
    do_not_specialize=[
        "q_row8",
        "q_head8",
        "kv_row8",
        "idx_row",
        "dout_row8",
        "dout_head8",
        "target_row4",
        "keys",
        "width",
        "heads",
    ],
    do_not_specialize_on_alignment=["idx", "length", "shift"],
)
def hopper_backward_few_kernel(
    q,
    kv,
    idx,
    length,
    shift,
    dout,
    dq,
    target,
    scale,
    scale_log2,
    q_row8,
    q_head8,
    kv_row8,
    idx_row,
    dout_row8,
    dout_head8,
    target_row4,
    keys,
    width,
    heads,
    DV: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BUFFERS: gl.constexpr,
    NEED_DQ: gl.constexpr,
    ATOMIC: gl.constexpr,
):
    """Grid (rows,), 4 + 4 + 4 warps: one group gathers, one makes P, dS and dQ, one makes dK and scatters it.

    The scatter bounds few heads (19 GB of fp32 atomics at 4096 rows x 2048 slots, 5.1 ms); everything else runs beside
    it. All is transposed as in ``hopper_forward_few_kernel``. ATOMIC: ``target`` is dkv ``[keys, Dqk]`` fp32, added
    into. Otherwise it is ``[rows, W, Dqk]`` fp32, written.
    """
    row = gl.program_id(0).to(gl.int64)
    end = gl.minimum(gl.load(length + row), width)
    q += row * q_row8 * 8
    dout += row * dout_row8 * 8
    k_main = key_buffers(kv.dtype.element_ty, BUFFERS, DV)
    k_tail = key_buffers(kv.dtype.element_ty, BUFFERS, TAIL)
    q_main = load_heads(q, q_head8, 0, heads, 0, DV, BLOCK_H, 4)
    q_tail = load_heads(q, q_head8, 0, heads, DV, TAIL, BLOCK_H, 4) if TAIL > 0 else q_main
    g_main = load_heads(dout, dout_head8, 0, heads, 0, DV, BLOCK_H, 4)
    pair_tiles = gl.allocate_shared_memory(
        kv.dtype.element_ty, [4, KEYS, BLOCK_H], gl.NVMMASharedLayout(BLOCK_H * 2, 16)
    )
    full = flags(BUFFERS, PRODUCER_WARPS * 32)
    empty = flags(BUFFERS, 1)
    made = flags(2, 1)
    taken = flags(2, 2)
    fence_async_shared()
    barrier()
    slots = (idx + row * idx_row, end * 0, end, keys)
    ring = (k_main, k_tail, full, empty)
    handover = (pair_tiles, made, taken)
    rows_of = (q_main, q_tail, g_main)
    gl.warp_specialize(
        [
            (
                _make_pairs,
                (
                    slots,
                    ring,
                    handover,
                    rows_of,
                    shift,
                    dq,
                    scale,
                    scale_log2,
                    row,
                    0,
                    heads,
                    DV,
                    TAIL,
                    BLOCK_H,
                    BUFFERS,
                    NEED_DQ,
                ),
            ),
            (_scatter, (slots, handover, rows_of, target, target_row4, row * width, DV, TAIL, ATOMIC)),
            (produce_keys, (kv, kv_row8, slots, ring, DV, TAIL, BUFFERS)),
        ],
        [_SCATTER_WARPS, PRODUCER_WARPS],
        [_SCATTER_REGISTERS, PRODUCER_REGISTERS],
    )
