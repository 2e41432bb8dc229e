"""The indexer's scores and the exact selection of the best k of them.

Scores, for a tile of keys ``K [BLOCK_N, Di]`` and one row ``t`` at a time::

    S[c, h]  = K[c] . q[t, h]                 [BLOCK_N, heads]
    score[c] = sum_h w[t, h] * relu(S[c, h])  [BLOCK_N]           fp32, in head order

A score depends on nothing but its row and key, so equal keys score equally wherever they stand and whatever the chunk.

Selection, for a row of scores mapped to integers of the same order: find the threshold by counting, with the bracket
``count(x >= low) >= k > count(x >= high)`` as the invariant, then take everything above it and, of what equals it, the
lowest ids, ranked by a prefix sum in id order. There is no candidate buffer, so nothing can overflow.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = -(2**31)
_LOWEST = tl.constexpr(LOWEST)
"""Order of a column that may not be chosen; below -inf, which may."""


@triton.jit(
    do_not_specialize=[
        "q_row8",
        "q_head8",
        "k_row8",
        "w_row",
        "score_row",
        "rows",
        "first_key",
        "columns",
        "heads",
    ],
    do_not_specialize_on_alignment=["w", "starts", "ends"],
)
def score_kernel(
    q,
    k,
    w,
    starts,
    ends,
    scores,
    q_row8,
    q_head8,
    k_row8,
    w_row,
    score_row,
    rows,
    first_key,
    columns,
    heads,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (key tiles, row groups). ``scores [rows, columns]`` fp32; column ``c`` is key ``first_key + c``.

    Tiles outside the ranges of all their rows are left unwritten; the selection never reads them.
    """
    column = tl.program_id(0) * BLOCK_N
    row_0 = tl.program_id(1) * ROWS
    low = first_key + column
    high = low + tl.minimum(BLOCK_N, columns - column)
    group = row_0 + tl.arange(0, ROWS)
    begin = tl.load(starts + group, mask=group < rows, other=2147483647)
    end = tl.load(ends + group, mask=group < rows, other=0)
    touched = (begin < high) & (end > low) & (begin < end)
    if tl.max(touched.to(tl.int32), 0) > 0:
        offs_n = tl.arange(0, BLOCK_N)
        offs_d = tl.arange(0, BLOCK_D)
        offs_h = tl.arange(0, BLOCK_H)
        has_key = low + offs_n < high
        in_dim = offs_d < DIM
        has_head = offs_h < heads
        key = (low + offs_n).to(tl.int64)[:, None]
        keys = tl.load(
            k + key * k_row8 * 8 + offs_d[None, :], mask=has_key[:, None] & in_dim[None, :], other=0.0
        )
        head_rows = q + offs_h.to(tl.int64)[:, None] * q_head8 * 8 + offs_d[None, :]
        q_mask = has_head[:, None] & in_dim[None, :]
        row_base = tl.cast(row_0, tl.int64)
        for at in tl.range(0, tl.minimum(ROWS, rows - row_0)):
            row = row_base + at
            heads_of_row = tl.load(head_rows + row * q_row8 * 8, mask=q_mask, other=0.0)
            weight = tl.load(w + row * w_row + offs_h, mask=has_head, other=0.0).to(tl.float32)
            s = tl.dot(keys, tl.trans(heads_of_row), input_precision=PRECISION)
            if RELU:
                s = tl.maximum(s, 0.0)
            score = tl.sum(s * weight[None, :], 1)
            tl.store(scores + row * score_row + column + offs_n, score, mask=has_key)


@triton.jit
def ordered(x):
    """Map fp32 to int32 of the same order; -0.0 with +0.0, every NaN on top: its column stays one candidate.

    The top is one below the largest int32, because the bracket of the search ends one above it.
    """
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFE, order)


@triton.jit
def value_of(order):
    """About the fp32 value of an order, kept far enough from infinity that differences are finite."""
    value = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(value, -1.0e38), 1.0e38)


