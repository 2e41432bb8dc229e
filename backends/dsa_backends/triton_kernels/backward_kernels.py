"""Sparse absorbed attention, backward: two kernels over a chunk of rows, three where one would not hold dQ.

For a row with queries ``Q [H, Dqk]``, output gradient ``G [H, Dv]``, ``delta = rowsum(out * G) [H]`` and keys ``K [W,
Dqk]``::

    P  = exp(scale * Q K^T - lse)                        [H, W]   rebuilt from the very expression of the forward
    dS = scale * P * (G K[:, :Dv]^T - delta)             [H, W]
    dQ = dS K                                            [H, Dqk]   kernel 1, which stores P and dS
    dK = dS^T Q  (all channels) + P^T G (value channels) [W, Dqk]   kernel 2, added into the rows the ids name

Kernel 2 sums over all heads inside one product, so a key row is scattered once per slot whatever the head count: fp32
atomics (19 GB at 4096 rows x 2048 slots) are what bounds few heads. In the deterministic form it stores the rows of
``dK`` instead, and ``ordered_sum`` adds them up in a fixed order.
``P`` and ``dS`` are the only tensors that grow with rows x heads x slots; the caller cuts the rows into chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsa_backends.triton_kernels.forward_kernels import valid_ids
from dsa_backends.triton_kernels.scratch import SLOT_TILE

_SLOT_TILE = tl.constexpr(SLOT_TILE)


@triton.jit(
    do_not_specialize=["out_row8", "out_head8", "dout_row8", "dout_head8", "heads"],
    do_not_specialize_on_alignment=["lse", "shift"],
)
def row_shift_kernel(
    out,
    dout,
    lse,
    shift,
    out_row8,
    out_head8,
    dout_row8,
    dout_head8,
    heads,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Grid (rows * heads,). ``shift [rows, heads, 2]`` fp32: lse in base 2, and ``rowsum(out * dout)``.

    By itself because the loads of ``out`` cost the main kernel the registers that its products need.
    """
    place = tl.program_id(0).to(tl.int64)
    row = place // heads
    head = place % heads
    offs = tl.arange(0, BLOCK_DV)
    mask = offs < DV
    o = tl.load(out + row * out_row8 * 8 + head * out_head8 * 8 + offs, mask=mask, other=0.0)
    g = tl.load(dout + row * dout_row8 * 8 + head * dout_head8 * 8 + offs, mask=mask, other=0.0)
    base = tl.load(lse + place)
    # A row without a key has lse -inf; a provider may also say +inf. Both must give P = 0, not exp(+inf).
    base = tl.where(base == float("-inf"), float("inf"), base * 1.4426950408889634)
    tl.store(shift + place * 2, base)
    tl.store(shift + place * 2 + 1, tl.sum(o.to(tl.float32) * g.to(tl.float32)))


