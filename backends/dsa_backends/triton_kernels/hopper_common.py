"""Attention for compute capability 9.0, with warps that only gather.

Same mathematics as ``forward_kernels`` and ``backward_kernels``. What differs is when things happen. There, the
pipeliner issues the copies of the next key tile at the end of a step and waits for them at the top of the next one,
so that with the two buffers shared memory has room for, the gather overlaps with nothing. Here a warp group of its own
(the producer) refills a buffer as soon as the products that read it are done (the consumers); each side waits for the
other at a pair of memory barriers per buffer.

16-bit inputs, 512 value channels, a tail of none or a power of two from 16 up. A tile is 64 keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

start_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""The same operations under their names in Triton 3.9 and 3.6."""

KEYS = gl.constexpr(64)
"""Keys of a tile."""

PRODUCER_WARPS = gl.constexpr(4)
PRODUCER_REGISTERS = gl.constexpr(40)
"""What the producer needs without spilling; the consumers get the rest."""


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


@gluon.jit
def load_heads(
    rows,
    row8,
    first_head,
    heads,
    first_channel,
    CHANNELS: gl.constexpr,
    BLOCK_H: gl.constexpr,
    WARPS: gl.constexpr,
):
    """``[BLOCK_H, CHANNELS]`` of a row's heads in a new shared buffer.

    A block may reach past the last head: nothing there is read, and zeros stand for it.
    """
    lanes: gl.constexpr = CHANNELS // 8 if CHANNELS < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [WARPS, 1], [1, 0])
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, layout))
    channel = first_channel + gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, layout))
    place = rows + head.to(gl.int64)[:, None] * (row8 * 8) + channel[None, :]
    buffer = gl.allocate_shared_memory(rows.dtype.element_ty, [BLOCK_H, CHANNELS], swizzled(CHANNELS))
    buffer.store(gl.load(place, mask=(head < heads)[:, None], other=0.0))
    return buffer


@gluon.constexpr_function
def swizzled(channels):
    """The layout that warp group products read without bank conflicts."""
    return gl.NVMMASharedLayout(min(128, channels * 2), 16)


@gluon.jit
def key_buffers(dtype: gl.constexpr, COUNT: gl.constexpr, CHANNELS: gl.constexpr):
    """``COUNT`` tiles of ``[64, CHANNELS]``; where there is no channel, a tile of 16 that nobody reads."""
    width: gl.constexpr = CHANNELS if CHANNELS > 0 else 16
    return gl.allocate_shared_memory(dtype, [COUNT, KEYS, width], swizzled(width))


@gluon.jit
def flags(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """``COUNT`` memory barriers that each complete a phase with ``ARRIVALS`` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(COUNT):
        mbarrier.init(barriers.index(at), count=ARRIVALS)
    return barriers


@gluon.jit
def advance(at, phase, COUNT: gl.constexpr):
    """The next buffer of a ring, and the parity of its phase."""
    at += 1
    if at == COUNT:
        at = 0
        phase = 1 - phase
    return at, phase


@gluon.jit
def produce_keys(kv, kv_row8, slots, ring, MAIN: gl.constexpr, TAIL: gl.constexpr, BUFFERS: gl.constexpr):
    """The producer: whole key rows, tile by tile around the ring of buffers.

    ``slots`` is ``(idx, begin, end, keys)``, ``ring`` is ``(k_main, k_tail, full, empty)``. Eight lanes copy a row, 128
    bytes at a time, so that a thread holds four ids and no more. ``full`` counts an arrival of each thread, when its
    own copies have landed.
    """
    main_copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [PRODUCER_WARPS, 1], [1, 0])
    lanes: gl.constexpr = TAIL // 8 if TAIL else 8
    tail_copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [PRODUCER_WARPS, 1], [1, 0])
    idx, begin, end, keys = slots
    k_main, k_tail, full, empty = ring
    ids = slot_ids(idx, begin, end, gl.SliceLayout(1, main_copy))
    at = begin * 0
    phase = at + 1
    for start in range(begin, end, KEYS):
        following = slot_ids(idx, start + KEYS, end, gl.SliceLayout(1, main_copy))
        mbarrier.wait(empty.index(at), phase)
        gather(k_main.index(at), kv, ids, keys, kv_row8, 0, MAIN, main_copy)
        if TAIL > 0:
            ids_t = gl.convert_layout(ids, gl.SliceLayout(1, tail_copy))
            gather(k_tail.index(at), kv, ids_t, keys, kv_row8, MAIN, TAIL, tail_copy)
        async_copy.mbarrier_arrive(full.index(at), increment_count=False)
        ids = following
        at, phase = advance(at, phase, BUFFERS)
