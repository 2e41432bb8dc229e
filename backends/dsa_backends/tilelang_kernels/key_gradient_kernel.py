"""``dK`` from the stored P and dS, all heads of a block in one product, added into the keys by fp32 atomics."""

import tilelang.language as T

from dsa_backends.tilelang_kernels.parts import (
    ADD4,
    COMMIT,
    COPY16,
    PRELUDE,
    SLOTS,
    WAIT_ALL,
    lengths,
    zero64,
)

SLICES = 4


def hopper_key_gradient(head_block: int, tail: int, dtype: str, key_major: bool):
    """Grid (rows * 4), 128 threads: a program owns a quarter of a row's channels.

    ``pairs`` is ``[rows, tiles, (dS, P), heads, 64]``, with ``key_major`` ``[rows, tiles, (dS, P), 64, head_block]``.
    A tile's gradient goes through shared memory, so that a warp adds 512 contiguous bytes of one key at a time: added
    straight from the accumulators' layout, in pieces of 32 bytes, 16 heads took 8.4 ms instead of 5.5 (4096 rows of
    2048 slots, one H200).
    """
    v, part = 512, 128
    part_t = tail // SLICES if tail else 16
    # Rows 8 words apart modulo the banks.
    padded = part + 8
    n_q, n_dout, n_idx, n_row, n_pairs, n_dkv = lengths("n_q n_dout n_idx n_row n_pairs n_dkv")
    tile_shape = (2, SLOTS, head_block) if key_major else (2, head_block, SLOTS)
    tile_chunks = head_block * SLOTS // 8

    @T.macro
    def start_tile(tx, n, b, row, wide, heads, first_head, pairs, d_s, p_s):
        for u in T.unroll((tile_chunks + 127) // 128):
            chunk = u * 128 + tx
            if chunk < tile_chunks:
                if key_major:
                    offset = ((row * wide + n) * 2) * SLOTS * head_block + chunk * 8
                    k = chunk // (head_block // 8)
                    h = chunk % (head_block // 8) * 8
                    T.call_extern(
                        "handle", COPY16, T.address_of(d_s[b, k, h]), T.address_of(pairs[offset]), True
                    )
                    T.call_extern(
                        "handle",
                        COPY16,
                        T.address_of(p_s[b, k, h]),
                        T.address_of(pairs[offset + SLOTS * head_block]),
                        True,
                    )
                else:
                    h = chunk // 8
                    here = first_head + h < heads
                    offset = ((row * wide + n) * 2 * heads + first_head + h) * SLOTS + chunk % 8 * 8
                    place = T.if_then_else(here, offset, zero64())
                    other = T.if_then_else(here, offset + heads * SLOTS, zero64())
                    T.call_extern(
                        "handle",
                        COPY16,
                        T.address_of(d_s[b, h, chunk % 8 * 8]),
                        T.address_of(pairs[place]),
                        here,
                    )
                    T.call_extern(
                        "handle",
                        COPY16,
                        T.address_of(p_s[b, h, chunk % 8 * 8]),
                        T.address_of(pairs[other]),
                        here,
                    )
        T.call_extern("handle", COMMIT)

    @T.prim_func
    def dsa_hopper_key_gradient(
        q: T.Tensor((n_q,), dtype),
        dout: T.Tensor((n_dout,), dtype),
        idx: T.Tensor((n_idx,), "int32"),
        length: T.Tensor((n_row,), "int32"),
        pairs: T.Tensor((n_pairs,), dtype),
        dkv: T.Tensor((n_dkv,), "float32"),
        q_row8: T.int64,
        q_head8: T.int64,
        dout_row8: T.int64,
        dout_head8: T.int64,
        idx_row: T.int64,
        dkv_row4: T.int64,
        rows: T.int32,
        keys: T.int32,
        width: T.int32,
        heads: T.int32,
        first_head: T.int32,
    ):
        with T.Kernel(rows * SLICES, threads=128, prelude=PRELUDE) as program:
            q_s = T.alloc_shared((head_block, part), dtype)
            g_s = T.alloc_shared((head_block, part), dtype)
            t_s = T.alloc_shared((head_block, part_t), dtype)
            d_s = T.alloc_shared(tile_shape, dtype)
            p_s = T.alloc_shared(tile_shape, dtype)
            sum_s = T.alloc_shared((SLOTS, padded), "float32")
            id_s = T.alloc_shared((2, SLOTS), "int32")
            acc = T.alloc_fragment((SLOTS, part), "float32")
            acc_t = T.alloc_fragment((SLOTS, part_t), "float32")

            tx = T.get_thread_binding()
            row = T.cast(program // SLICES, "int64")
            slice_ = program % SLICES
            end = T.min(length[row], width)
            tiles = T.ceildiv(end, SLOTS)
            wide = T.cast(T.ceildiv(width, SLOTS), "int64")
            for u in T.serial(head_block * part // 8 // 128):
                chunk = u * 128 + tx
                h = chunk // (part // 8)
                c = chunk % (part // 8) * 8
                here = first_head + h < heads
                head = T.cast(first_head + h, "int64")
                at_q = T.if_then_else(here, (row * q_row8 + head * q_head8) * 8 + slice_ * part + c, zero64())
                at_g = T.if_then_else(
                    here, (row * dout_row8 + head * dout_head8) * 8 + slice_ * part + c, zero64()
                )
                T.call_extern("handle", COPY16, T.address_of(q_s[h, c]), T.address_of(q[at_q]), here)
                T.call_extern("handle", COPY16, T.address_of(g_s[h, c]), T.address_of(dout[at_g]), here)
            if tail > 0:
                for u in T.serial((head_block * part_t // 8 + 127) // 128):
                    chunk = u * 128 + tx
                    h = chunk // (part_t // 8)
                    c = chunk % (part_t // 8) * 8
                    if h < head_block:
                        here = first_head + h < heads
                        head = T.cast(first_head + h, "int64")
                        at_t = T.if_then_else(
                            here, (row * q_row8 + head * q_head8) * 8 + v + slice_ * part_t + c, zero64()
                        )
                        T.call_extern("handle", COPY16, T.address_of(t_s[h, c]), T.address_of(q[at_t]), here)
            if tiles > 0:
                start_tile(tx, 0, 0, row, wide, heads, first_head, pairs, d_s, p_s)
            for n in T.serial(tiles):
                b = n & 1
                if tx < SLOTS:
                    slot = n * SLOTS + tx
                    found = T.if_then_else(slot < end, idx[row * idx_row + slot], -1)
                    id_s[b, tx] = T.if_then_else(found < keys, found, -1)
                T.call_extern("handle", WAIT_ALL)
                T.fence_proxy_async()
                T.sync_threads()
                if n + 1 < tiles:
                    start_tile(tx, n + 1, 1 - b, row, wide, heads, first_head, pairs, d_s, p_s)
                T.wgmma_gemm(d_s[b, :, :], q_s, acc, transpose_A=not key_major, clear_accum=True)
                T.wgmma_gemm(p_s[b, :, :], g_s, acc, transpose_A=not key_major)
                if tail > 0:
                    T.wgmma_gemm(d_s[b, :, :], t_s, acc_t, transpose_A=not key_major, clear_accum=True)
                T.wait_wgmma(0)
                for j, c in T.Parallel(SLOTS, part):
                    sum_s[j, c] = acc[j, c]
                if tail > 0:
                    for j, c in T.Parallel(SLOTS, part_t):
                        if id_s[b, j] >= 0:
                            T.atomic_add(
                                dkv[T.cast(id_s[b, j], "int64") * dkv_row4 * 4 + (v + slice_ * part_t) + c],
                                acc_t[j, c],
                            )
                T.sync_threads()
                for u in T.unroll(SLOTS // 4):
                    j = u * 4 + tx // 32
                    if id_s[b, j] >= 0:
                        place = T.cast(id_s[b, j], "int64") * dkv_row4 * 4 + slice_ * part + tx % 32 * 4
                        T.call_extern(
                            "handle", ADD4, T.address_of(dkv[place]), T.address_of(sum_s[j, tx % 32 * 4])
                        )

    return dsa_hopper_key_gradient
