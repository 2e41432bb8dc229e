"""The indexer's divergence from its teacher, with gradients: scores, their lse, then the gradients, row by row."""

import tilelang.language as T

from dsa_backends.tilelang_kernels.parts import (
    COMMIT,
    COPY16,
    EVERY_LANE,
    FLOOR,
    LOG2_E,
    PRELUDE,
    SLOTS,
    WAIT_ALL,
    lengths,
    zero64,
)

TINY = 1e-10
"""The contract's floor of the teacher's sum and of its logarithm."""


def index_loss(head_block: int, dim: int, relu: bool):
    """bf16. Grid (rows,), 128 threads; ``scores [rows, padded W]`` fp32 is scratch.

    ``kl [rows]`` always; ``dq [rows, heads, dim]`` and ``dw [rows, heads]`` fp32 where asked for; ``dk`` fp32, added
    into by atomics.
    """
    n_q, n_k, n_w, n_idx, n_row, n_mass, n_scores, n_kl, n_dq, n_dw, n_dk = lengths(
        "n_q n_k n_w n_idx n_row n_mass n_scores n_kl n_dq n_dw n_dk"
    )

    @T.macro
    def across(value, sums, tx, largest):
        # Over 128 threads: in the warp by shuffles, between the four warps through shared memory.
        for d in T.unroll(5):
            got = T.call_extern("float32", "__shfl_xor_sync", T.uint32(EVERY_LANE), value[0], 16 >> d)
            value[0] = T.max(value[0], got) if largest else value[0] + got
        T.sync_threads()
        if tx % 32 == 0:
            sums[tx // 32] = value[0]
        T.sync_threads()
        if largest:
            value[0] = T.max(T.max(sums[0], sums[1]), T.max(sums[2], sums[3]))
        else:
            value[0] = (sums[0] + sums[1]) + (sums[2] + sums[3])

    @T.macro
    def start_tile(n, b, tx, idx, row, idx_row, end, keys, k, k_row8, k_s, id_s):
        # Two threads a key.
        slot = n * SLOTS + tx // 2
        found = T.if_then_else(slot < end, idx[row * idx_row + slot], -1)
        good = (found >= 0) and (found < keys)
        base = T.if_then_else(good, T.cast(found, "int64"), zero64()) * k_row8 * 8
        if tx % 2 == 0:
            id_s[b, tx // 2] = T.if_then_else(good, found, -1)
        for c in T.unroll(dim // 16):
            T.call_extern(
                "handle",
                COPY16,
                T.address_of(k_s[b, tx // 2, c * 16 + tx % 2 * 8]),
                T.address_of(k[base + c * 16 + tx % 2 * 8]),
                good,
            )
        T.call_extern("handle", COMMIT)

    @T.prim_func
    def dsa_index_loss(
        q: T.Tensor((n_q,), "bfloat16"),
        k: T.Tensor((n_k,), "bfloat16"),
        w: T.Tensor((n_w,), "float32"),
        idx: T.Tensor((n_idx,), "int32"),
        length: T.Tensor((n_row,), "int32"),
        mass: T.Tensor((n_mass,), "float32"),
        scores: T.Tensor((n_scores,), "float32"),
        kl: T.Tensor((n_kl,), "float32"),
        dq: T.Tensor((n_dq,), "float32"),
        dw: T.Tensor((n_dw,), "float32"),
        dk: T.Tensor((n_dk,), "float32"),
        q_row8: T.int64,
        q_head8: T.int64,
        k_row8: T.int64,
        w_row: T.int64,
        idx_row: T.int64,
        mass_row: T.int64,
        scores_row: T.int64,
        dk_row: T.int64,
        rows: T.int32,
        keys: T.int32,
        width: T.int32,
        heads: T.int32,
        need_dq: T.int32,
        need_dw: T.int32,
        need_dk: T.int32,
    ):
        with T.Kernel(rows, threads=128, prelude=PRELUDE) as program:
            q_s = T.alloc_shared((head_block, dim), "bfloat16")
            k_s = T.alloc_shared((2, SLOTS, dim), "bfloat16")
            w_s = T.alloc_shared((head_block,), "float32")
            g_s = T.alloc_shared((SLOTS,), "float32")
            id_s = T.alloc_shared((2, SLOTS), "int32")
            ds_s = T.alloc_shared((SLOTS, head_block), "bfloat16")
            sums = T.alloc_shared((4,), "float32")
            s = T.alloc_fragment((SLOTS, head_block), "float32")
            r = T.alloc_fragment((SLOTS, head_block), "float32")
            line = T.alloc_fragment((SLOTS,), "float32")
            acc_dq = T.alloc_fragment((head_block, dim), "float32")
            acc_dk = T.alloc_fragment((SLOTS, dim), "float32")
            acc_dw = T.alloc_fragment((head_block,), "float32")
            part_dw = T.alloc_fragment((head_block,), "float32")
            top = T.alloc_local((1,), "float32")
            norm = T.alloc_local((1,), "float32")
            teacher = T.alloc_local((1,), "float32")
            loss = T.alloc_local((1,), "float32")

            tx = T.get_thread_binding()
            row = T.cast(program, "int64")
            end = T.min(length[row], width)
            tiles = T.ceildiv(end, SLOTS)
            for u in T.serial((head_block * dim // 8 + 127) // 128):
                chunk = u * 128 + tx
                h = chunk // (dim // 8)
                c = chunk % (dim // 8) * 8
                if h < head_block:
                    here = h < heads
                    offset = (row * q_row8 + T.cast(h, "int64") * q_head8) * 8 + c
                    place = T.if_then_else(here, offset, zero64())
                    T.call_extern("handle", COPY16, T.address_of(q_s[h, c]), T.address_of(q[place]), here)
            T.call_extern("handle", COMMIT)
            if tx < head_block:
                w_s[tx] = T.if_then_else(tx < heads, w[row * w_row + tx], 0.0)
            if tiles > 0:
                start_tile(0, 0, tx, idx, row, idx_row, end, keys, k, k_row8, k_s, id_s)
            for n in T.serial(tiles):
                b = n & 1
                T.call_extern("handle", WAIT_ALL)
                T.fence_proxy_async()
                T.sync_threads()
                if n + 1 < tiles:
                    start_tile(n + 1, 1 - b, tx, idx, row, idx_row, end, keys, k, k_row8, k_s, id_s)
                T.gemm(
                    k_s[b, :, :], q_s, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow
                )
                for j, h in T.Parallel(SLOTS, head_block):
                    if relu:
                        s[j, h] = T.max(s[j, h], 0.0) * w_s[h]
                    else:
                        s[j, h] = s[j, h] * w_s[h]
                T.reduce_sum(s, line, dim=1)
                for j in T.Parallel(SLOTS):
                    scores[row * scores_row + n * SLOTS + j] = T.if_then_else(
                        id_s[b, j] >= 0, line[j], -T.infinity("float32")
                    )
            T.sync_threads()

            top[0] = FLOOR
            teacher[0] = 0.0
            for u in T.serial(T.ceildiv(tiles * SLOTS, 128)):
                i = u * 128 + tx
                if i < tiles * SLOTS:
                    value = scores[row * scores_row + i]
                    top[0] = T.max(top[0], value)
                    if value > -T.infinity("float32"):
                        teacher[0] = teacher[0] + mass[row * mass_row + i]
            across(top, sums, tx, True)
            across(teacher, sums, tx, False)
            norm[0] = 0.0
            for u in T.serial(T.ceildiv(tiles * SLOTS, 128)):
                i = u * 128 + tx
                if i < tiles * SLOTS:
                    norm[0] = norm[0] + T.exp2((scores[row * scores_row + i] - top[0]) * LOG2_E)
            across(norm, sums, tx, False)
            share = teacher[0] / T.max(teacher[0], TINY)
            inverse = 1.0 / T.max(teacher[0], TINY)
            log_norm = T.if_then_else(norm[0] > 0.0, T.log(norm[0]), 0.0)
            loss[0] = 0.0

            T.fill(acc_dq, 0)
            T.fill(acc_dw, 0)
            if tiles > 0:
                start_tile(0, 0, tx, idx, row, idx_row, end, keys, k, k_row8, k_s, id_s)
            for n in T.serial(tiles):
                b = n & 1
                T.call_extern("handle", WAIT_ALL)
                T.fence_proxy_async()
                if tx < SLOTS:
                    value = scores[row * scores_row + n * SLOTS + tx]
                    here = value > -T.infinity("float32")
                    log_p = value - top[0] - log_norm
                    target = T.if_then_else(
                        here, mass[row * mass_row + T.min(n * SLOTS + tx, width - 1)] * inverse, 0.0
                    )
                    if here:
                        loss[0] = loss[0] + target * (T.log(T.max(target, TINY)) - log_p)
                    g_s[tx] = T.if_then_else(here, T.exp2(log_p * LOG2_E) * share - target, 0.0)
                T.sync_threads()
                if n + 1 < tiles:
                    start_tile(n + 1, 1 - b, tx, idx, row, idx_row, end, keys, k, k_row8, k_s, id_s)
                T.gemm(
                    k_s[b, :, :], q_s, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow
                )
                for j, h in T.Parallel(SLOTS, head_block):
                    if relu:
                        r[j, h] = T.max(s[j, h], 0.0) * g_s[j]
                        s[j, h] = T.if_then_else(s[j, h] > 0.0, g_s[j] * w_s[h], 0.0)
                    else:
                        r[j, h] = s[j, h] * g_s[j]
                        s[j, h] = g_s[j] * w_s[h]
                T.reduce_sum(r, part_dw, dim=0)
                for h in T.Parallel(head_block):
                    acc_dw[h] = acc_dw[h] + part_dw[h]
                T.copy(s, ds_s)
                T.fence_proxy_async()
                T.sync_threads()
                T.gemm(ds_s, k_s[b, :, :], acc_dq, transpose_A=True)
                if need_dk != 0:
                    T.gemm(ds_s, q_s, acc_dk, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                    for j, c in T.Parallel(SLOTS, dim):
                        if id_s[b, j] >= 0:
                            T.atomic_add(dk[T.cast(id_s[b, j], "int64") * dk_row + c], acc_dk[j, c])
            across(loss, sums, tx, False)
            if tx == 0:
                kl[row] = loss[0]
            if need_dw != 0:
                for h in T.Parallel(head_block):
                    if h < heads:
                        dw[row * heads + h] = acc_dw[h]
            if need_dq != 0:
                for h, c in T.Parallel(head_block, dim):
                    if h < heads:
                        dq[(row * heads + h) * dim + c] = acc_dq[h, c]
            T.call_extern("handle", WAIT_ALL)

    return dsa_index_loss
