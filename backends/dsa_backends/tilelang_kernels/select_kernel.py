"""Exact selection of a row's best keys by radix, ties to the lower id."""

import tilelang.language as T

from dsa_backends.tilelang_kernels.parts import EVERY_LANE, lengths

THREADS = 512
BINS = 2048
LISTED = 4096
"""Candidates that fit in shared memory. More are found by two more sweeps of the row: never dropped."""
EACH = 8
"""Columns a thread takes at a time."""


def select_best():
    """Grid (rows,), 512 threads; ``scores [rows, columns]`` fp32, rows ``scores_row4 * 4`` apart.

    A histogram of the upper 11 bits finds the bin in which the last place lies. What lies above it is written in order
    of columns; what lies in it is listed, and two histograms of the list (11 and 10 bits) find the exact value. Of
    what equals that value the first by column are taken. Every place comes from a prefix sum, so the same scores give
    the same order of ids.
    """
    warps = THREADS // 32
    per_thread = BINS // THREADS
    n_scores, n_row, n_indices, n_length = lengths("n_scores n_row n_indices n_length")

    @T.macro
    def running_sum(value, total, sums, tx):
        # Inclusive over the block; the last warp's sum is the total.
        lane = tx % 32
        for d in T.unroll(5):
            got = T.call_extern("int32", "__shfl_up_sync", T.uint32(EVERY_LANE), value[0], 1 << d)
            value[0] = value[0] + T.if_then_else(lane >= (1 << d), got, 0)
        if lane == 31:
            sums[tx // 32] = value[0]
        T.sync_threads()
        total[0] = T.if_then_else(lane < warps, sums[T.min(lane, warps - 1)], 0)
        for d in T.unroll(5):
            got = T.call_extern("int32", "__shfl_up_sync", T.uint32(EVERY_LANE), total[0], 1 << d)
            total[0] = total[0] + T.if_then_else(lane >= (1 << d), got, 0)
        before = T.call_extern("int32", "__shfl_sync", T.uint32(EVERY_LANE), total[0], T.max(tx // 32 - 1, 0))
        value[0] = value[0] + T.if_then_else(tx >= 32, before, 0)
        total[0] = T.call_extern("int32", "__shfl_sync", T.uint32(EVERY_LANE), total[0], 31)
        T.sync_threads()

    @T.macro
    def read_keys(scores, base, col, lo, hi, x, u):
        # Unsigned integers in the order of the scores; 0, below every score but one NaN, where there is no key.
        for half in T.unroll(EACH // 4):
            if col + half * 4 < hi:
                for e in T.vectorized(4):
                    x[half * 4 + e] = scores[base + col + half * 4 + e]
        for e in T.unroll(EACH):
            u[e] = T.reinterpret(T.if_then_else(x[e] == 0.0, T.float32(0.0), x[e]), "uint32")
            u[e] = T.if_then_else((u[e] >> T.uint32(31)) != T.uint32(0), ~u[e], u[e] | T.uint32(0x80000000))
            u[e] = T.if_then_else((col + e >= lo) and (col + e < hi), u[e], T.uint32(0))

    @T.macro
    def clear(hist, tx):
        for b in T.unroll(per_thread):
            hist[b * THREADS + tx] = 0
        T.sync_threads()

    @T.macro
    def count(hist, u, shift, bits):
        T.call_extern(
            "handle",
            "atomicAdd",
            T.address_of(hist[T.cast((u >> T.uint32(shift)) & T.uint32((1 << bits) - 1), "int32")]),
            1,
        )

    @T.macro
    def pick_bin(hist, found, value, total, sums, own, above, need, prefix, bits, tx):
        # The bin, counted from the top, in which the need-th entry lies; what lies above it is needed no more.
        T.sync_threads()
        value[0] = 0
        for j in T.unroll(per_thread):
            value[0] = value[0] + hist[BINS - 1 - (tx * per_thread + j)]
        own[0] = value[0]
        running_sum(value, total, sums, tx)
        above[0] = value[0] - own[0]
        for j in T.unroll(per_thread):
            here = hist[BINS - 1 - (tx * per_thread + j)]
            if (above[0] < need[0]) and (above[0] + here >= need[0]):
                found[0] = BINS - 1 - (tx * per_thread + j)
                found[1] = above[0]
                found[2] = here
            above[0] = above[0] + here
        T.sync_threads()
        prefix[0] = (prefix[0] << T.uint32(bits)) | T.cast(found[0], "uint32")
        need[0] = need[0] - found[1]
        own[0] = found[2]
        T.sync_threads()

    @T.prim_func
    def dsa_select_best(
        scores: T.Tensor((n_scores,), "float32"),
        starts: T.Tensor((n_row,), "int32"),
        ends: T.Tensor((n_row,), "int32"),
        indices: T.Tensor((n_indices,), "int32"),
        length: T.Tensor((n_length,), "int32"),
        scores_row4: T.int64,
        indices_row: T.int64,
        rows: T.int32,
        first_key: T.int32,
        columns: T.int32,
        topk: T.int32,
    ):
        with T.Kernel(rows, threads=THREADS) as row:
            hist = T.alloc_shared((BINS,), "int32")
            sums = T.alloc_shared((warps,), "int32")
            found = T.alloc_shared((4,), "int32")
            list_u = T.alloc_shared((LISTED,), "uint32")
            list_id = T.alloc_shared((LISTED,), "int32")
            x = T.alloc_local((EACH,), "float32")
            u = T.alloc_local((EACH,), "uint32")
            value = T.alloc_local((1,), "int32")
            total = T.alloc_local((1,), "int32")
            need = T.alloc_local((1,), "int32")
            prefix = T.alloc_local((1,), "uint32")
            shift = T.alloc_local((1,), "uint32")
            above = T.alloc_local((1,), "int32")
            equal = T.alloc_local((1,), "int32")
            written = T.alloc_local((1,), "int32")
            passed = T.alloc_local((1,), "int32")
            listing = T.alloc_local((1,), "int32")
            entry = T.alloc_local((1,), "uint32")
            take = T.alloc_local((EACH,), "int32")

            tx = T.get_thread_binding()
            lo = T.max(starts[row] - first_key, 0)
            hi = T.min(ends[row] - first_key, columns)
            seen = T.max(hi - lo, 0)
            first = T.truncdiv(lo, 4) * 4
            base = T.cast(row, "int64") * scores_row4 * 4
            steps = T.if_then_else(hi > lo, T.ceildiv(hi - first, THREADS * EACH), 0)
            out = T.cast(row, "int64") * indices_row
            for e in T.unroll(EACH):
                x[e] = 0.0
            need[0] = topk
            prefix[0] = T.uint32(0)
            shift[0] = T.uint32(0)
            listing[0] = 0
            if seen > topk:
                clear(hist, tx)
                for s in T.serial(steps):
                    col = first + (s * THREADS + tx) * EACH
                    if col < hi:
                        read_keys(scores, base, col, lo, hi, x, u)
                        for e in T.unroll(EACH):
                            if (col + e >= lo) and (col + e < hi):
                                count(hist, u[e], 21, 11)
                pick_bin(hist, found, value, total, sums, equal, above, need, prefix, 11, tx)
                shift[0] = T.uint32(21)
                if equal[0] <= LISTED:
                    listing[0] = 1
                else:
                    for p in T.unroll(2):
                        clear(hist, tx)
                        for s in T.serial(steps):
                            col = first + (s * THREADS + tx) * EACH
                            if col < hi:
                                read_keys(scores, base, col, lo, hi, x, u)
                                for e in T.unroll(EACH):
                                    if (
                                        (col + e >= lo)
                                        and (col + e < hi)
                                        and ((u[e] >> T.uint32(21 if p == 0 else 10)) == prefix[0])
                                    ):
                                        count(hist, u[e], 10 if p == 0 else 0, 11 if p == 0 else 10)
                        pick_bin(
                            *(hist, found, value, total, sums, equal, above, need, prefix),
                            *(11 if p == 0 else 10, tx),
                        )
                    shift[0] = T.uint32(0)
            written[0] = 0
            passed[0] = 0
            for s in T.serial(steps):
                col = first + (s * THREADS + tx) * EACH
                value[0] = 0
                for e in T.unroll(EACH):
                    take[e] = 0
                if col < hi:
                    read_keys(scores, base, col, lo, hi, x, u)
                    for e in T.unroll(EACH):
                        inside = (col + e >= lo) and (col + e < hi)
                        best = (u[e] >> shift[0]) > prefix[0]
                        same = (u[e] >> shift[0]) == prefix[0]
                        # Two counters in one integer: above the prefix in the lower half, equal to it in the upper.
                        take[e] = T.if_then_else(
                            inside,
                            T.if_then_else((seen <= topk) or best, 1, T.if_then_else(same, 65536, 0)),
                            0,
                        )
                        value[0] = value[0] + take[e]
                equal[0] = value[0]
                running_sum(value, total, sums, tx)
                above[0] = written[0] + ((value[0] - equal[0]) & 65535)
                equal[0] = passed[0] + ((value[0] - equal[0]) >> 16)
                written[0] = written[0] + (total[0] & 65535)
                passed[0] = passed[0] + (total[0] >> 16)
                for e in T.unroll(EACH):
                    if take[e] == 1:
                        indices[
                            out + above[0] + T.if_then_else(listing[0] != 0, 0, T.min(equal[0], need[0]))
                        ] = first_key + col + e
                        above[0] = above[0] + 1
                    if take[e] == 65536:
                        if listing[0] != 0:
                            list_u[equal[0]] = u[e]
                            list_id[equal[0]] = first_key + col + e
                        elif equal[0] < need[0]:
                            indices[out + above[0] + equal[0]] = first_key + col + e
                        equal[0] = equal[0] + 1
            if listing[0] != 0:
                T.sync_threads()
                for p in T.unroll(2):
                    clear(hist, tx)
                    for s in T.serial(T.ceildiv(passed[0], THREADS)):
                        i = s * THREADS + tx
                        if i < passed[0]:
                            entry[0] = list_u[i]
                            if (entry[0] >> T.uint32(21 if p == 0 else 10)) == prefix[0]:
                                count(hist, entry[0], 10 if p == 0 else 0, 11 if p == 0 else 10)
                    pick_bin(
                        *(hist, found, value, total, sums, equal, above, need, prefix),
                        *(11 if p == 0 else 10, tx),
                    )
                for s in T.serial(T.ceildiv(passed[0], THREADS)):
                    i = s * THREADS + tx
                    at = T.min(i, LISTED - 1)
                    take[0] = 0
                    if i < passed[0]:
                        entry[0] = list_u[at]
                        take[0] = T.if_then_else(
                            entry[0] > prefix[0], 1, T.if_then_else(entry[0] == prefix[0], 65536, 0)
                        )
                    value[0] = take[0]
                    running_sum(value, total, sums, tx)
                    above[0] = written[0] + ((value[0] - take[0]) & 65535)
                    equal[0] = (value[0] - take[0]) >> 16
                    if (take[0] == 1) or ((take[0] == 65536) and (equal[0] < need[0])):
                        indices[out + above[0] + T.min(equal[0], need[0])] = list_id[at]
                    written[0] = written[0] + (total[0] & 65535) + T.min(total[0] >> 16, need[0])
                    need[0] = T.max(need[0] - (total[0] >> 16), 0)
            chosen = T.min(seen, topk)
            for s in T.serial(T.ceildiv(topk - chosen, THREADS)):
                if chosen + s * THREADS + tx < topk:
                    indices[out + chosen + s * THREADS + tx] = -1
            if tx == 0:
                length[row] = chosen

    return dsa_select_best
