"""What the kernels share: helper functions of the device, one way to copy rows, one way to name run-time sizes.

This module and the kernel modules import TileLang; nothing imports them before a kernel is needed. They do without
``from __future__ import annotations``: the annotations of a kernel's arguments are values that TileLang evaluates.

Tensors are handed over as one flat dimension with strides as arguments. Offsets are then 64-bit by construction, a
new length never compiles anew, and a stride in units of 8 elements tells the compiler that 16-byte copies are aligned.
"""

from typing import Any

import tilelang.language as T

COPY16 = "tl::cp_async_gs_conditional<16>"
"""(shared address, global address, condition): 16 bytes copied asynchronously, or 16 zero bytes written."""
COMMIT = "tl::cp_async_commit"
WAIT_ALL = "tl::cp_async_wait<0>"
WAIT_ALL_BUT_ONE = "tl::cp_async_wait<1>"
WAIT_ALL_BUT_TWO = "tl::cp_async_wait<2>"
ADD4 = "dsa_add4"
"""(global address, shared address): four fp32 values added atomically."""
EVERY_LANE = 0xFFFFFFFF
LN_2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
FLOOR = -1.0e30
"""Stands for the maximum of nothing: the difference of two infinities would be NaN."""
SLOTS = 64
"""Slots of a tile, in every kernel that leaves P and dS behind."""

PRELUDE = """#include <tl_templates/cuda/copy.h>
static __device__ __forceinline__ void dsa_add4(float* to, const float* from) {
  const float4 v = *reinterpret_cast<const float4*>(from);
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
#else
  atomicAdd(to, v.x);
  atomicAdd(to + 1, v.y);
  atomicAdd(to + 2, v.z);
  atomicAdd(to + 3, v.w);
#endif
}
"""


def lengths(names: str) -> list[Any]:
    """Run-time lengths of flat tensors, 64 bits wide."""
    return [T.dynamic(name, "int64") for name in names.split()]


def zero64() -> Any:
    return T.cast(0, "int64")


@T.macro
def load_ids(group, n, lane, idx, row, idx_row, end, keys, kv_row8, ids, good, base):
    """Ids of the rows of tile ``n`` that 128 threads copy, eight a row: thread ``lane`` takes rows lane // 8 + 16 u.

    A slot past ``end`` or an id outside the keys is no key: nothing is read through it, and zeros take its place, so
    that 0 * NaN cannot enter through a product.
    """
    for u in T.unroll(group):
        slot = n * SLOTS + u * 16 + lane // 8
        ids[u] = T.if_then_else(slot < end, idx[row * idx_row + slot], -1)
        good[u] = (ids[u] >= 0) and (ids[u] < keys)
        base[u] = T.if_then_else(good[u], T.cast(ids[u], "int64"), zero64()) * kv_row8 * 8


@T.macro
def copy_slots(group, channels, first_channel, lane, kv, base, good, target, b):
    """Start copying ``channels`` channels of the rows of ``load_ids`` into ``target[b]``."""
    for u in T.unroll(group):
        for c in T.unroll(channels // 64):
            T.call_extern(
                "handle",
                COPY16,
                T.address_of(target[b, u * 16 + lane // 8, c * 64 + lane % 8 * 8]),
                T.address_of(kv[base[u] + first_channel + c * 64 + lane % 8 * 8]),
                good[u],
            )
