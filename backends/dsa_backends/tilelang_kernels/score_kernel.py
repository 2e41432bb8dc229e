"""Indexer scores of a block of rows and keys: ``score[t, j] = sum_h w[t, h] * f(q[t, h] . k[j])``."""

import tilelang.language as T

from dsa_backends.tilelang_kernels.parts import (
    COMMIT,
    COPY16,
    PRELUDE,
    WAIT_ALL_BUT_ONE,
    WAIT_ALL_BUT_TWO,
    lengths,
    zero64,
)

ROWS = 32
"""Rows that stream past a stationary tile of keys."""
KEYS = 256
STAGES = 4


def index_scores(head_block: int, dim: int, dtype: str, relu: bool, hopper: bool):
    """Grid (key tiles * row tiles), 256 threads: two groups of 128 hold 128 keys each while rows stream past.

    Every score is one product of one key with one row's heads, whatever its place: equal keys score equally. Tiles
    outside every row's range are not computed; what a row does not see is not written, and not read later. With
    ``hopper`` the keys live in registers and the products of one row run under the weighting of the row before.
    """
    part = KEYS // 2
    head_chunks = head_block * dim // 8
    n_q, n_k, n_w, n_row, n_out = lengths("n_q n_k n_w n_row n_out")

    @T.macro
    def start_row(q, q_s, stage, row, heads, q_row8, q_head8, rows, tx):
        for u in T.unroll((head_chunks + 255) // 256):
            chunk = u * 256 + tx
            h = chunk // (dim // 8)
            c = chunk % (dim // 8) * 8
            if chunk < head_chunks:
                here = (h < heads) and (row < rows)
                offset = (T.cast(row, "int64") * q_row8 + T.cast(h, "int64") * q_head8) * 8 + c
                place = T.if_then_else(here, offset, zero64())
                T.call_extern("handle", COPY16, T.address_of(q_s[stage, h, c]), T.address_of(q[place]), here)
        T.call_extern("handle", COMMIT)

    @T.macro
    def weigh(acc, part_sum, w_s, out, r, row0, rows, key0, columns, out_row):
        if hopper:
            # Without it the compiler reads the accumulators before the wait and then waits for both products.
            T.warpgroup_fence_operand(acc, num_regs=part * head_block // 128)
        for n, h in T.Parallel(part, head_block):
            if relu:
                acc[n, h] = T.max(acc[n, h], 0.0) * w_s[r, h]
            else:
                acc[n, h] = acc[n, h] * w_s[r, h]
        T.reduce_sum(acc, part_sum, dim=1)
        if row0 + r < rows:
            for n in T.Parallel(part):
                if key0 + n < columns:
                    out[T.cast(row0 + r, "int64") * out_row + key0 + n] = part_sum[n]

    @T.macro
    def next_row():
        T.call_extern("handle", WAIT_ALL_BUT_ONE)
        if hopper:
            T.fence_proxy_async()
        T.sync_threads(3, 256)

    @T.macro
    def pass_rows(
        g,
        tx,
        q,
        q_s,
        w_s,
        k_s,
        k_f,
        acc_0,
        acc_1,
        part_sum,
        out,
        row0,
        rows,
        key0,
        columns,
        heads,
        q_row8,
        q_head8,
        out_row,
    ):
        if hopper:
            T.copy(k_s[g, :, :], k_f)
            next_row()
            T.wgmma_gemm(k_f, q_s[0, :, :], acc_0, transpose_B=True, clear_accum=True)
            start_row(q, q_s, 2, row0 + 2, heads, q_row8, q_head8, rows, tx)
            T.wait_wgmma(0)
            for r in T.serial(ROWS // 2):
                next_row()
                T.wgmma_gemm(k_f, q_s[(r * 2 + 1) % STAGES, :, :], acc_1, transpose_B=True, clear_accum=True)
                start_row(q, q_s, (r * 2 + 3) % STAGES, row0 + r * 2 + 3, heads, q_row8, q_head8, rows, tx)
                weigh(acc_0, part_sum, w_s, out, r * 2, row0, rows, key0, columns, out_row)
                T.wait_wgmma(0)
                next_row()
                T.wgmma_gemm(k_f, q_s[(r * 2 + 2) % STAGES, :, :], acc_0, transpose_B=True, clear_accum=True)
                start_row(q, q_s, (r * 2 + 4) % STAGES, row0 + r * 2 + 4, heads, q_row8, q_head8, rows, tx)
                weigh(acc_1, part_sum, w_s, out, r * 2 + 1, row0, rows, key0, columns, out_row)
                T.wait_wgmma(0)
        else:
            for r in T.serial(ROWS):
                next_row()
                start_row(q, q_s, (r + 2) % STAGES, row0 + r + 2, heads, q_row8, q_head8, rows, tx)
                T.gemm(
                    k_s[g, :, :],
                    q_s[r % STAGES, :, :],
                    acc_0,
                    transpose_B=True,
                    clear_accum=True,
                    policy=T.GemmWarpPolicy.FullRow,
                )
                weigh(acc_0, part_sum, w_s, out, r, row0, rows, key0, columns, out_row)

    @T.prim_func
    def dsa_index_scores(
        q: T.Tensor((n_q,), dtype),
        k: T.Tensor((n_k,), dtype),
        w: T.Tensor((n_w,), "float32"),
        starts: T.Tensor((n_row,), "int32"),
        ends: T.Tensor((n_row,), "int32"),
        out: T.Tensor((n_out,), "float32"),
        q_row8: T.int64,
        q_head8: T.int64,
        k_row8: T.int64,
        w_row: T.int64,
        out_row: T.int64,
        rows: T.int32,
        first_key: T.int32,
        columns: T.int32,
        heads: T.int32,
        tiles: T.int32,
        row_tiles: T.int32,
    ):
        with T.Kernel(tiles * row_tiles, threads=256, prelude=PRELUDE) as program:
            k_s = T.alloc_shared((2, part, dim), dtype)
            q_s = T.alloc_shared((STAGES, head_block, dim), dtype)
            w_s = T.alloc_shared((ROWS, head_block), "float32")
            k_0 = T.alloc_fragment((part, dim), dtype)
            k_1 = T.alloc_fragment((part, dim), dtype)
            acc_00 = T.alloc_fragment((part, head_block), "float32")
            acc_01 = T.alloc_fragment((part, head_block), "float32")
            acc_10 = T.alloc_fragment((part, head_block), "float32")
            acc_11 = T.alloc_fragment((part, head_block), "float32")
            sum_0 = T.alloc_fragment((part,), "float32")
            sum_1 = T.alloc_fragment((part,), "float32")
            low = T.alloc_local((1,), "int32")
            high = T.alloc_local((1,), "int32")

            tx = T.get_thread_binding()
            key0 = T.truncmod(program, tiles) * KEYS
            row0 = T.truncdiv(program, tiles) * ROWS
            low[0] = 2147483647
            high[0] = -2147483647
            for r in T.serial(ROWS):
                if row0 + r < rows:
                    low[0] = T.min(low[0], starts[row0 + r])
                    high[0] = T.max(high[0], ends[row0 + r])
            if (first_key + key0 < high[0]) and (first_key + key0 + KEYS > low[0]):
                for u in T.unroll(KEYS * dim // 8 // 256):
                    chunk = u * 256 + tx
                    n = chunk // (dim // 8)
                    c = chunk % (dim // 8) * 8
                    here = key0 + n < columns
                    place = T.if_then_else(
                        here, T.cast(first_key + key0 + n, "int64") * k_row8 * 8 + c, zero64()
                    )
                    T.call_extern(
                        "handle",
                        COPY16,
                        T.address_of(k_s[n // part, n % part, c]),
                        T.address_of(k[place]),
                        here,
                    )
                T.call_extern("handle", COMMIT)
                start_row(q, q_s, 0, row0, heads, q_row8, q_head8, rows, tx)
                start_row(q, q_s, 1, row0 + 1, heads, q_row8, q_head8, rows, tx)
                for u in T.serial((ROWS * head_block + 255) // 256):
                    i = u * 256 + tx
                    if i < ROWS * head_block:
                        r = i // head_block
                        h = i % head_block
                        w_s[r, h] = T.if_then_else(
                            (row0 + r < rows) and (h < heads),
                            w[T.cast(row0 + r, "int64") * w_row + h],
                            0.0,
                        )
                T.call_extern("handle", WAIT_ALL_BUT_TWO)
                T.sync_threads()
                if tx < 128:
                    pass_rows(
                        *(0, tx, q, q_s, w_s, k_s, k_0, acc_00, acc_01, sum_0, out, row0, rows, key0),
                        *(columns, heads, q_row8, q_head8, out_row),
                    )
                else:
                    pass_rows(
                        *(1, tx, q, q_s, w_s, k_s, k_1, acc_10, acc_11, sum_1, out, row0, rows, key0 + part),
                        *(columns, heads, q_row8, q_head8, out_row),
                    )

    return dsa_index_scores