@triton.jit(
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
def query_gradient_kernel(
    q,
    kv,
    idx,
    length,
    shift,
    dout,
    dq,
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
    DV: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    NEED_DQ: tl.constexpr,
    NEED_PAIRS: tl.constexpr,
):
    """Grid (rows * head_blocks,). Writes ``dq [rows, heads, DV + TAIL]`` and ``pairs [rows, 2, heads, padded W]``.

    ``pairs[:, 0]`` is dS and ``pairs[:, 1]`` is P, each row ``pairs_row8 * 8`` slots apart; only
    the tiles that hold a key are written, and the later kernels walk no others.
    """
    program = tl.program_id(0)
    row = (program // head_blocks).to(tl.int64)
    first_head = (program % head_blocks) * BLOCK_H
    end = tl.minimum(tl.load(length + row), width)
    offs_h = first_head + tl.arange(0, BLOCK_H)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = tl.arange(0, BLOCK_PART)
    offs_t = tl.arange(0, BLOCK_TAIL)
    has_head = offs_h < heads
    head = offs_h.to(tl.int64)[:, None]
    idx += row * idx_row
    in_part = offs_p < DV
    part_mask = has_head[:, None] & in_part[None, :]

    q_rows = q + row * q_row8 * 8 + head * q_head8 * 8
    g_rows = dout + row * dout_row8 * 8 + head * dout_head8 * 8
    q_0 = tl.load(q_rows + offs_p[None, :], mask=part_mask, other=0.0)
    g_0 = tl.load(g_rows + offs_p[None, :], mask=part_mask, other=0.0)
    if PARTS == 2:
        offs_1 = BLOCK_PART + offs_p
        q_1 = tl.load(q_rows + offs_1[None, :], mask=has_head[:, None], other=0.0)
        g_1 = tl.load(g_rows + offs_1[None, :], mask=has_head[:, None], other=0.0)
    if TAIL > 0:
        in_tail = offs_t < TAIL
        tail_mask = has_head[:, None] & in_tail[None, :]
        q_t = tl.load(q_rows + (DV + offs_t)[None, :], mask=tail_mask, other=0.0)
    base = tl.load(shift + (row * heads + offs_h) * 2, mask=has_head, other=float("inf"))
    delta = tl.load(shift + (row * heads + offs_h) * 2 + 1, mask=has_head, other=0.0)

    if NEED_DQ:
        dq_0 = tl.zeros([BLOCK_H, BLOCK_PART], tl.float32)
        if PARTS == 2:
            dq_1 = tl.zeros([BLOCK_H, BLOCK_PART], tl.float32)
        if TAIL > 0:
            dq_t = tl.zeros([BLOCK_H, BLOCK_TAIL], tl.float32)

    walked = end
    if NEED_PAIRS:
        walked = (end + _SLOT_TILE - 1) // _SLOT_TILE * _SLOT_TILE
    pair_rows = pairs + (row * 2 * heads + head) * (pairs_row8 * 8)
    for start in tl.range(0, walked, BLOCK_N):
        ids, ok = valid_ids(idx, start + offs_n, end, keys)
        k_rows = kv + tl.where(ok, ids, 0).to(tl.int64)[:, None] * (kv_row8 * 8)
        k_0 = tl.load(k_rows + offs_p[None, :], mask=ok[:, None] & in_part[None, :], other=0.0)
        score = tl.dot(q_0, tl.trans(k_0), input_precision=PRECISION)
        dp = tl.dot(g_0, tl.trans(k_0), input_precision=PRECISION)
        if PARTS == 2:
            k_1 = tl.load(k_rows + (BLOCK_PART + offs_p)[None, :], mask=ok[:, None], other=0.0)
            score = tl.dot(q_1, tl.trans(k_1), score, input_precision=PRECISION)
            dp = tl.dot(g_1, tl.trans(k_1), dp, input_precision=PRECISION)
        if TAIL > 0:
            k_t = tl.load(k_rows + (DV + offs_t)[None, :], mask=ok[:, None] & in_tail[None, :], other=0.0)
            score = tl.dot(q_t, tl.trans(k_t), score, input_precision=PRECISION)
        p = tl.where(ok[None, :], tl.exp2(score * scale_log2 - base[:, None]), 0.0)
        # The scale goes in before the rounding to 16 bits, which keeps large activations inside fp16.
        ds = (p * (dp - delta[:, None]) * scale).to(k_0.dtype)
        if NEED_PAIRS:
            place = pair_rows + (start + offs_n)[None, :]
            tl.store(place, ds, mask=has_head[:, None])
            tl.store(place + heads.to(tl.int64) * (pairs_row8 * 8), p.to(k_0.dtype), mask=has_head[:, None])
        if NEED_DQ:
            dq_0 = tl.dot(ds, k_0, dq_0, input_precision=PRECISION)
            if PARTS == 2:
                dq_1 = tl.dot(ds, k_1, dq_1, input_precision=PRECISION)
            if TAIL > 0:
                dq_t = tl.dot(ds, k_t, dq_t, input_precision=PRECISION)

    if NEED_DQ:
        d_rows = dq + (row * heads + head) * (DV + TAIL)
        tl.store(d_rows + offs_p[None, :], dq_0.to(dq.dtype.element_ty), mask=part_mask)
        if PARTS == 2:
            tl.store(
                d_rows + (BLOCK_PART + offs_p)[None, :], dq_1.to(dq.dtype.element_ty), mask=has_head[:, None]
            )
        if TAIL > 0:
            tl.store(d_rows + (DV + offs_t)[None, :], dq_t.to(dq.dtype.element_ty), mask=tail_mask)


@triton.jit(
    do_not_specialize=["kv_row8", "idx_row", "keys", "width", "heads", "head_blocks", "pairs_row8"],
    do_not_specialize_on_alignment=["idx", "length"],
)
def query_product_kernel(
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
    DV: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (rows * head_blocks * SLICES,). ``dq = dS K`` from the stored dS, where one kernel would not hold it all.

    With 64 heads and 576 channels the accumulator, Q, G and a key tile exceed registers and shared memory together.
    """
    program = tl.program_id(0)
    part = program % SLICES
    block = program // SLICES
    row = (block // head_blocks).to(tl.int64)
    end = tl.minimum(tl.load(length + row), width)
    offs_n = tl.arange(0, BLOCK_N)
    offs_c = part * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_t = part * BLOCK_TAIL + tl.arange(0, BLOCK_TAIL)
    offs_h = (block % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_value = offs_c < DV
    in_tail = offs_t < TAIL
    has_head = offs_h < heads
    head = offs_h.to(tl.int64)[:, None]
    idx += row * idx_row
    pair_rows = pairs + (row * 2 * heads + head) * (pairs_row8 * 8)
    acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    if TAIL > 0:
        acc_t = tl.zeros([BLOCK_H, BLOCK_TAIL], tl.float32)
    for start in tl.range(0, end, BLOCK_N):
        ids, ok = valid_ids(idx, start + offs_n, end, keys)
        ds = tl.load(pair_rows + (start + offs_n)[None, :], mask=has_head[:, None], other=0.0)
        k_rows = kv + tl.where(ok, ids, 0).to(tl.int64)[:, None] * (kv_row8 * 8)
        k_c = tl.load(k_rows + offs_c[None, :], mask=ok[:, None] & in_value[None, :], other=0.0)
        acc = tl.dot(ds, k_c, acc, input_precision=PRECISION)
        if TAIL > 0:
            k_t = tl.load(k_rows + (DV + offs_t)[None, :], mask=ok[:, None] & in_tail[None, :], other=0.0)
            acc_t = tl.dot(ds, k_t, acc_t, input_precision=PRECISION)
    d_rows = dq + (row * heads + head) * (DV + TAIL)
    tl.store(
        d_rows + offs_c[None, :], acc.to(dq.dtype.element_ty), mask=has_head[:, None] & in_value[None, :]
    )
    if TAIL > 0:
        tl.store(
            d_rows + (DV + offs_t)[None, :],
            acc_t.to(dq.dtype.element_ty),
            mask=has_head[:, None] & in_tail[None, :],
        )


@triton.jit(
    do_not_specialize=[
        "q_row8",
        "q_head8",
        "dout_row8",
        "dout_head8",
        "target_row4",
        "idx_row",
        "keys",
        "width",
        "heads",
        "first_head",
        "pairs_row8",
    ],
    do_not_specialize_on_alignment=["idx", "length"],
)
def key_gradient_kernel(
    q,
    dout,
    idx,
    length,
    pairs,
    target,
    q_row8,
    q_head8,
    dout_row8,
    dout_head8,
    target_row4,
    idx_row,
    keys,
    width,
    heads,
    first_head,
    pairs_row8,
    DV: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    ATOMIC: tl.constexpr,
    ADD: tl.constexpr,
):
    """Grid (rows * SLICES,). A program owns ``BLOCK_C`` value channels and ``BLOCK_TAIL`` of the tail.

    ATOMIC: ``target`` is dkv ``[keys, Dqk]`` fp32, added into. Otherwise it is ``[rows, W, Dqk]`` fp32, written, or
    added into (ADD) for every block of heads after the first.
    """
    program = tl.program_id(0)
    row = (program // SLICES).to(tl.int64)
    part = program % SLICES
    end = tl.minimum(tl.load(length + row), width)
    offs_n = tl.arange(0, BLOCK_N)
    offs_c = part * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_t = part * BLOCK_TAIL + tl.arange(0, BLOCK_TAIL)
    offs_h = first_head + tl.arange(0, BLOCK_H)
    in_value = offs_c < DV
    in_tail = offs_t < TAIL
    idx += row * idx_row
    pair_row = pairs_row8 * 8
    has_head = offs_h < heads
    head = offs_h.to(tl.int64)[:, None]
    q_rows = q + row * q_row8 * 8 + head * q_head8 * 8
    g_rows = dout + row * dout_row8 * 8 + head * dout_head8 * 8
    q_c = tl.load(q_rows + offs_c[None, :], mask=has_head[:, None] & in_value[None, :], other=0.0)
    g_c = tl.load(g_rows + offs_c[None, :], mask=has_head[:, None] & in_value[None, :], other=0.0)
    if TAIL > 0:
        q_t = tl.load(q_rows + (DV + offs_t)[None, :], mask=has_head[:, None] & in_tail[None, :], other=0.0)
    pair_rows = pairs + (row * 2 * heads + head) * pair_row
    apart = heads.to(tl.int64) * pair_row
    for start in tl.range(0, end, BLOCK_N):
        slots = start + offs_n
        ids, ok = valid_ids(idx, slots, end, keys)
        place = pair_rows + slots[None, :]
        # Whole tiles were written by the first kernel, so only the heads need a mask.
        ds = tl.load(place, mask=has_head[:, None], other=0.0)
        p = tl.load(place + apart, mask=has_head[:, None], other=0.0)
        grad = tl.dot(tl.trans(ds), q_c, input_precision=PRECISION)
        grad = tl.dot(tl.trans(p), g_c, grad, input_precision=PRECISION)
        if TAIL > 0:
            grad_t = tl.dot(tl.trans(ds), q_t, input_precision=PRECISION)
        if ATOMIC:
            # Without a mask an id of -1 would add (a zero) to the row before the tensor.
            d_rows = target + tl.where(ok, ids, 0).to(tl.int64)[:, None] * (target_row4 * 4)
            tl.atomic_add(d_rows + offs_c[None, :], grad, mask=ok[:, None] & in_value[None, :], sem="relaxed")
            if TAIL > 0:
                tl.atomic_add(
                    d_rows + (DV + offs_t)[None, :],
                    grad_t,
                    mask=ok[:, None] & in_tail[None, :],
                    sem="relaxed",
                )
        else:
            d_rows = target + (row * width + slots)[:, None] * (target_row4 * 4)
            value_mask = ok[:, None] & in_value[None, :]
            if ADD:
                grad += tl.load(d_rows + offs_c[None, :], mask=value_mask, other=0.0)
            tl.store(d_rows + offs_c[None, :], grad, mask=value_mask)
            if TAIL > 0:
                tail_mask = ok[:, None] & in_tail[None, :]
                if ADD:
                    grad_t += tl.load(d_rows + (DV + offs_t)[None, :], mask=tail_mask, other=0.0)
                tl.store(d_rows + (DV + offs_t)[None, :], grad_t, mask=tail_mask)
