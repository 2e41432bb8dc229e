"""Attention forward for compute capability 9.0 and blocks of 16 heads: everything transposed."""

import tilelang.language as T

from dsa_backends.tilelang_kernels.parts import (
    COPY16,
    FLOOR,
    LN_2,
    PRELUDE,
    SLOTS,
    WAIT_ALL,
    copy_slots,
    lengths,
    load_ids,
    zero64,
)

HEADS = 16


def hopper_few_forward(tail: int, dtype: str):
    """512 value channels and ``tail`` (0 or 64) more in the keys. Grid (rows * head blocks), 384 threads.

    A warp-group product has 64 rows, of which 16 heads would fill a quarter; here the keys or the channels are its
    rows: ``S^T = K Q^T`` and ``out^T += V^T P^T``, and a tile is read from shared memory just twice. Two warp groups
    take every other tile, each with a buffer, maximum and output of its own, added up at the end; one group copies.
    """
    v, rope = 512, max(tail, 16)
    channels = v + tail
    n_q, n_kv, n_idx, n_row, n_out, n_lse = lengths("n_q n_kv n_idx n_row n_out n_lse")

    @T.macro
    def take_tile(
        w, i, q_m, q_t, k_m, k_t, ok, p_s, ready, free, s, seen, m, new, a, o, part, red, scale_log2
    ):
        T.barrier_wait(ready[w], i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(k_m[w, :, :], q_m, s, transpose_B=True, clear_accum=True)
        if tail > 0:
            T.wgmma_gemm(k_t[w, :, :], q_t, s, transpose_B=True)
        T.wait_wgmma(0)
        for j, h in T.Parallel(SLOTS, HEADS):
            s[j, h] = T.if_then_else(ok[w, j] != 0, s[j, h] * scale_log2, -T.infinity("float32"))
        # A reduction over all keys would use one barrier for both groups at once: reduce in each warp, then by hand.
        by_warp = T.reshape(s, (4, 16, HEADS))
        T.reduce_max(by_warp, part, dim=1)
        for g, h in T.Parallel(4, HEADS):
            red[w, g, h] = part[g, h]
        T.sync_threads(6 + w, 128)
        for h in T.Parallel(HEADS):
            new[h] = T.max(T.max(T.max(red[w, 0, h], red[w, 1, h]), T.max(red[w, 2, h], red[w, 3, h])), m[h])
            a[h] = T.exp2(m[h] - new[h])
            m[h] = new[h]
        for j, h in T.Parallel(SLOTS, HEADS):
            s[j, h] = T.exp2(s[j, h] - m[h])
        for j, h in T.Parallel(SLOTS, HEADS):
            seen[j, h] = seen[j, h] * a[h] + s[j, h]
        T.copy(s, p_s[w, :, :])
        for c, h in T.Parallel(v, HEADS):
            o[c, h] = o[c, h] * a[h]
        T.fence_proxy_async()
        T.sync_threads(4 + w, 128)
        T.wgmma_gemm(k_m[w, :, :], p_s[w, :, :], o, transpose_A=True)
        T.wait_wgmma(0)
        T.barrier_arrive(free[w])

    @T.macro
    def add_up(w, seen, part, red, total):
        by_warp = T.reshape(seen, (4, 16, HEADS))
        T.reduce_sum(by_warp, part, dim=1)
        for g, h in T.Parallel(4, HEADS):
            red[w, g, h] = part[g, h]
        T.sync_threads(6 + w, 128)
        for h in T.Parallel(HEADS):
            total[h] = (red[w, 0, h] + red[w, 1, h]) + (red[w, 2, h] + red[w, 3, h])

    @T.prim_func
    def dsa_hopper_few_forward(
        q: T.Tensor((n_q,), dtype),
        kv: T.Tensor((n_kv,), dtype),
        idx: T.Tensor((n_idx,), "int32"),
        length: T.Tensor((n_row,), "int32"),
        out: T.Tensor((n_out,), dtype),
        lse: T.Tensor((n_lse,), "float32"),
        scale_log2: T.float32,
        q_row8: T.int64,
        q_head8: T.int64,
        kv_row8: T.int64,
        idx_row: T.int64,
        rows: T.int32,
        keys: T.int32,
        width: T.int32,
        heads: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(rows * blocks, threads=384, prelude=PRELUDE) as program:
            q_m = T.alloc_shared((HEADS, v), dtype)
            q_t = T.alloc_shared((HEADS, rope), dtype)
            k_m = T.alloc_shared((2, SLOTS, v), dtype)
            k_t = T.alloc_shared((2, SLOTS, rope), dtype)
            p_s = T.alloc_shared((2, SLOTS, HEADS), dtype)
            o_s = T.alloc_shared((v, HEADS), "float32")
            ok = T.alloc_shared((2, SLOTS), "int32")
            top_s = T.alloc_shared((HEADS,), "float32")
            sum_s = T.alloc_shared((HEADS,), "float32")
            red = T.alloc_shared((2, 4, HEADS), "float32")
            s_0 = T.alloc_fragment((SLOTS, HEADS), "float32")
            s_1 = T.alloc_fragment((SLOTS, HEADS), "float32")
            seen_0 = T.alloc_fragment((SLOTS, HEADS), "float32")
            seen_1 = T.alloc_fragment((SLOTS, HEADS), "float32")
            o_0 = T.alloc_fragment((v, HEADS), "float32")
            o_1 = T.alloc_fragment((v, HEADS), "float32")
            part_0 = T.alloc_fragment((4, HEADS), "float32")
            part_1 = T.alloc_fragment((4, HEADS), "float32")
            m_0 = T.alloc_fragment((HEADS,), "float32")
            m_1 = T.alloc_fragment((HEADS,), "float32")
            new_0 = T.alloc_fragment((HEADS,), "float32")
            new_1 = T.alloc_fragment((HEADS,), "float32")
            a_0 = T.alloc_fragment((HEADS,), "float32")
            a_1 = T.alloc_fragment((HEADS,), "float32")
            b_0 = T.alloc_fragment((HEADS,), "float32")
            t_0 = T.alloc_fragment((HEADS,), "float32")
            t_1 = T.alloc_fragment((HEADS,), "float32")
            ids = T.alloc_local((4,), "int32")
            good = T.alloc_local((4,), "bool")
            base = T.alloc_local((4,), "int64")
            # 128 asynchronous arrivals of the copies and 128 that publish `ok`.
            ready = T.alloc_barrier(arrive_count=[256, 256])
            free = T.alloc_barrier(arrive_count=[128, 128])
            done = T.alloc_barrier(arrive_count=128)

            tx = T.get_thread_binding()
            row = T.cast(T.truncdiv(program, blocks), "int64")
            first_head = T.truncmod(program, blocks) * HEADS
            end = T.min(length[row], width)
            pairs = T.ceildiv(end, 2 * SLOTS)

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
            T.call_extern("handle", WAIT_ALL)
            T.fence_proxy_async()
            T.sync_threads()

            if tx < 128:
                T.set_max_nreg(208, 1)
                T.fill(o_0, 0)
                T.fill(seen_0, 0)
                T.fill(m_0, FLOOR)
                for i in T.serial(pairs):
                    take_tile(
                        *(0, i, q_m, q_t, k_m, k_t, ok, p_s, ready, free),
                        *(s_0, seen_0, m_0, new_0, a_0, o_0, part_0, red, scale_log2),
                    )
                add_up(0, seen_0, part_0, red, t_0)
                T.barrier_wait(done, 0)
                for h in T.Parallel(HEADS):
                    new_0[h] = T.max(m_0[h], top_s[h])
                    a_0[h] = T.exp2(m_0[h] - new_0[h])
                    b_0[h] = T.exp2(top_s[h] - new_0[h])
                    t_0[h] = t_0[h] * a_0[h] + sum_s[h] * b_0[h]
                for h in T.Parallel(HEADS):
                    if first_head + h < heads:
                        lse[row * heads + first_head + h] = T.if_then_else(
                            t_0[h] > 0, (new_0[h] + T.log2(t_0[h])) * LN_2, -T.infinity("float32")
                        )
                for h in T.Parallel(HEADS):
                    t_0[h] = T.if_then_else(t_0[h] > 0, 1.0 / t_0[h], 0.0)
                for c, h in T.Parallel(v, HEADS):
                    q_m[h, c] = (o_0[c, h] * a_0[h] + o_s[c, h] * b_0[h]) * t_0[h]
                T.sync_threads(4, 128)
                for u in T.unroll(HEADS * v // 8 // 128):
                    h = u * 2 + tx // 64
                    if first_head + h < heads:
                        for e in T.vectorized(8):
                            out[(row * heads + first_head + h) * v + tx % 64 * 8 + e] = q_m[
                                h, tx % 64 * 8 + e
                            ]
            elif tx < 256:
                T.set_max_nreg(208, 1)
                T.fill(o_1, 0)
                T.fill(seen_1, 0)
                T.fill(m_1, FLOOR)
                for i in T.serial(pairs):
                    take_tile(
                        *(1, i, q_m, q_t, k_m, k_t, ok, p_s, ready, free),
                        *(s_1, seen_1, m_1, new_1, a_1, o_1, part_1, red, scale_log2),
                    )
                add_up(1, seen_1, part_1, red, t_1)
                for c, h in T.Parallel(v, HEADS):
                    o_s[c, h] = o_1[c, h]
                for h in T.Parallel(HEADS):
                    top_s[h] = m_1[h]
                    sum_s[h] = t_1[h]
                T.barrier_arrive(done)
            else:
                T.set_max_nreg(72, 0)
                lane = tx - 256
                for n in T.serial(pairs * 2):
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

    return dsa_hopper_few_forward
