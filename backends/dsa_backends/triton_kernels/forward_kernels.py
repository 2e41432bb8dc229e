"""Sparse absorbed attention, forward: one program per (row, head block, split of the slots).

For a row ``t`` with queries ``Q [BLOCK_H, Dqk]`` the program walks the row's slots in tiles of ``BLOCK_N`` keys::

    K  = kv[id(t, c)]                [BLOCK_N, Dqk]      gathered; zero rows where the slot holds no key
    S  = scale * Q K^T               [BLOCK_H, BLOCK_N]  fp32
    m' = max(m, rowmax S);  P = exp(S - m');  l' = l exp(m - m') + rowsum P
    O' = O exp(m - m') + P K[:, :Dv] [BLOCK_H, Dv]       fp32
    out = O / l,  lse = m + log l

The channels of a key are cut in a value part (in ``PARTS`` equal parts, a power of two each) and a tail: the products
need powers of two, and 576 = 512 + 64 wastes nothing that way. Scores are kept in base 2 (``scale * log2 e``).
Neither ids read one step ahead nor bounds that come out of a reduction: Triton 3.9 fails on the first and, with the
second, forgets what it knows of the gather's alignment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsa_backends.triton_kernels.tiles import MOST_SPLITS

_FLOOR = tl.constexpr(-1.0e30)
"""Start of the running maximum: finite, because -inf - (-inf) is NaN for a row without a key."""

_MOST_SPLITS = tl.constexpr(MOST_SPLITS)
_SPLITS_AT_ONCE = tl.constexpr(8)


@triton.jit
def valid_ids(idx, slots, end, keys):
    """Ids of ``slots`` and which of them are keys. A slot at or past ``end`` is not even read."""
    ids = tl.load(idx + slots, mask=slots < end, other=-1)
    return ids, (ids >= 0) & (ids < keys)


@triton.jit(
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
def forward_kernel(
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
    DV: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Grid (rows * head_blocks, splits). ``span`` slots per split, a multiple of ``BLOCK_N``.

    ``out [splits, rows, heads, DV]`` and ``lse [splits, rows, heads]`` are contiguous; lse is natural.
    ``q_row8`` and friends are element strides divided by 8: that they are multiples of 8 is what lets a gather use
    16-byte copies.
    """
    program = tl.program_id(0)
    split = tl.program_id(1)
    row = (program // head_blocks).to(tl.int64)
    first_head = (program % head_blocks) * BLOCK_H
    begin = split * span
    end = tl.minimum(tl.load(length + row), width)
    end = tl.minimum(end, begin + span)

    offs_h = first_head + tl.arange(0, BLOCK_H)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = tl.arange(0, BLOCK_PART)
    offs_t = tl.arange(0, BLOCK_TAIL)
    has_head = offs_h < heads  # a block may reach past the last head: nothing there is read or written
    q_rows = q + row * q_row8 * 8 + offs_h.to(tl.int64)[:, None] * q_head8 * 8
    idx += row * idx_row

    in_part = offs_p < DV  # only true everywhere when the value width is a power of two
    q_0 = tl.load(q_rows + offs_p[None, :], mask=has_head[:, None] & in_part[None, :], other=0.0)
    acc_0 = tl.zeros([BLOCK_H, BLOCK_PART], tl.float32)
    if PARTS == 2:
        q_1 = tl.load(q_rows + (BLOCK_PART + offs_p)[None, :], mask=has_head[:, None], other=0.0)
        acc_1 = tl.zeros([BLOCK_H, BLOCK_PART], tl.float32)
    if TAIL > 0:
        in_tail = offs_t < TAIL  # a tail of 48 channels sits in a tile of 64
        q_t = tl.load(q_rows + (DV + offs_t)[None, :], mask=has_head[:, None] & in_tail[None, :], other=0.0)
    top = tl.full([BLOCK_H], _FLOOR, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)

    for start in tl.range(begin, end, BLOCK_N):
        ids, ok = valid_ids(idx, start + offs_n, end, keys)
        # An invalid slot reads nothing: its key row is zero, so that 0 * NaN cannot enter through the value product.
        k_rows = kv + tl.where(ok, ids, 0).to(tl.int64)[:, None] * (kv_row8 * 8)
        k_0 = tl.load(k_rows + offs_p[None, :], mask=ok[:, None] & in_part[None, :], other=0.0)
        score = tl.dot(q_0, tl.trans(k_0), input_precision=PRECISION)
        if PARTS == 2:
            k_1 = tl.load(k_rows + (BLOCK_PART + offs_p)[None, :], mask=ok[:, None], other=0.0)
            if CHAIN:
                score = tl.dot(q_1, tl.trans(k_1), score, input_precision=PRECISION)
            else:
                score += tl.dot(q_1, tl.trans(k_1), input_precision=PRECISION)
        if TAIL > 0:
            k_t = tl.load(k_rows + (DV + offs_t)[None, :], mask=ok[:, None] & in_tail[None, :], other=0.0)
            if CHAIN:
                score = tl.dot(q_t, tl.trans(k_t), score, input_precision=PRECISION)
            else:
                score += tl.dot(q_t, tl.trans(k_t), input_precision=PRECISION)
        score = tl.where(ok[None, :], score * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(score - new_top[:, None])
        total = total * shrink + tl.sum(p, 1)
        top = new_top
        p = p.to(k_0.dtype)
        acc_0 = tl.dot(p, k_0, acc_0 * shrink[:, None], input_precision=PRECISION)
        if PARTS == 2:
            acc_1 = tl.dot(p, k_1, acc_1 * shrink[:, None], input_precision=PRECISION)

    # Without a key: total 0, so divide by 1 and get 0; log2(0) is never taken.
    some = total > 0.0
    inverse = 1.0 / tl.where(some, total, 1.0)
    natural = (top + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453
    natural = tl.where(some, natural, float("-inf"))
    place = (split.to(tl.int64) * rows + row) * heads + offs_h
    tl.store(lse + place, natural, mask=has_head)
    o_rows = out + (place * DV)[:, None]
    acc_0 = acc_0 * inverse[:, None]
    tl.store(
        o_rows + offs_p[None, :], acc_0.to(out.dtype.element_ty), mask=has_head[:, None] & in_part[None, :]
    )
    if PARTS == 2:
        acc_1 = acc_1 * inverse[:, None]
        tl.store(
            o_rows + (BLOCK_PART + offs_p)[None, :], acc_1.to(out.dtype.element_ty), mask=has_head[:, None]
        )


@triton.jit(
    do_not_specialize=["row_heads", "splits"],
    do_not_specialize_on_alignment=["part", "part_lse", "out", "lse"],
)
def merge_kernel(
    part,
    part_lse,
    out,
    lse,
    row_heads,
    splits,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Grid (rows * heads,): merge ``part [splits, rows * heads, DV]`` by ``part_lse``, in slot order.

    Several splits are loaded before the first is added: one at a time, each would cost the memory's latency.
    """
    place = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_DV)
    each = tl.arange(0, _MOST_SPLITS)
    mine = part_lse + place + each.to(tl.int64) * row_heads
    top = tl.max(tl.load(mine, mask=each < splits, other=float("-inf")), 0)
    floor = tl.maximum(top, _FLOOR)  # every split empty: -inf - (-inf) would be NaN
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    split = place * 0
    for _first in range(0, splits, _SPLITS_AT_ONCE):
        for _ahead in tl.static_range(_SPLITS_AT_ONCE):
            # Past the last split the last one is read again, with no weight.
            at = place + tl.minimum(split, splits - 1) * row_heads
            lse_here = tl.where(split < splits, tl.load(part_lse + at), float("-inf"))
            weight = tl.exp2((lse_here - floor) * 1.4426950408889634)
            total += weight
            acc += weight * tl.load(part + at * DV + offs, mask=offs < DV, other=0.0)
            split += 1
    some = total > 0.0
    acc = acc / tl.where(some, total, 1.0)
    natural = floor + tl.log(tl.where(some, total, 1.0))
    tl.store(lse + place, tl.where(some, natural, float("-inf")))
    tl.store(out + place * DV + offs, acc.to(out.dtype.element_ty), mask=offs < DV)
