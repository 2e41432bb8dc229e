"""Attention backward for compute capability 9.0, more than 16 heads: P and dS, then dQ from the stored dS.

For a row with queries ``Q [H, Dqk]``, output gradient ``G [H, Dv]``, ``delta = rowsum(out * G) [H]`` and keys
``K [W, Dqk]``::

    P  = exp(scale * Q K^T - lse)                        [H, W]   rebuilt from the very expression of the forward
    dS = scale * P * (G K[:, :Dv]^T - delta)             [H, W]
    dQ = dS K                                            [H, Dqk]
    dK = dS^T Q  (all channels) + P^T G (value channels) [W, Dqk]   see ``key_gradient_kernel``

``P`` and ``dS`` are stored in 16 bits, tile by tile of 64 slots: ``pairs [rows, tiles, (dS, P), heads, 64]``.
"""

import tilelang.language as T

from dsa_backends.tilelang_kernels.parts import (
    COPY16,
    EVERY_LANE,
    LOG2_E,
    PRELUDE,
    SLOTS,
    WAIT_ALL,
    copy_slots,
    lengths,
    load_ids,
    zero64,
)

HEADS = 64


def row_shift(dtype: str):
    """``shift [rows, heads, 2]`` fp32: lse in base 2, and ``rowsum(out * dout)``. One warp per row and head."""
    v = 512
    n_out, n_dout, n_lse, n_shift = lengths("n_out n_dout n_lse n_shift")

    @T.prim_func
    def dsa_row_shift(
        out: T.Tensor((n_out,), dtype),
        dout: T.Tensor((n_dout,), dtype),
        lse: T.Tensor((n_lse,), "float32"),
        shift: T.Tensor((n_shift,), "float32"),
        out_row8: T.int64,
        out_head8: T.int64,
        dout_row8: T.int64,
        dout_head8: T.int64,
        places: T.int32,
        heads: T.int32,
    ):
        with T.Kernel(T.ceildiv(places, 4), threads=128) as program:
            tx = T.get_thread_binding()
            o = T.alloc_local((8,), dtype)
            g = T.alloc_local((8,), dtype)
            total = T.alloc_local((1,), "float32")
            place = program * 4 + tx // 32
            total[0] = 0.0
            if place < places:
                row = T.cast(T.truncdiv(place, heads), "int64")
                head = T.cast(T.truncmod(place, heads), "int64")
                for u in T.unroll(v // 256):
                    for e in T.vectorized(8):
                        o[e] = out[(row * out_row8 + head * out_head8 + u * 32 + tx % 32) * 8 + e]
                    for e in T.vectorized(8):
                        g[e] = dout[(row * dout_row8 + head * dout_head8 + u * 32 + tx % 32) * 8 + e]
                    for e in T.unroll(8):
                        total[0] += T.cast(o[e], "float32") * T.cast(g[e], "float32")
            for d in T.unroll(5):
                total[0] = total[0] + T.call_extern(
                    "float32", "__shfl_xor_sync", T.uint32(EVERY_LANE), total[0], 16 >> d
                )
            if (place < places) and (tx % 32 == 0):
                # A row without a key has lse -inf; a provider may also say +inf. Both must give P = 0.
                base = lse[place]
                shift[place * 2] = T.if_then_else(
                    base == -T.infinity("float32"), T.infinity("float32"), base * LOG2_E
                )
                shift[place * 2 + 1] = total[0]

    return dsa_row_shift


def hopper_pairs(tail: int, dtype: str):
    """P and dS of 64 heads. Grid (rows * head blocks), 384 threads.

    At the end ``shift[..., 1]`` holds each row's sum of dS, see ``balance``.

    Q and G live in registers, each in a warp group of its own: one makes the scores and P, the other dP, and takes P
    over through shared memory for dS. Keys alone fill shared memory, two buffers of 64 slots; a third group copies.
    """
    v, rope = 512, max(tail, 16)
    channels = v + tail
    # Rows 8 words apart modulo the banks: a half warp of the accumulators' layout then meets no bank twice.
    padded = SLOTS + 8
    n_q, n_kv, n_idx, n_row, n_shift, n_dout, n_pairs = lengths("n_q n_kv n_idx n_row n_shift n_dout n_pairs")

    @T.macro
    def store_tile(which, barrier, thread, n, row, wide, first_head, heads, value, staged, pairs):
        T.sync_threads(barrier, 128)
        T.copy(value, staged)
        T.sync_threads(barrier, 128)
        for u in T.unroll(4):
            h = u * 16 + thread // 8
            if first_head + h < heads:
                for e in T.vectorized(8):
                    pairs[
                        (((row * wide + n) * 2 + which) * heads + first_head + h) * SLOTS + thread % 8 * 8 + e
                    ] = staged[h, thread % 8 * 8 + e]

    @T.prim_func
    def dsa_hopper_pairs(
        q: T.Tensor((n_q,), dtype),
        kv: T.Tensor((n_kv,), dtype),
        idx: T.Tensor((n_idx,), "int32"),
        length: T.Tensor((n_row,), "int32"),
        shift: T.Tensor((n_shift,), "float32"),
        dout: T.Tensor((n_dout,), dtype),
        pairs: T.Tensor((n_pairs,), dtype),
        scale: T.float32,
        scale_log2: T.float32,
        q_row8: T.int64,
        q_head8: T.int64,
        kv_row8: T.int64,
        idx_row: T.int64,
        dout_row8: T.int64,
        dout_head8: T.int64,
        rows: T.int32,
        keys: T.int32,
        width: T.int32,
        heads: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(rows * blocks, threads=384, prelude=PRELUDE) as program:
            k_m = T.alloc_shared((2, SLOTS, v), dtype)
            k_t = T.alloc_shared((2, SLOTS, rope), dtype)
            p_x = T.alloc_shared((2, HEADS, padded), "float32")
            p_s = T.alloc_shared((HEADS, SLOTS), dtype)
            d_s = T.alloc_shared((HEADS, SLOTS), dtype)
            ok = T.alloc_shared((2, SLOTS), "int32")
            q_f = T.alloc_fragment((HEADS, v), dtype)
            qt_f = T.alloc_fragment((HEADS, rope), dtype)
            g_f = T.alloc_fragment((HEADS, v), dtype)
            s = T.alloc_fragment((HEADS, SLOTS), "float32")
            ds = T.alloc_fragment((HEADS, SLOTS), "float32")
            base_2 = T.alloc_fragment((HEADS,), "float32")
            delta = T.alloc_fragment((HEADS,), "float32")
            part = T.alloc_fragment((HEADS,), "float32")
            left = T.alloc_fragment((HEADS,), "float32")
            ids = T.alloc_local((4,), "int32")
            good = T.alloc_local((4,), "bool")
            base = T.alloc_local((4,), "int64")
            ready = T.alloc_barrier(arrive_count=[256, 256])
            free = T.alloc_barrier(arrive_count=[256, 256])
            got_p = T.alloc_barrier(arrive_count=[128, 128])

            tx = T.get_thread_binding()
            row = T.cast(T.truncdiv(program, blocks), "int64")
            first_head = T.truncmod(program, blocks) * HEADS
            end = T.min(length[row], width)
            tiles = T.ceildiv(end, SLOTS)
            wide = T.cast(T.ceildiv(width, SLOTS), "int64")

            # Through the key buffers into registers.
            for u in T.serial(T.ceildiv(HEADS * channels // 8, 384)):
                chunk = u * 384 + tx
                h = chunk // (channels // 8)
                c = chunk % (channels // 8) * 8
                here = (h < HEADS) and (first_head + h < heads)
                offset = (row * q_row8 + T.cast(first_head + h, "int64") * q_head8) * 8 + c
                place = T.if_then_else(here, offset, zero64())
                if h < HEADS:
                    if c < v:
                        T.call_extern(
                            "handle", COPY16, T.address_of(k_m[0, h, c]), T.address_of(q[place]), here
                        )
                    elif tail > 0:
                        T.call_extern(
                            "handle", COPY16, T.address_of(k_t[0, h, c - v]), T.address_of(q[place]), here
                        )
            for u in T.serial(T.ceildiv(HEADS * v // 8, 384)):
                chunk = u * 384 + tx
                h = chunk // (v // 8)
                c = chunk % (v // 8) * 8
                here = (h < HEADS) and (first_head + h < heads)
                offset = (row * dout_row8 + T.cast(first_head + h, "int64") * dout_head8) * 8 + c
                place = T.if_then_else(here, offset, zero64())
                if h < HEADS:
                    T.call_extern(
                        "handle", COPY16, T.address_of(k_m[1, h, c]), T.address_of(dout[place]), here
                    )
            T.call_extern("handle", WAIT_ALL)
            T.sync_threads()

            if tx < 128:
                T.set_max_nreg(224, 1)
                T.copy(k_m[0, :, :], q_f)
                if tail > 0:
                    T.copy(k_t[0, :, :], qt_f)
                T.sync_threads(5, 384)
                for h in T.Parallel(HEADS):
                    base_2[h] = T.if_then_else(
                        first_head + h < heads,
                        shift[(row * heads + first_head + h) * 2],
                        T.infinity("float32"),
                    )
                for n in T.serial(tiles):
                    b = n & 1
                    T.barrier_wait(ready[b], (n >> 1) & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_f, k_m[b, :, :], s, transpose_B=True, clear_accum=True)
                    if tail > 0:
                        T.wgmma_gemm(qt_f, k_t[b, :, :], s, transpose_B=True)
                    T.wait_wgmma(0)
                    for h, j in T.Parallel(HEADS, SLOTS):
                        s[h, j] = T.if_then_else(ok[b, j] != 0, T.exp2(s[h, j] * scale_log2 - base_2[h]), 0.0)
                    for h, j in T.Parallel(HEADS, SLOTS):
                        p_x[b, h, j] = s[h, j]
                    T.barrier_arrive(got_p[b])
                    T.barrier_arrive(free[b])
                    store_tile(1, 6, tx, n, row, wide, first_head, heads, s, p_s, pairs)
            elif tx < 256:
                T.set_max_nreg(224, 1)
                T.copy(k_m[1, :, :], g_f)
                T.sync_threads(5, 384)
                T.fill(left, 0)
                for h in T.Parallel(HEADS):
                    delta[h] = T.if_then_else(
                        first_head + h < heads, shift[(row * heads + first_head + h) * 2 + 1], 0.0
                    )
                for n in T.serial(tiles):
                    b = n & 1
                    T.barrier_wait(ready[b], (n >> 1) & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(g_f, k_m[b, :, :], ds, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    T.barrier_wait(got_p[b], (n >> 1) & 1)
                    # The scale goes in before the rounding to 16 bits, which keeps large activations inside fp16.
                    for h, j in T.Parallel(HEADS, SLOTS):
                        ds[h, j] = p_x[b, h, j] * (ds[h, j] - delta[h]) * scale
                    # What `left` sums are the values that are stored: then the balanced ones cancel as exactly.
                    for h, j in T.Parallel(HEADS, SLOTS):
                        ds[h, j] = T.cast(T.cast(ds[h, j], dtype), "float32")
                    T.barrier_arrive(free[b])
                    T.reduce_sum(ds, part, dim=1)
                    for h in T.Parallel(HEADS):
                        left[h] = left[h] + part[h]
                    store_tile(0, 7, tx - 128, n, row, wide, first_head, heads, ds, d_s, pairs)
                for h in T.Parallel(HEADS):
                    if first_head + h < heads:
                        shift[(row * heads + first_head + h) * 2 + 1] = left[h]
            else:
                T.set_max_nreg(56, 0)
                lane = tx - 256
                T.sync_threads(5, 384)
                for n in T.serial(tiles):
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

    return dsa_hopper_pairs