@triton.jit(
    do_not_specialize=[
        "score_row",
        "first_key",
        "columns",
        "topk",
        "carry_row",
        "out_row",
        "last",
    ],
    do_not_specialize_on_alignment=[
        "starts",
        "ends",
        "carry_ids",
        "carry_order",
        "out_ids",
        "out_order",
        "length",
    ],
)
def select_kernel(
    scores,
    starts,
    ends,
    carry_ids,
    carry_order,
    out_ids,
    out_order,
    length,
    score_row,
    first_key,
    columns,
    topk,
    carry_row,
    out_row,
    last,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    RANKED: tl.constexpr,
    HAS_CARRY: tl.constexpr,
):
    """Grid (rows,). Best ``topk`` of one block of columns and of what earlier blocks chose (``carry``, lower ids).

    ``scores [rows, columns]``; ``carry_ids``, ``carry_order [rows, BLOCK_K]`` as this kernel writes them: ascending
    ids, padded with -1 and LOWEST. Writes ``out_ids`` likewise, ``topk`` wide, and ``length``; ``out_order`` unless
    ``last``.
    """
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    offs_k = tl.arange(0, BLOCK_K)
    begin = tl.load(starts + row) - first_key
    end = tl.minimum(tl.load(ends + row) - first_key, columns)
    inside = (offs >= begin) & (offs < end)
    row_scores = scores + row * score_row
    x = tl.load(row_scores + offs, mask=inside, other=0.0)
    order = tl.where(inside, ordered(x), _LOWEST)
    valid = tl.sum(inside.to(tl.int32), 0)
    top = tl.max(order, 0)
    bottom = tl.min(tl.where(inside, order, 2147483647), 0)
    if HAS_CARRY:
        kept_id = tl.load(carry_ids + row * carry_row + offs_k, mask=offs_k < topk, other=-1)
        kept = tl.load(carry_order + row * carry_row + offs_k, mask=offs_k < topk, other=_LOWEST)
        valid += tl.sum((kept_id >= 0).to(tl.int32), 0)
        top = tl.maximum(top, tl.max(kept, 0))
        bottom = tl.minimum(bottom, tl.min(tl.where(kept_id >= 0, kept, 2147483647), 0))

    low = bottom.to(tl.int64)
    high = top.to(tl.int64) + 1
    at_low = valid
    at_high = valid * 0
    step = valid * 0
    # Too few to choose from: everything is taken, no threshold is needed.
    while (at_low > topk) & (high - low > 1):
        # Counts fall about exponentially with the value, so interpolate their logarithms; every third step halves the
        # bracket, which bounds the number of sweeps. The first two look at zero: after a ReLU it often is the
        # threshold.
        up = tl.log2(at_low.to(tl.float32))
        down = tl.log2(tl.maximum(at_high.to(tl.float32), 0.5))
        fraction = (up - tl.log2(topk.to(tl.float32))) / (up - down)
        low_value = value_of(low.to(tl.int32))
        guess = ordered(low_value + fraction * (value_of(high.to(tl.int32)) - low_value)).to(tl.int64)
        middle = tl.where(step % 3 == 1, low + (high - low) // 2, guess)
        middle = tl.where(step < 2, (1 - step).to(tl.int64), middle)
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        bound = middle.to(tl.int32)
        count = tl.sum((order >= bound).to(tl.int32), 0)
        if HAS_CARRY:
            count += tl.sum((kept >= bound).to(tl.int32), 0)
        enough = count >= topk
        low = tl.where(enough, middle, low)
        at_low = tl.where(enough, count, at_low)
        high = tl.where(enough, high, middle)
        at_high = tl.where(enough, at_high, count)
        step += 1

    # Either exactly topk are >= low, or low is the threshold and only some of its equals are taken.
    exact = at_low <= topk
    sure = tl.where(exact, low, high).to(tl.int32)
    tied = low.to(tl.int32)
    wanted = tl.where(exact, 0, topk - at_high)
    chosen = tl.where(exact, at_low, topk)
    base_greater = valid * 0
    base_equal = valid * 0
    ids_row = out_ids + row * out_row
    if HAS_CARRY:
        is_key = kept_id >= 0
        kept_greater = is_key & (kept >= sure)
        kept_equal = is_key & (kept == tied)
        rank_greater = tl.cumsum(kept_greater.to(tl.int32), 0) - kept_greater.to(tl.int32)
        rank_equal = tl.cumsum(kept_equal.to(tl.int32), 0) - kept_equal.to(tl.int32)
        take = kept_greater | (kept_equal & (rank_equal < wanted))
        place = rank_greater + tl.minimum(rank_equal, wanted)
        tl.store(ids_row + place, kept_id, mask=take)
        if last == 0:
            tl.store(out_order + row * out_row + place, kept, mask=take)
        base_greater = tl.sum(kept_greater.to(tl.int32), 0)
        base_equal = tl.sum(kept_equal.to(tl.int32), 0)
    # The scores are read again, a part at a time: held from above, they would not leave the ranks a register. A part is
    # a matrix whose rows are ranked within a warp; only the sums of its rows are scanned across warps.
    offs_c = tl.arange(0, CHUNK // RANKED)[:, None] * RANKED + tl.arange(0, RANKED)[None, :]
    for start in tl.range(tl.maximum(begin, 0) // CHUNK * CHUNK, end, CHUNK, num_stages=1):
        column = start + offs_c
        here = (column >= begin) & (column < end)
        value = ordered(tl.load(row_scores + column, mask=here, other=0.0))
        greater = (here & (value >= sure)).to(tl.int32)
        equal = (here & (value == tied)).to(tl.int32)
        # One scan for both ranks: a part has fewer than 2**16 columns.
        packed = (greater << 16) + equal
        of_row = tl.sum(packed, 1)
        rank = tl.cumsum(packed, 1) - packed + (tl.cumsum(of_row, 0) - of_row)[:, None]
        rank_equal_here = base_equal + (rank & 0xFFFF)
        # Flat again for the scattered stores: as matrices they would be transposed through shared memory first.
        take_here = tl.reshape((greater != 0) | ((equal != 0) & (rank_equal_here < wanted)), [CHUNK])
        place_here = base_greater + (rank >> 16) + tl.minimum(rank_equal_here, wanted)
        place_here = tl.reshape(place_here, [CHUNK])
        tl.store(ids_row + place_here, first_key + start + tl.arange(0, CHUNK), mask=take_here)
        if last == 0:
            tl.store(out_order + row * out_row + place_here, tl.reshape(value, [CHUNK]), mask=take_here)
        in_part = tl.sum(of_row, 0)
        base_greater += in_part >> 16
        base_equal += in_part & 0xFFFF
    tl.store(ids_row + offs_k, -1, mask=(offs_k >= chosen) & (offs_k < topk))
    if last == 0:
        tl.store(out_order + row * out_row + offs_k, _LOWEST, mask=(offs_k >= chosen) & (offs_k < topk))
    else:
        tl.store(length + row, chosen)
