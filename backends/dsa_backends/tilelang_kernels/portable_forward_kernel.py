"""Attention forward with nothing but 16-byte asynchronous copies and warp-level products: compute capability 8.0 on."""

import tilelang.language as T

from dsa_backends.tilelang_kernels.parts import (
    COMMIT,
    COPY16,
    FLOOR,
    LN_2,
    PRELUDE,
    WAIT_ALL,
    lengths,
    zero64,
)

KEYS = 32


def portable_forward(head_block: int, tail: int, dtype: str):
    """512 value channels and ``tail`` (0 or 64) more in the keys. Grid (rows * head blocks), 128 threads.

    Two buffers of 32 slots; the next tile is on its way while this one is computed. Head blocks of 16 fit the 99 KiB
    that the smaller GPUs give a block.
    """
    v, rope = 512, max(tail, 16)
    channels = v + tail
    n_q, n_kv, n_idx, n_row, n_out, n_lse = lengths("n_q n_kv n_idx n_row n_out n_lse")

    @T.macro
    def start_tile(n, b, tx, idx, row, idx_row, end, keys, kv, kv_row8, k_m, k_t, ok):
        # Four threads a row.
        slot = n * KEYS + tx // 4
        found = T.if_then_else(slot < end, idx[row * idx_row + slot], -1)
        good = (found >= 0) and (found < keys)
        base = T.if_then_else(good, T.cast(found, "int64"), zero64()) * kv_row8 * 8
        if tx % 4 == 0:
            ok[b, tx // 4] = T.cast(good, "int32")
        for c in T.unroll(v // 32):
            T.call_extern(
                "handle",
                COPY16,
                T.address_of(k_m[b, tx // 4, c * 32 + tx % 4 * 8]),
                T.address_of(kv[base + c * 32 + tx % 4 * 8]),
                good,
            )
        if tail > 0:
            for c in T.unroll(tail // 32):
                T.call_extern(
                    "handle",
                    COPY16,
                    T.address_of(k_t[b, tx // 4, c * 32 + tx % 4 * 8]),
                    T.address_of(kv[base + v + c * 32 + tx % 4 * 8]),
                    good,
                )
        T.call_extern("handle", COMMIT)

    @T.prim_func
    def dsa_portable_forward(
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
        with T.Kernel(rows * blocks, threads=128, prelude=PRELUDE) as program:
            q_m = T.alloc_shared((head_block, v), dtype)
            q_t = T.alloc_shared((head_block, rope), dtype)
            k_m = T.alloc_shared((2, KEYS, v), dtype)
            k_t = T.alloc_shared((2, KEYS, rope), dtype)
            p_s = T.alloc_shared((head_block, KEYS), dtype)
            ok = T.alloc_shared((2, KEYS), "int32")
            s = T.alloc_fragment((head_block, KEYS), "float32")
            o = T.alloc_fragment((head_block, v), "float32")
            m = T.alloc_fragment((head_block,), "float32")
            top = T.alloc_fragment((head_block,), "float32")
            a = T.alloc_fragment((head_block,), "float32")
            total = T.alloc_fragment((head_block,), "float32")
            part = T.alloc_fragment((head_block,), "float32")

            tx = T.get_thread_binding()
            row = T.cast(T.truncdiv(program, blocks), "int64")
            first_head = T.truncmod(program, blocks) * head_block
            end = T.min(length[row], width)
            tiles = T.ceildiv(end, KEYS)
            for u in T.serial(T.ceildiv(head_block * channels // 8, 128)):
                chunk = u * 128 + tx
                h = chunk // (channels // 8)
                c = chunk % (channels // 8) * 8
                here = (h < head_block) and (first_head + h < heads)
                offset = (row * q_row8 + T.cast(first_head + h, "int64") * q_head8) * 8 + c
                place = T.if_then_else(here, offset, zero64())
                if h < head_block:
                    if c < v:
                        T.call_extern("handle", COPY16, T.address_of(q_m[h, c]), T.address_of(q[place]), here)
                    elif tail > 0:
                        T.call_extern(
                            "handle", COPY16, T.address_of(q_t[h, c - v]), T.address_of(q[place]), here
                        )
            T.call_extern("handle", COMMIT)
            if tiles > 0:
                start_tile(0, 0, tx, idx, row, idx_row, end, keys, kv, kv_row8, k_m, k_t, ok)
            T.fill(o, 0)
            T.fill(total, 0)
            T.fill(m, FLOOR)
            for n in T.serial(tiles):
                b = n & 1
                T.call_extern("handle", WAIT_ALL)
                T.sync_threads()
                if n + 1 < tiles:
                    start_tile(n + 1, 1 - b, tx, idx, row, idx_row, end, keys, kv, kv_row8, k_m, k_t, ok)
                T.gemm(
                    q_m,
                    k_m[b, :, :],
                    s,
                    transpose_B=True,
                    clear_accum=True,
                    policy=T.GemmWarpPolicy.FullCol,
                )
                if tail > 0:
                    T.gemm(q_t, k_t[b, :, :], s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                for h, j in T.Parallel(head_block, KEYS):
                    s[h, j] = T.if_then_else(ok[b, j] != 0, s[h, j] * scale_log2, -T.infinity("float32"))
                T.copy(m, top)
                T.reduce_max(s, top, dim=1, clear=False)
                for h in T.Parallel(head_block):
                    a[h] = T.exp2(m[h] - top[h])
                    m[h] = top[h]
                for h, j in T.Parallel(head_block, KEYS):
                    s[h, j] = T.exp2(s[h, j] - m[h])
                T.reduce_sum(s, part, dim=1)
                for h in T.Parallel(head_block):
                    total[h] = total[h] * a[h] + part[h]
                T.copy(s, p_s)
                for h, c in T.Parallel(head_block, v):
                    o[h, c] = o[h, c] * a[h]
                T.sync_threads()
                T.gemm(p_s, k_m[b, :, :], o, policy=T.GemmWarpPolicy.FullCol)
            for h in T.Parallel(head_block):
                if first_head + h < heads:
                    lse[row * heads + first_head + h] = T.if_then_else(
                        total[h] > 0, (m[h] + T.log2(total[h])) * LN_2, -T.infinity("float32")
                    )
            for h in T.Parallel(head_block):
                total[h] = T.if_then_else(total[h] > 0, 1.0 / total[h], 0.0)
            for h, c in T.Parallel(head_block, v):
                if first_head + h < heads:
                    out[(row * heads + first_head + h) * v + c] = o[h, c] * total[h]
            T.call_extern("handle", WAIT_ALL)

    return dsa_portable_forward
