"""Attention backward for compute capability 9.0 and up to 16 heads at a time: P, dS and dQ in one kernel."""

import tilelang.language as T

from dsa_backends.tilelang_kernels.parts import (
    COPY16,
    PRELUDE,
    SLOTS,
    WAIT_ALL,
    copy_slots,
    lengths,
    load_ids,
    zero64,
)

HEADS = 16


def hopper_few_backward(tail: int, dtype: str):
    """Transposed as ``hopper_few_forward``: keys or channels are the rows of every product. Grid (rows,), 384 threads.

    ``pairs [rows, tiles, (dS, P), 64, 16]`` where ``store`` is 1, ``dq`` where ``need_dq`` is 1. Two warp groups take
    every other tile and add their dQ up at the end. Then ``shift[..., 1]`` holds each row's sum of dS, see ``balance``,
    and dQ is corrected for it: over the value channels P K is the output, over the tail it is summed beside dQ.
    """
    v, rope = 512, max(tail, 16)
    channels = v + tail
    n_q, n_kv, n_idx, n_row, n_shift, n_dout, n_out, n_pairs, n_dq = lengths(
        "n_q n_kv n_idx n_row n_shift n_dout n_out n_pairs n_dq"
    )

    @T.macro
    def take_tile(
        w,
        i,
        tx,
        q_m,
        q_t,
        g_m,
        k_m,
        k_t,
        ok,
        p_s,
        d_s,
        ready,
        free,
        s,
        ds,
        base_2,
        delta,
        o,
        o_t,
        p_t,
        seen,
        scale,
        scale_log2,
        pairs,
        row,
        wide,
        tiles,
        store,
    ):
        T.barrier_wait(ready[w], i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(k_m[w, :, :], q_m, s, transpose_B=True, clear_accum=True)
        if tail > 0:
            T.wgmma_gemm(k_t[w, :, :], q_t, s, transpose_B=True)
        T.wgmma_gemm(k_m[w, :, :], g_m, ds, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        for j, h in T.Parallel(SLOTS, HEADS):
            s[j, h] = T.if_then_else(ok[w, j] != 0, T.exp2(s[j, h] * scale_log2 - base_2[h]), 0.0)
        # The scale goes in before the rounding to 16 bits, which keeps large activations inside fp16.
        for j, h in T.Parallel(SLOTS, HEADS):
            ds[j, h] = s[j, h] * (ds[j, h] - delta[h]) * scale
        # What `seen` sums are the values that are used: then what dQ is corrected by cancels as exactly.
        for j, h in T.Parallel(SLOTS, HEADS):
            ds[j, h] = T.cast(T.cast(ds[j, h], dtype), "float32")
        for j, h in T.Parallel(SLOTS, HEADS):
            seen[j, h] = seen[j, h] + ds[j, h]
        T.copy(s, p_s[w, :, :])
        T.copy(ds, d_s[w, :, :])
        T.fence_proxy_async()
        T.sync_threads(4 + w, 128)
        T.wgmma_gemm(k_m[w, :, :], d_s[w, :, :], o, transpose_A=True)
        if tail > 0:
            T.wgmma_gemm(k_t[w, :, :], d_s[w, :, :], o_t, transpose_A=True)
            T.wgmma_gemm(k_t[w, :, :], p_s[w, :, :], p_t, transpose_A=True)
        if (store != 0) and (i * 2 + w < tiles):
            at = ((row * wide + i * 2 + w) * 2) * SLOTS * HEADS + (tx - w * 128) * 8
            for e in T.vectorized(8):
                pairs[at + e] = d_s[w, (tx - w * 128) // 2, tx % 2 * 8 + e]
            for e in T.vectorized(8):
                pairs[at + SLOTS * HEADS + e] = p_s[w, (tx - w * 128) // 2, tx % 2 * 8 + e]
        T.wait_wgmma(0)
        T.barrier_arrive(free[w])
        T.sync_threads(6 + w, 128)

    @T.macro
    def settle(w, seen, part, red, left_s, got_left, left, o_t, p_t):
        # What delta missed is the sum of dS over all slots, of both groups; the tail of dQ is corrected for it here.
        by_warp = T.reshape(seen, (4, 16, HEADS))
        T.reduce_sum(by_warp, part, dim=1)
        for g, h in T.Parallel(4, HEADS):
            red[w, g, h] = part[g, h]
        T.sync_threads(6 + w, 128)
        for h in T.Parallel(HEADS):
            left_s[w, h] = (red[w, 0, h] + red[w, 1, h]) + (red[w, 2, h] + red[w, 3, h])
        T.barrier_arrive(got_left)
        T.barrier_wait(got_left, 0)
        for h in T.Parallel(HEADS):
            left[h] = left_s[0, h] + left_s[1, h]
        if tail > 0:
            for c, h in T.Parallel(rope, HEADS):
                o_t[c, h] = o_t[c, h] - left[h] * p_t[c, h]

    @T.macro
    def load_shift(shift, row, heads, first_head, base_2, delta):
        for h in T.Parallel(HEADS):
            base_2[h] = T.if_then_else(
                first_head + h < heads, shift[(row * heads + first_head + h) * 2], T.infinity("float32")
            )
            delta[h] = T.if_then_else(
                first_head + h < heads, shift[(row * heads + first_head + h) * 2 + 1], 0.0
            )

    @T.prim_func
    def dsa_hopper_few_backward(
        q: T.Tensor((n_q,), dtype),
        kv: T.Tensor((n_kv,), dtype),
        idx: T.Tensor((n_idx,), "int32"),
        length: T.Tensor((n_row,), "int32"),
        shift: T.Tensor((n_shift,), "float32"),
        dout: T.Tensor((n_dout,), dtype),
        out: T.Tensor((n_out,), dtype),
        pairs: T.Tensor((n_pairs,), dtype),
        dq: T.Tensor((n_dq,), dtype),
        scale: T.float32,
        scale_log2: T.float32,
        q_row8: T.int64,
        q_head8: T.int64,
        kv_row8: T.int64,
        idx_row: T.int64,
        dout_row8: T.int64,
        dout_head8: T.int64,
        out_row8: T.int64,
        out_head8: T.int64,
        rows: T.int32,
        keys: T.int32,
        width: T.int32,
        heads: T.int32,
        first_head: T.int32,
        store: T.int32,
        need_dq: T.int32,
    ):
        with T.Kernel(rows, threads=384, prelude=PRELUDE) as program:
            q_m = T.alloc_shared((HEADS, v), dtype)
            q_t = T.alloc_shared((HEADS, rope), dtype)
            g_m = T.alloc_shared((HEADS, v), dtype)
            k_m = T.alloc_shared((2, SLOTS, v), dtype)
            k_t = T.alloc_shared((2, SLOTS, rope), dtype)
            p_s = T.alloc_shared((2, SLOTS, HEADS), dtype)
            d_s = T.alloc_shared((2, SLOTS, HEADS), dtype)
            o_s = T.alloc_shared((v, HEADS), "float32")
            ot_s = T.alloc_shared((rope, HEADS), "float32")
            ok = T.alloc_shared((2, SLOTS), "int32")
            s_0 = T.alloc_fragment((SLOTS, HEADS), "float32")
            s_1 = T.alloc_fragment((SLOTS, HEADS), "float32")
            ds_0 = T.alloc_fragment((SLOTS, HEADS), "float32")
            ds_1 = T.alloc_fragment((SLOTS, HEADS), "float32")
            o_0 = T.alloc_fragment((v, HEADS), "float32")
            o_1 = T.alloc_fragment((v, HEADS), "float32")
            ot_0 = T.alloc_fragment((rope, HEADS), "float32")
            ot_1 = T.alloc_fragment((rope, HEADS), "float32")
            pt_0 = T.alloc_fragment((rope, HEADS), "float32")
            pt_1 = T.alloc_fragment((rope, HEADS), "float32")
            seen_0 = T.alloc_fragment((SLOTS, HEADS), "float32")
            seen_1 = T.alloc_fragment((SLOTS, HEADS), "float32")
            part_0 = T.alloc_fragment((4, HEADS), "float32")
            part_1 = T.alloc_fragment((4, HEADS), "float32")
            left_0 = T.alloc_fragment((HEADS,), "float32")
            left_1 = T.alloc_fragment((HEADS,), "float32")
            red = T.alloc_shared((2, 4, HEADS), "float32")
            left_s = T.alloc_shared((2, HEADS), "float32")
            base_0 = T.alloc_fragment((HEADS,), "float32")
            base_1 = T.alloc_fragment((HEADS,), "float32")
            delta_0 = T.alloc_fragment((HEADS,), "float32")
            delta_1 = T.alloc_fragment((HEADS,), "float32")
            ids = T.alloc_local((4,), "int32")
            good = T.alloc_local((4,), "bool")
            base = T.alloc_local((4,), "int64")
            ready = T.alloc_barrier(arrive_count=[256, 256])
            free = T.alloc_barrier(arrive_count=[128, 128])
            done = T.alloc_barrier(arrive_count=128)
            got_left = T.alloc_barrier(arrive_count=256)

            tx = T.get_thread_binding()
            row = T.cast(program, "int64")
            end = T.min(length[row], width)
            tiles = T.ceildiv(end, SLOTS)
            couples = T.ceildiv(end, 2 * SLOTS)
            wide = T.cast(T.ceildiv(width, SLOTS), "int64")
            for u in T.serial(T.ceildiv(HEADS * channels // 8, 384)):
                chunk = u * 384 + tx
                h = chunk // (channels // 8)
                c = chunk % (channels // 8) * 8
                here = (h < HEADS) and (first_head + h < heads)
                offset = (row * q_row8 + T.cast(first_head + h, "int64") * q_head8) * 8 + c
                place = T.if_then_else(here, offset, zero64())
                if h < HEADS:
                    if c < v:
                        T.call_extern("handle", COPY16, T.address_of(q_m[h, c]), T.address_of(q[place]), here)
                    elif tail > 0:
                        T.call_extern(
                            "handle", COPY16, T.address_of(q_t[h, c - v]), T.address_of(q[place]), here
                        )
            for u in T.serial(T.ceildiv(HEADS * v // 8, 384)):
                chunk = u * 384 + tx
                h = chunk // (v // 8)
                c = chunk % (v // 8) * 8
                here = (h < HEADS) and (first_head + h < heads)
                offset = (row * dout_row8 + T.cast(first_head + h, "int64") * dout_head8) * 8 + c
                place = T.if_then_else(here, offset, zero64())
                if h < HEADS:
                    T.call_extern("handle", COPY16, T.address_of(g_m[h, c]), T.address_of(dout[place]), here)
            T.call_extern("handle", WAIT_ALL)
            T.fence_proxy_async()
            T.sync_threads()

            if tx < 128:
                T.set_max_nreg(208, 1)
                T.fill(o_0, 0)
                T.fill(seen_0, 0)
                if tail > 0:
                    T.fill(ot_0, 0)
                    T.fill(pt_0, 0)
                load_shift(shift, row, heads, first_head, base_0, delta_0)
                for i in T.serial(couples):
                    take_tile(
                        *(0, i, tx, q_m, q_t, g_m, k_m, k_t, ok, p_s, d_s, ready, free, s_0, ds_0, base_0),
                        *(
                            delta_0,
                            o_0,
                            ot_0,
                            pt_0,
                            seen_0,
                            scale,
                            scale_log2,
                            pairs,
                            row,
                            wide,
                            tiles,
                            store,
                        ),
                    )
                settle(0, seen_0, part_0, red, left_s, got_left, left_0, ot_0, pt_0)
                for h in T.Parallel(HEADS):
                    if first_head + h < heads:
                        shift[(row * heads + first_head + h) * 2 + 1] = left_0[h]
                T.barrier_wait(done, 0)
                if need_dq != 0:
                    for c, h in T.Parallel(v, HEADS):
                        q_m[h, c] = (
                            o_0[c, h]
                            + o_s[c, h]
                            - left_0[h]
                            * T.if_then_else(
                                first_head + h < heads,
                                T.cast(
                                    out[
                                        (row * out_row8 + T.cast(first_head + h, "int64") * out_head8) * 8 + c
                                    ],
                                    "float32",
                                ),
                                0.0,
                            )
                        )
                    if tail > 0:
                        for c, h in T.Parallel(tail, HEADS):
                            q_t[h, c] = ot_0[c, h] + ot_s[c, h]
                    T.sync_threads(4, 128)
                    for u in T.unroll(HEADS * v // 8 // 128):
                        h = u * 2 + tx // 64
                        if first_head + h < heads:
                            for e in T.vectorized(8):
                                dq[(row * heads + first_head + h) * channels + tx % 64 * 8 + e] = q_m[
                                    h, tx % 64 * 8 + e
                                ]
                    if tail > 0 and first_head + tx // 8 < heads:
                        for e in T.vectorized(8):
                            dq[(row * heads + first_head + tx // 8) * channels + v + tx % 8 * 8 + e] = q_t[
                                tx // 8, tx % 8 * 8 + e
                            ]
            elif tx < 256:
                T.set_max_nreg(208, 1)
                T.fill(o_1, 0)
                T.fill(seen_1, 0)
                if tail > 0:
                    T.fill(ot_1, 0)
                    T.fill(pt_1, 0)
                load_shift(shift, row, heads, first_head, base_1, delta_1)
                for i in T.serial(couples):
                    take_tile(
                        *(1, i, tx, q_m, q_t, g_m, k_m, k_t, ok, p_s, d_s, ready, free, s_1, ds_1, base_1),
                        *(
                            delta_1,
                            o_1,
                            ot_1,
                            pt_1,
                            seen_1,
                            scale,
                            scale_log2,
                            pairs,
                            row,
                            wide,
                            tiles,
                            store,
                        ),
                    )
                settle(1, seen_1, part_1, red, left_s, got_left, left_1, ot_1, pt_1)
                for c, h in T.Parallel(v, HEADS):
                    o_s[c, h] = o_1[c, h]
                if tail > 0:
                    for c, h in T.Parallel(tail, HEADS):
                        ot_s[c, h] = ot_1[c, h]
                T.barrier_arrive(done)
            else:
                T.set_max_nreg(72, 0)
                lane = tx - 256
                for n in T.serial(couples * 2):
                    b = n & 1
                    load_ids(4, n, lane, idx, row, idx_row, end, keys, kv_row8, ids, good, base)
                    T.barrier_wait(free[b], ((n >> 1) & 1) ^ 1)
                    if lane % 8 == 0:
                        for u in T.unroll(4):
                            ok[b, u * 16 + lane // 8] = T.cast(good[u], "int32")
                    copy_slots(4, v, 0, lane, kv, base, good, k_m, b)
                    if tail > 0:
                        copy_slots(4, tail, v, lane, kv, base, good, k_t, b)
                    T.cp_async_barrier_noinc(ready[b])
                    T.barrier_arrive(ready[b])

    return dsa_hopper_few_backward
