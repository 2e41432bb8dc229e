"""The teacher's mass and the indexer's loss over given slots.

Teacher, for a row with queries ``Q [H, Dqk]`` and slot keys ``K [W, Dqk]``::

    mass[c] = sum_h exp(scale * Q[h] . K[c] - lse[h])                       [W]

Loss, with the indexer's ``q [Hi, Di]``, weights ``w [Hi]`` and slot keys ``k [W, Di]``::

    S = q k^T [Hi, W];  score = sum_h w relu(S);  P = softmax(score)        over the row's keys
    T = mass / max(sum mass, 1e-10)
    kl = sum_c T (log max(T, 1e-10) - log P)
    g = P sum_c T - T                                                       d kl / d score
    dw[h] = sum_c g relu(S);  dS = g w [S > 0];  dq = dS k;  dk = dS^T q

The dense form is the sparse one with the row's whole range as its slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsa_backends.triton_kernels.forward_kernels import valid_ids

_FLOOR = tl.constexpr(-1.0e30)


@triton.jit(
    do_not_specialize=["q_row8", "q_head8", "kv_row8", "idx_row", "mass_row", "keys", "width", "heads"],
    do_not_specialize_on_alignment=["idx", "length", "lse", "mass"],
)
def mass_kernel(
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
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    FIND_LSE: tl.constexpr,
):
    """Grid (rows,). With FIND_LSE writes ``lse [rows, heads]`` (natural); otherwise adds into ``mass [rows, W]`` fp32.

    ``mass`` is zero on entry. One program owns a row, so its blocks of heads may add into it one after the other.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    offs_p = tl.arange(0, BLOCK_PART)
    offs_t = tl.arange(0, BLOCK_TAIL)
    in_part = offs_p < MAIN
    in_tail = offs_t < TAIL
    idx += row * idx_row
    mass += row * mass_row
    end = tl.minimum(tl.load(length + row), width)
    for first_head in tl.range(0, heads, BLOCK_H, num_stages=1):
        offs_h = first_head + tl.arange(0, BLOCK_H)
        has_head = offs_h < heads
        q_rows = q + row * q_row8 * 8 + offs_h.to(tl.int64)[:, None] * q_head8 * 8
        q_0 = tl.load(q_rows + offs_p[None, :], mask=has_head[:, None] & in_part[None, :], other=0.0)
        if PARTS == 2:
            q_1 = tl.load(q_rows + (BLOCK_PART + offs_p)[None, :], mask=has_head[:, None], other=0.0)
        if TAIL > 0:
            q_t = tl.load(
                q_rows + (MAIN + offs_t)[None, :], mask=has_head[:, None] & in_tail[None, :], other=0.0
            )
        base = tl.zeros([BLOCK_H], tl.float32)
        if not FIND_LSE:
            base = tl.load(lse + row * heads + offs_h, mask=has_head, other=float("inf"))
            base = tl.where(base == float("-inf"), float("inf"), base * 1.4426950408889634)
        top = tl.full([BLOCK_H], _FLOOR, tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        for start in tl.range(0, end, BLOCK_N):
            ids, ok = valid_ids(idx, start + offs_n, end, keys)
            k_rows = kv + tl.where(ok, ids, 0).to(tl.int64)[:, None] * (kv_row8 * 8)
            k_0 = tl.load(k_rows + offs_p[None, :], mask=ok[:, None] & in_part[None, :], other=0.0)
            score = tl.dot(q_0, tl.trans(k_0), input_precision=PRECISION)
            if PARTS == 2:
                k_1 = tl.load(k_rows + (BLOCK_PART + offs_p)[None, :], mask=ok[:, None], other=0.0)
                score = tl.dot(q_1, tl.trans(k_1), score, input_precision=PRECISION)
            if TAIL > 0:
                k_t = tl.load(
                    k_rows + (MAIN + offs_t)[None, :], mask=ok[:, None] & in_tail[None, :], other=0.0
                )
                score = tl.dot(q_t, tl.trans(k_t), score, input_precision=PRECISION)
            score = tl.where(ok[None, :], score * scale_log2, float("-inf"))
            if FIND_LSE:
                new_top = tl.maximum(top, tl.max(score, 1))
                total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(score - new_top[:, None]), 1)
                top = new_top
            else:
                # A padded head has base +inf, hence P = 0.
                here = tl.sum(tl.exp2(score - base[:, None]), 0)
                place = mass + start + offs_n
                here += tl.load(place, mask=ok, other=0.0)
                tl.store(place, here, mask=ok)
        if FIND_LSE:
            some = total > 0.0
            natural = (top + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453
            tl.store(lse + row * heads + offs_h, tl.where(some, natural, float("-inf")), mask=has_head)


@triton.jit(
    do_not_specialize=[
        "q_row8",
        "q_head8",
        "k_row8",
        "w_row",
        "idx_row",
        "mass_row",
        "score_row",
        "keys",
        "width",
        "heads",
    ],
    do_not_specialize_on_alignment=["w", "idx", "length", "mass", "scores", "facts"],
)
def loss_score_kernel(
    q,
    k,
    w,
    idx,
    length,
    mass,
    scores,
    facts,
    q_row8,
    q_head8,
    k_row8,
    w_row,
    idx_row,
    mass_row,
    score_row,
    keys,
    width,
    heads,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (rows,). ``scores [rows, W]`` of the walked slots; ``facts [rows, 2]``: their lse, the sum of the mass."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_h = tl.arange(0, BLOCK_H)
    in_dim = offs_d < DIM
    has_head = offs_h < heads
    idx += row * idx_row
    q_rows = q + row * q_row8 * 8 + offs_h.to(tl.int64)[:, None] * q_head8 * 8
    query = tl.load(q_rows + offs_d[None, :], mask=has_head[:, None] & in_dim[None, :], other=0.0)
    weight = tl.load(w + row * w_row + offs_h, mask=has_head, other=0.0).to(tl.float32)
    end = tl.minimum(tl.load(length + row), width)
    top = tl.full([BLOCK_N], _FLOOR, tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    weighed = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(0, end, BLOCK_N):
        ids, ok = valid_ids(idx, start + offs_n, end, keys)
        k_rows = k + tl.where(ok, ids, 0).to(tl.int64)[:, None] * (k_row8 * 8)
        key = tl.load(k_rows + offs_d[None, :], mask=ok[:, None] & in_dim[None, :], other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if RELU:
            s = tl.maximum(s, 0.0)
        score = tl.sum(s * weight[:, None], 0)
        tl.store(scores + row * score_row + start + offs_n, score, mask=ok)
        weighed += tl.load(mass + row * mass_row + start + offs_n, mask=ok, other=0.0)
        # One running maximum per column of the tile: nothing is reduced inside the loop.
        score = tl.where(ok, score, float("-inf"))
        new_top = tl.maximum(top, score)
        total = total * tl.exp2((top - new_top) * 1.4426950408889634) + tl.exp2(
            (score - new_top) * 1.4426950408889634
        )
        top = new_top
    best = tl.max(top, 0)
    total = tl.sum(total * tl.exp2((top - best) * 1.4426950408889634), 0)
    some = total > 0.0
    tl.store(facts + row * 2, tl.where(some, best + tl.log(tl.where(some, total, 1.0)), 0.0))
    tl.store(facts + row * 2 + 1, tl.sum(weighed, 0))


@triton.jit(
    do_not_specialize=[
        "q_row8",
        "q_head8",
        "k_row8",
        "w_row",
        "idx_row",
        "mass_row",
        "score_row",
        "target_row4",
        "keys",
        "width",
        "heads",
    ],
    do_not_specialize_on_alignment=["w", "idx", "length", "mass", "scores", "facts", "kl", "dw"],
)
def loss_gradient_kernel(
    q,
    k,
    w,
    idx,
    length,
    mass,
    scores,
    facts,
    kl,
    dq,
    dw,
    target,
    q_row8,
    q_head8,
    k_row8,
    w_row,
    idx_row,
    mass_row,
    score_row,
    target_row4,
    keys,
    width,
    heads,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    NEED_DQ: tl.constexpr,
    NEED_DW: tl.constexpr,
    DK: tl.constexpr,
):
    """Grid (rows,). ``kl [rows]``, ``dq [rows, heads, DIM]`` and ``dw [rows, heads]`` fp32.

    DK: "none"; "atomic", ``target`` is dk ``[keys, DIM]`` fp32, added into; "rows", it is ``[rows, W, DIM]``, written.
    UPCAST keeps dS in fp32 (TF32 products) for fp16 inputs: it is the size of a probability times a weight, far below
    what fp16 can hold.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_h = tl.arange(0, BLOCK_H)
    in_dim = offs_d < DIM
    has_head = offs_h < heads
    idx += row * idx_row
    q_rows = q + row * q_row8 * 8 + offs_h.to(tl.int64)[:, None] * q_head8 * 8
    q_mask = has_head[:, None] & in_dim[None, :]
    query = tl.load(q_rows + offs_d[None, :], mask=q_mask, other=0.0)
    weight = tl.load(w + row * w_row + offs_h, mask=has_head, other=0.0).to(tl.float32)
    base = tl.load(facts + row * 2)
    mass_sum = tl.load(facts + row * 2 + 1)
    inverse = 1.0 / tl.maximum(mass_sum, 1e-10)
    target_sum = mass_sum * inverse
    end = tl.minimum(tl.load(length + row), width)
    loss = tl.zeros([BLOCK_N], tl.float32)
    if NEED_DQ:
        dq_acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if NEED_DW:
        dw_acc = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    for start in tl.range(0, end, BLOCK_N):
        slots = start + offs_n
        ids, ok = valid_ids(idx, slots, end, keys)
        k_rows = k + tl.where(ok, ids, 0).to(tl.int64)[:, None] * (k_row8 * 8)
        key = tl.load(k_rows + offs_d[None, :], mask=ok[:, None] & in_dim[None, :], other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        logit = tl.load(scores + row * score_row + slots, mask=ok, other=0.0) - base
        goal = tl.load(mass + row * mass_row + slots, mask=ok, other=0.0) * inverse
        loss += tl.where(ok, goal * (tl.log(tl.maximum(goal, 1e-10)) - logit), 0.0)
        g = tl.where(ok, tl.exp2(logit * 1.4426950408889634) * target_sum - goal, 0.0)
        alive = s
        if RELU:
            alive = tl.maximum(s, 0.0)
        if NEED_DW:
            dw_acc += g[None, :] * alive
        if NEED_DQ or DK != "none":
            ds = weight[:, None] * g[None, :]
            if RELU:
                ds = tl.where(s > 0.0, ds, 0.0)
            if UPCAST:
                if NEED_DQ:
                    dq_acc = tl.dot(ds, key.to(tl.float32), dq_acc, input_precision=PRECISION)
                if DK != "none":
                    dk = tl.dot(tl.trans(ds), query.to(tl.float32), input_precision=PRECISION)
            else:
                ds = ds.to(key.dtype)
                if NEED_DQ:
                    dq_acc = tl.dot(ds, key, dq_acc, input_precision=PRECISION)
                if DK != "none":
                    dk = tl.dot(tl.trans(ds), query, input_precision=PRECISION)
        # Without a mask an id of -1 would add (a zero) to the row before the tensor.
        if DK == "atomic":
            d_rows = target + tl.where(ok, ids, 0).to(tl.int64)[:, None] * (target_row4 * 4)
            tl.atomic_add(d_rows + offs_d[None, :], dk, mask=ok[:, None] & in_dim[None, :], sem="relaxed")
        if DK == "rows":
            d_rows = target + (row * width + slots)[:, None] * (target_row4 * 4)
            tl.store(d_rows + offs_d[None, :], dk, mask=ok[:, None] & in_dim[None, :])
    # All mass zero: T is 0 everywhere, g is 0, and so is the loss.
    tl.store(kl + row, tl.sum(loss, 0))
    if NEED_DQ:
        d_rows = dq + (row * heads + offs_h.to(tl.int64)[:, None]) * DIM
        tl.store(d_rows + offs_d[None, :], dq_acc, mask=q_mask)
    if NEED_DW:
        tl.store(dw + row * heads + offs_h, tl.sum(dw_acc, 1), mask=has_head)
