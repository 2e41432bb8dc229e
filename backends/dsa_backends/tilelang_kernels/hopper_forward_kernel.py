"""Attention forward for compute capability 9.0 and blocks of 64 heads, warp groups specialised."""

import tilelang.language as T

from dsa_backends.tilelang_kernels.parts import (
    COPY16,
    EVERY_LANE,
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

HEADS = 64


def hopper_forward(tail: int, dtype: str):
    """512 value channels and ``tail`` (0 or 64) more in the keys. Grid (rows * head blocks), 384 threads.

    Two warp groups compute, one copies. Tiles of 64 slots come in pairs, each in a buffer of its own: group 0 makes the
    scores and P of the first, group 1 of the second, so that one's softmax runs beside the other's products. Each
    group owns half of the output's channels and takes both tiles' P into it, in the order of the tiles; P and the
    running maximum cross over in shared memory. A buffer's halves are released one by one, the left by group 0 and
    the right by group 1, since each is the last to read it. The tail of Q lives in registers: its place in shared
    memory is the second P.
    """
    v, half, rope = 512, 256, max(tail, 16)
    channels = v + tail
    n_q, n_kv, n_idx, n_row, n_out, n_lse = lengths("n_q n_kv n_idx n_row n_out n_lse")

    @T.macro
    def scale_output(o, a, flag):
        # The maximum seldom moves after the first tiles; a warp whose rows all kept theirs has nothing to do.
        flag[0] = 0
        for h in T.Parallel(HEADS):
            flag[0] = flag[0] | T.if_then_else(a[h] < 1.0, 1, 0)
        if T.call_extern("int32", "__any_sync", T.uint32(EVERY_LANE), flag[0]) != 0:
            for h, c in T.Parallel(HEADS, half):
                o[h, c] = o[h, c] * a[h]

    @T.macro
    def scores(b, i, ready_l, ready_r, q_l, q_r, q_t, k_l, k_r, k_t, ok, s):
        T.barrier_wait(ready_l[b], i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(q_l, k_l[b, :, :], s, transpose_B=True, clear_accum=True)
        if tail > 0:
            T.wgmma_gemm(q_t, k_t[b, :, :], s, transpose_B=True)
        T.barrier_wait(ready_r[b], i & 1)
        T.fence_proxy_async()
        T.wgmma_gemm(q_r, k_r[b, :, :], s, transpose_B=True)
        T.wait_wgmma(0)
        for h, j in T.Parallel(HEADS, SLOTS):
            s[h, j] = T.if_then_else(ok[b, j] != 0, s[h, j], -T.infinity("float32"))

    @T.macro
    def raise_top(b, s, m, new, a, top, scale_log2):
        T.reduce_max(s, new, dim=1)
        for h in T.Parallel(HEADS):
            new[h] = T.max(m[h], new[h] * scale_log2)
            a[h] = T.exp2(m[h] - new[h])
            m[h] = new[h]
            top[b, h] = new[h]

    @T.macro
    def store_output(side, barrier, thread, row, first_head, heads, o, total, a, staged, out):
        for h in T.Parallel(HEADS):
            a[h] = T.if_then_else(total[h] > 0, 1.0 / total[h], 0.0)
        for h, c in T.Parallel(HEADS, half):
            o[h, c] = o[h, c] * a[h]
        T.copy(o, staged)
        T.sync_threads(barrier, 128)
        for u in T.unroll(HEADS * half // 8 // 128):
            h = u * 4 + thread // 32
            if first_head + h < heads:
                for e in T.vectorized(8):
                    out[(row * heads + first_head + h) * v + side * half + thread % 32 * 8 + e] = staged[
                        h, thread % 32 * 8 + e
                    ]

    @T.prim_func
    def dsa_hopper_forward(
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
            q_l = T.alloc_shared((HEADS, half), dtype)
            q_r = T.alloc_shared((HEADS, half), dtype)
            k_l = T.alloc_shared((2, SLOTS, half), dtype)
            k_r = T.alloc_shared((2, SLOTS, half), dtype)
            k_t = T.alloc_shared((2, SLOTS, rope), dtype)
            p_0 = T.alloc_shared((HEADS, SLOTS), dtype)
            p_1 = T.alloc_shared((HEADS, SLOTS), dtype)
            ok = T.alloc_shared((2, SLOTS), "int32")
            top = T.alloc_shared((2, HEADS), "float32")
            sums = T.alloc_shared((2, HEADS), "float32")
            s_0 = T.alloc_fragment((HEADS, SLOTS), "float32")
            s_1 = T.alloc_fragment((HEADS, SLOTS), "float32")
            held_0 = T.alloc_fragment((HEADS, SLOTS), dtype)
            held_1 = T.alloc_fragment((HEADS, SLOTS), dtype)
            qt_0 = T.alloc_fragment((HEADS, rope), dtype)
            qt_1 = T.alloc_fragment((HEADS, rope), dtype)
            o_l = T.alloc_fragment((HEADS, half), "float32")
            o_r = T.alloc_fragment((HEADS, half), "float32")
            m_0 = T.alloc_fragment((HEADS,), "float32")
            m_1 = T.alloc_fragment((HEADS,), "float32")
            new_0 = T.alloc_fragment((HEADS,), "float32")
            new_1 = T.alloc_fragment((HEADS,), "float32")
            a_0 = T.alloc_fragment((HEADS,), "float32")
            a_1 = T.alloc_fragment((HEADS,), "float32")
            t_0 = T.alloc_fragment((HEADS,), "float32")
            t_1 = T.alloc_fragment((HEADS,), "float32")
            r_0 = T.alloc_fragment((HEADS,), "float32")
            r_1 = T.alloc_fragment((HEADS,), "float32")
            flag = T.alloc_local((1,), "int32")
            ids = T.alloc_local((4,), "int32")
            good = T.alloc_local((4,), "bool")
            base = T.alloc_local((4,), "int64")
            # 128 asynchronous arrivals of the copies and, on the left, 128 that publish `ok`.
            ready_l = T.alloc_barrier(arrive_count=[256, 256])
            ready_r = T.alloc_barrier(arrive_count=[128, 128])
            free_l = T.alloc_barrier(arrive_count=[128, 128])
            free_r = T.alloc_barrier(arrive_count=[128, 128])
            got_top = T.alloc_barrier(arrive_count=128)
            got_p0 = T.alloc_barrier(arrive_count=128)
            got_p1 = T.alloc_barrier(arrive_count=128)
            got_sums = T.alloc_barrier(arrive_count=256)

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
                    if c < half:
                        T.call_extern("handle", COPY16, T.address_of(q_l[h, c]), T.address_of(q[place]), here)
                    elif c < v:
                        T.call_extern(
                            "handle", COPY16, T.address_of(q_r[h, c - half]), T.address_of(q[place]), here
                        )
                    elif tail > 0:
                        T.call_extern(
                            "handle", COPY16, T.address_of(p_1[h, c - v]), T.address_of(q[place]), here
                        )
            T.call_extern("handle", WAIT_ALL)
            T.fence_proxy_async()
            T.sync_threads()

            if tx < 128:
                T.set_max_nreg(224, 1)
                if tail > 0:
                    T.copy(p_1, qt_0)
                T.sync_threads(5, 256)
                T.fill(o_l, 0)
                T.fill(t_0, 0)
                T.fill(m_0, FLOOR)
                for i in T.serial(pairs):
                    scores(0, i, ready_l, ready_r, q_l, q_r, qt_0, k_l, k_r, k_t, ok, s_0)
                    if i > 0:
                        for h in T.Parallel(HEADS):
                            m_0[h] = top[1, h]
                    raise_top(0, s_0, m_0, new_0, a_0, top, scale_log2)
                    T.barrier_arrive(got_top)
                    for h, j in T.Parallel(HEADS, SLOTS):
                        s_0[h, j] = T.exp2(s_0[h, j] * scale_log2 - m_0[h])
                    T.copy(s_0, held_0)
                    T.copy(held_0, p_0)
                    T.fence_proxy_async()
                    T.barrier_arrive(got_p0)
                    T.reduce_sum(s_0, r_0, dim=1)
                    for h in T.Parallel(HEADS):
                        t_0[h] = t_0[h] * a_0[h] + r_0[h]
                    scale_output(o_l, a_0, flag)
                    T.wgmma_gemm(held_0, k_l[0, :, :], o_l)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free_l[0])
                    T.barrier_wait(got_p1, i & 1)
                    for h in T.Parallel(HEADS):
                        a_0[h] = T.exp2(m_0[h] - top[1, h])
                        t_0[h] = t_0[h] * a_0[h]
                    scale_output(o_l, a_0, flag)
                    T.wgmma_gemm(p_1, k_l[1, :, :], o_l)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free_l[1])
                for h in T.Parallel(HEADS):
                    sums[0, h] = t_0[h]
                T.barrier_arrive(got_sums)
                T.barrier_wait(got_sums, 0)
                for h in T.Parallel(HEADS):
                    t_0[h] = sums[0, h] + sums[1, h]
                for h in T.Parallel(HEADS):
                    if first_head + h < heads:
                        lse[row * heads + first_head + h] = T.if_then_else(
                            t_0[h] > 0, (top[1, h] + T.log2(t_0[h])) * LN_2, -T.infinity("float32")
                        )
                store_output(0, 6, tx, row, first_head, heads, o_l, t_0, a_0, q_l, out)
            elif tx < 256:
                T.set_max_nreg(224, 1)
                if tail > 0:
                    T.copy(p_1, qt_1)
                T.sync_threads(5, 256)
                T.fill(o_r, 0)
                T.fill(t_1, 0)
                T.fill(m_1, FLOOR)
                for i in T.serial(pairs):
                    scores(1, i, ready_l, ready_r, q_l, q_r, qt_1, k_l, k_r, k_t, ok, s_1)
                    T.barrier_wait(got_top, i & 1)
                    for h in T.Parallel(HEADS):
                        new_1[h] = top[0, h]
                        a_1[h] = T.exp2(m_1[h] - new_1[h])
                        m_1[h] = new_1[h]
                        t_1[h] = t_1[h] * a_1[h]
                    scale_output(o_r, a_1, flag)
                    raise_top(1, s_1, m_1, new_1, a_1, top, scale_log2)
                    for h, j in T.Parallel(HEADS, SLOTS):
                        s_1[h, j] = T.exp2(s_1[h, j] * scale_log2 - m_1[h])
                    T.copy(s_1, held_1)
                    T.copy(held_1, p_1)
                    T.fence_proxy_async()
                    T.barrier_arrive(got_p1)
                    T.barrier_wait(got_p0, i & 1)
                    T.wgmma_gemm(p_0, k_r[0, :, :], o_r)
                    T.reduce_sum(s_1, r_1, dim=1)
                    for h in T.Parallel(HEADS):
                        t_1[h] = t_1[h] * a_1[h] + r_1[h]
                    T.wait_wgmma(0)
                    T.barrier_arrive(free_r[0])
                    scale_output(o_r, a_1, flag)
                    T.wgmma_gemm(held_1, k_r[1, :, :], o_r)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free_r[1])
                for h in T.Parallel(HEADS):
                    sums[1, h] = t_1[h]
                T.barrier_arrive(got_sums)
                T.barrier_wait(got_sums, 0)
                for h in T.Parallel(HEADS):
                    t_1[h] = sums[0, h] + sums[1, h]
                store_output(1, 7, tx - 128, row, first_head, heads, o_r, t_1, a_1, q_r, out)
            else:
                T.set_max_nreg(56, 0)
                lane = tx - 256
                for n in T.serial(pairs * 2):
                    b = n & 1
                    load_ids(4, n, lane, idx, row, idx_row, end, keys, kv_row8, ids, good, base)
                    T.barrier_wait(free_l[b], ((n >> 1) & 1) ^ 1)
                    if lane % 8 == 0:
                        for u in T.unroll(4):
                            ok[b, u * 16 + lane // 8] = T.cast(good[u], "int32")
                    copy_slots(4, half, 0, lane, kv, base, good, k_l, b)
                    if tail > 0:
                        copy_slots(4, tail, v, lane, kv, base, good, k_t, b)
                    T.cp_async_barrier_noinc(ready_l[b])
                    T.barrier_arrive(ready_l[b])
                    T.barrier_wait(free_r[b], ((n >> 1) & 1) ^ 1)
                    copy_slots(4, half, half, lane, kv, base, good, k_r, b)
                    T.cp_async_barrier_noinc(ready_r[b])

    return dsa_hopper_forward
