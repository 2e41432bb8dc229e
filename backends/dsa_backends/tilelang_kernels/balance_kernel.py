"""Makes each row's dS sum to zero over its slots, as the derivative of a softmax does."""

import tilelang.language as T

from dsa_backends.tilelang_kernels.parts import SLOTS, lengths


def balance(head_major: bool, dtype: str):
    """``dS -= left * P`` in place, ``left = shift[..., 1]`` the row's sum of dS. Grid (rows,), 256 threads.

    ``rowsum(out * dout)`` from an output rounded to 16 bits misses the mean of dP by more than what dP differs by
    between keys of equal score; the sum of dS is exactly what it missed.
    """
    n_row, n_shift, n_pairs = lengths("n_row n_shift n_pairs")

    @T.prim_func
    def dsa_balance(
        length: T.Tensor((n_row,), "int32"),
        shift: T.Tensor((n_shift,), "float32"),
        pairs: T.Tensor((n_pairs,), dtype),
        rows: T.int32,
        width: T.int32,
        heads: T.int32,
        stored: T.int32,
    ):
        with T.Kernel(rows, threads=256) as program:
            d = T.alloc_local((8,), dtype)
            p = T.alloc_local((8,), dtype)
            tx = T.get_thread_binding()
            row = T.cast(program, "int64")
            tiles = T.ceildiv(T.min(length[row], width), SLOTS)
            wide = T.cast(T.ceildiv(width, SLOTS), "int64")
            chunks = stored * (SLOTS // 8)
            for i in T.serial(T.ceildiv(tiles * chunks, 256)):
                at = i * 256 + tx
                if at < tiles * chunks:
                    n = T.truncdiv(at, chunks)
                    c = T.truncmod(at, chunks)
                    place = ((row * wide + n) * 2 * stored) * SLOTS + c * 8
                    for e in T.vectorized(8):
                        d[e] = pairs[place + e]
                    for e in T.vectorized(8):
                        p[e] = pairs[place + stored * SLOTS + e]
                    for e in T.unroll(8):
                        head = c // (SLOTS // 8) if head_major else c % 2 * 8 + e
                        if head < heads:
                            d[e] = T.cast(
                                T.cast(d[e], "float32")
                                - shift[(row * heads + head) * 2 + 1] * T.cast(p[e], "float32"),
                                dtype,
                            )
                    for e in T.vectorized(8):
                        pairs[place + e] = d[e]

    return dsa_balance
