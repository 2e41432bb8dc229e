"""``dQ = dS K`` from the stored dS, for compute capability 9.0: beside S and dP it would not fit the registers."""

import tilelang.language as T

from dsa_backends.tilelang_kernels.parts import (
    COPY16,
    PRELUDE,
    SLOTS,
    copy_slots,
    lengths,
    load_ids,
    zero64,
)

HEADS = 64


def hopper_query_gradient(tail: int, dtype: str):
    """Grid (rows * head blocks), 384 threads: two warp groups own half of the channels each, one group copies."""
    v, half, rope = 512, 256, max(tail, 16)
    channels = v + tail
    n_kv, n_idx, n_row, n_pairs, n_dq = lengths("n_kv n_idx n_row n_pairs n_dq")

    @T.macro
    def store_half(side, barrier, thread, row, first_head, heads, value, staged, dq):
        T.copy(value, staged)
        T.sync_threads(barrier, 128)
        for u in T.unroll(HEADS * half // 8 // 128):
            h = u * 4 + thread // 32
            if first_head + h < heads:
                for e in T.vectorized(8):
                    dq[(row * heads + first_head + h) * channels + side * half + thread % 32 * 8 + e] = (
                        staged[h, thread % 32 * 8 + e]
                    )

    @T.prim_func
    def dsa_hopper_query_gradient(
        kv: T.Tensor((n_kv,), dtype),
        idx: T.Tensor((n_idx,), "int32"),
        length: T.Tensor((n_row,), "int32"),
        pairs: T.Tensor((n_pairs,), dtype),
        dq: T.Tensor((n_dq,), dtype),
        kv_row8: T.int64,
        idx_row: T.int64,
        rows: T.int32,
        keys: T.int32,
        width: T.int32,
        heads: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(rows * blocks, threads=384, prelude=PRELUDE) as program:
            k_l = T.alloc_shared((2, SLOTS, half), dtype)
            k_r = T.alloc_shared((2, SLOTS, half), dtype)
            k_t = T.alloc_shared((2, SLOTS, rope), dtype)
            d_s = T.alloc_shared((2, HEADS, SLOTS), dtype)
            staged = T.alloc_shared((HEADS, half), dtype)
            a_l = T.alloc_fragment((HEADS, half), "float32")
            a_r = T.alloc_fragment((HEADS, half), "float32")
            a_t = T.alloc_fragment((HEADS, rope), "float32")
            ids = T.alloc_local((4,), "int32")
            good = T.alloc_local((4,), "bool")
            base = T.alloc_local((4,), "int64")
            ready = T.alloc_barrier(arrive_count=[128, 128])
            free = T.alloc_barrier(arrive_count=[256, 256])
            stored = T.alloc_barrier(arrive_count=128)

            tx = T.get_thread_binding()
            row = T.cast(T.truncdiv(program, blocks), "int64")
            first_head = T.truncmod(program, blocks) * HEADS
            end = T.min(length[row], width)
            tiles = T.ceildiv(end, SLOTS)
            wide = T.cast(T.ceildiv(width, SLOTS), "int64")
            if tx < 128:
                T.set_max_nreg(224, 1)
                T.fill(a_l, 0)
                if tail > 0:
                    T.fill(a_t, 0)
                for n in T.serial(tiles):
                    b = n & 1
                    T.barrier_wait(ready[b], (n >> 1) & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(d_s[b, :, :], k_l[b, :, :], a_l)
                    if tail > 0:
                        T.wgmma_gemm(d_s[b, :, :], k_t[b, :, :], a_t)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[b])
                store_half(0, 6, tx, row, first_head, heads, a_l, staged, dq)
                if tail > 0:
                    for h, c in T.Parallel(HEADS, tail):
                        if first_head + h < heads:
                            dq[(row * heads + first_head + h) * channels + v + c] = a_t[h, c]
                T.sync_threads(6, 128)
                T.barrier_arrive(stored)
            elif tx < 256:
                T.set_max_nreg(224, 1)
                T.fill(a_r, 0)
                for n in T.serial(tiles):
                    b = n & 1
                    T.barrier_wait(ready[b], (n >> 1) & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(d_s[b, :, :], k_r[b, :, :], a_r)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[b])
                T.barrier_wait(stored, 0)
                store_half(1, 7, tx - 128, row, first_head, heads, a_r, staged, dq)
            else:
                T.set_max_nreg(56, 0)
                lane = tx - 256
                for n in T.serial(tiles):
                    b = n & 1
                    load_ids(4, n, lane, idx, row, idx_row, end, keys, kv_row8, ids, good, base)
                    T.barrier_wait(free[b], ((n >> 1) & 1) ^ 1)
                    for u in T.unroll(4):
                        h = u * 16 + lane // 8
                        here = first_head + h < heads
                        offset = ((row * wide + n) * 2 * heads + first_head + h) * SLOTS + lane % 8 * 8
                        place = T.if_then_else(here, offset, zero64())
                        T.call_extern(
                            "handle",
                            COPY16,
                            T.address_of(d_s[b, h, lane % 8 * 8]),
                            T.address_of(pairs[place]),
                            here,
                        )
                    copy_slots(4, half, 0, lane, kv, base, good, k_l, b)
                    copy_slots(4, half, half, lane, kv, base, good, k_r, b)
                    if tail > 0:
                        copy_slots(4, tail, v, lane, kv, base, good, k_t, b)
                    T.cp_async_barrier_noinc(ready[b])

    return dsa_hopper_query_gradient
