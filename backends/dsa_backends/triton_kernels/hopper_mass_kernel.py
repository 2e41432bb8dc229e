"""The teacher's mass for compute capability 9.0: ``mass_kernel`` with warps that only gather."""

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

FLOOR = gl.constexpr(-1.0e30)


@gluon.jit
def _scores(q_main, q_tail, ring, at, phase, zero, TAIL: gl.constexpr):
    """Products of the heads with the tile in buffer ``at``, which goes back to the producer."""
    k_main, k_tail, full, empty = ring
    mbarrier.wait(full.index(at), phase)
    fence_async_shared()
    score = warpgroup_mma(q_main, k_main.index(at).permute((1, 0)), zero, use_acc=False, is_async=True)
    if TAIL > 0:
        score = warpgroup_mma(q_tail, k_tail.index(at).permute((1, 0)), score, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    barrier()
    mbarrier.arrive(empty.index(at))
    return score


@gluon.jit
def _find_lse(slots, ring, q_main, q_tail, lse_of, scale_log2, TAIL: gl.constexpr, BLOCK_H: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    key_columns: gl.constexpr = gl.SliceLayout(0, layout)
    head_rows: gl.constexpr = gl.SliceLayout(1, layout)
    idx, begin, end, keys = slots
    lse, first_head, heads = lse_of
    zero = gl.full([BLOCK_H, KEYS], 0.0, gl.float32, layout=layout)
    top = gl.full([BLOCK_H], FLOOR, gl.float32, layout=head_rows)
    total = gl.full([BLOCK_H], 0.0, gl.float32, layout=head_rows)
    at = begin * 0
    phase = at
    for start in range(begin, end, KEYS):
        ok = is_key(slot_ids(idx, start, end, key_columns), keys)
        s = _scores(q_main, q_tail, ring, at, phase, zero, TAIL)
        s = gl.where(ok[None, :], s * scale_log2, float("-inf"))
        # Never -inf, also where the first tiles have no key: -inf - (-inf) would be NaN.
        new_top = gl.maximum(top, gl.max(s, 1))
        total = total * gl.exp2(top - new_top) + gl.sum(gl.exp2(s - new_top[:, None]), 1)
        top = new_top
        at, phase = advance(at, phase, 2)
    some = total > 0.0
    natural = (top + gl.log2(gl.where(some, total, 1.0))) * 0.6931471805599453
    head = first_head + gl.arange(0, BLOCK_H, layout=head_rows)
    gl.store(lse + head, gl.where(some, natural, float("-inf")), mask=head < heads)


@gluon.jit
def _add_mass(
    slots, ring, q_main, q_tail, lse_of, mass, scale_log2, TAIL: gl.constexpr, BLOCK_H: gl.constexpr
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    key_columns: gl.constexpr = gl.SliceLayout(0, layout)
    idx, begin, end, keys = slots
    lse, first_head, heads = lse_of
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, layout))
    # An lse of +inf makes the P of a head that is not there zero, and that of a row without a key.
    base = gl.load(lse + head, mask=head < heads, other=float("inf"))
    base = gl.where(base == float("-inf"), float("inf"), base * 1.4426950408889634)
    zero = gl.full([BLOCK_H, KEYS], 0.0, gl.float32, layout=layout)
    column = gl.arange(0, KEYS, layout=key_columns)
    at = begin * 0
    phase = at
    for start in range(begin, end, KEYS):
        ok = is_key(slot_ids(idx, start, end, key_columns), keys)
        s = _scores(q_main, q_tail, ring, at, phase, zero, TAIL)
        here = gl.sum(gl.exp2(s * scale_log2 - base[:, None]), 0)
        gl.atomic_add(mass + start + column, here, mask=ok, sem="relaxed")
        at, phase = advance(at, phase, 2)


@gluon.jit
def _consume(
    slots,
    ring,
    q_main,
    q_tail,
    lse_of,
    mass,
    scale_log2,
    TAIL: gl.constexpr,
    BLOCK_H: gl.constexpr,
    FIND_LSE: gl.constexpr,
):
    if FIND_LSE:
        _find_lse(slots, ring, q_main, q_tail, lse_of, scale_log2, TAIL, BLOCK_H)
    else:
        _add_mass(slots, ring, q_main, q_tail, lse_of, mass, scale_log2, TAIL, BLOCK_H)


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
    FIND_LSE: gl.constexpr,
):
    """Grid (rows * head_blocks,), 4 + 4 warps, two key buffers.

    With FIND_LSE writes ``lse [rows, heads]`` (natural); otherwise adds into ``mass [rows, W]``, zero on entry: by
    atomics, and still the same bits every time: there are at most two blocks of heads, and two numbers have one sum.
    """
    program = gl.program_id(0)
    row = (program // head_blocks).to(gl.int64)
    first_head = (program % head_blocks) * BLOCK_H
    end = gl.minimum(gl.load(length + row), width)
    q += row * q_row8 * 8
    k_main = key_buffers(kv.dtype.element_ty, 2, MAIN)
    k_tail = key_buffers(kv.dtype.element_ty, 2, TAIL)
    q_main = load_heads(q, q_head8, first_head, heads, 0, MAIN, BLOCK_H, 4)
    q_tail = load_heads(q, q_head8, first_head, heads, MAIN, TAIL, BLOCK_H, 4) if TAIL > 0 else q_main
    full = flags(2, PRODUCER_WARPS * 32)
    empty = flags(2, 1)
    fence_async_shared()
    barrier()
    slots = (idx + row * idx_row, end * 0, end, keys)
    ring = (k_main, k_tail, full, empty)
    lse_of = (lse + row * heads, first_head, heads)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    slots,
                    ring,
                    q_main,
                    q_tail,
                    lse_of,
                    mass + row * mass_row,
                    scale_log2,
                    TAIL,
                    BLOCK_H,
                    FIND_LSE,
                ),
            ),
            (produce_keys, (kv, kv_row8, slots, ring, MAIN, TAIL, 2)),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )
