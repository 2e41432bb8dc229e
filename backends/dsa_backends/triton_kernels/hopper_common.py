"""Attention for compute capability 9.0, with the copies placed by hand.

Same mathematics as ``forward_kernels`` and ``backward_kernels``. What differs is when things happen: the pipeliner
issues the copies of the next key tile at the end of a step and waits for them at the top of the next one, so that
with the two buffers shared memory has room for, the gather overlaps with nothing. Here a buffer is refilled as soon
as the products that read it are done, and the copies run under the rest of the step.

16-bit inputs, 512 value channels, a tail of none or a power of two from 16 up. A tile is 64 keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

start_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""The same operations under their names in Triton 3.9 and 3.6."""

KEYS = gl.constexpr(64)
"""Keys of a tile."""


@gluon.jit
def slot_ids(idx, start, end, layout: gl.constexpr):
    """Ids of the 64 slots from ``start``, -1 at and past ``end``."""
    slots = start + gl.arange(0, KEYS, layout=layout)
    return gl.load(idx + slots, mask=slots < end, other=-1)


@gluon.jit
def is_key(ids, keys):
    return (ids >= 0) & (ids < keys)


@gluon.jit
def gather(buffer, kv, ids, keys, kv_row8, first_channel, CHANNELS: gl.constexpr, layout: gl.constexpr):
    """Start copying ``CHANNELS`` channels of 64 rows into ``buffer``; 16 bytes per thread and copy.

    A slot without a key reads nothing and is filled with zeros, so that 0 * NaN cannot enter through a product.
    """
    channels = first_channel + gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, layout))
    ok = is_key(ids, keys)
    rows = kv + gl.where(ok, ids, 0).to(gl.int64)[:, None] * (kv_row8 * 8)
    start_copy(buffer, rows + channels[None, :], mask=ok[:, None])
