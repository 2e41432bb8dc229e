"""``offload_topk()``: index tensors that a graph saves wait in host memory, one copy per storage."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dsa_dispatch._policy.values import parse_bytes
from dsa_dispatch.errors import ConfigError

_INDEX_TYPES: Final = (torch.int32, torch.int64)


class _HostCopy:
    """The bytes of one storage in host memory, and while it is being read back, on the device again."""

    __slots__ = ("__weakref__", "_base", "_copied", "_device", "_host", "_unread", "readers")

    def __init__(self, whole: Tensor) -> None:
        self._device = whole.device
        self._host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda)
        # On the current stream: memory freed after this is reused in its order, so nothing has to wait on the host.
        self._host.copy_(whole, non_blocking=True)
        self._copied = torch.cuda.current_stream(whole.device).record_event() if whole.is_cuda else None
        self._base: Tensor | None = None
        self.readers = 0
        self._unread = 0

    def bytes(self) -> Tensor:
        """The storage on its device, brought back once for all that saved a view of it."""
        base = self._base
        if base is None:
            if self._copied is not None:
                torch.cuda.current_stream(self._device).wait_event(self._copied)
            base = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
            base.copy_(self._host, non_blocking=True)
            self._unread = self.readers
        self._unread -= 1
        # After the last reader only its own tensor holds the memory; a second backward brings it back again.
        self._base = base if self._unread > 0 else None
        return base


@dataclass(frozen=True, slots=True)
class _Packed:
    copy: _HostCopy
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class OffloadWindow:
    """What ``offload_topk()`` yields: how many storages, and bytes of them, it has moved.

    A window inside another one finds the copies that the outer one made, and the other way round; a copy counts for the
    window that made it.
    """

    def __init__(self, min_bytes: int, outer: OffloadWindow | None = None) -> None:
        self.storages = 0
        self.bytes = 0
        self._min_bytes = min_bytes
        # Weak, so that a copy lives as long as the graphs that need it. A storage is known by a weak reference and
        # not by its address, which the next tensor may get as soon as this one is freed.
        self._copies: weakref.WeakValueDictionary[Any, _HostCopy] = (
            weakref.WeakValueDictionary() if outer is None else outer._copies
        )

    def pack(self, tensor: Tensor) -> object:
        """The tensor as it is, or what stands for it while its storage is in host memory."""
        # Subclasses (fake tensors of a trace, DTensor) have storages that mean something else.
        if type(tensor) is not Tensor or tensor.dtype not in _INDEX_TYPES:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._min_bytes:
            return tensor
        key = (StorageWeakRef(storage), tensor._version)
        copy = self._copies.get(key)
        if copy is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copy = self._copies[key] = _HostCopy(whole)
            self.storages += 1
            self.bytes += storage.nbytes()
        copy.readers += 1
        return _Packed(copy, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def unpack(packed: Any) -> Tensor:
    """What ``OffloadWindow.pack`` was given."""
    if not isinstance(packed, _Packed):
        tensor: Tensor = packed
        return tensor
    storage = packed.copy.bytes().untyped_storage()
    empty = torch.empty(0, dtype=packed.dtype, device=storage.device)
    return empty.set_(storage, packed.offset, packed.shape, packed.stride)


WINDOW: Final[ContextVar[OffloadWindow | None]] = ContextVar("dsa_dispatch_offload", default=None)
"""The innermost active window of this thread or task: selective checkpointing keeps its tensors where no saved-tensor
hook sees them, so ``save_topk_policy`` asks here."""


@contextmanager
def offload_topk(min_bytes: int | str = "1MiB") -> Iterator[OffloadWindow]:
    """Keep the index tensors that autograd saves inside the block in host memory (pinned, for a GPU) until backward.

    An index tensor is an int32 or int64 tensor whose storage has at least ``min_bytes`` (a number or text such as
    ``"4MiB"``). The decision and the copy are per storage: layers that share indices, and views of them, make one copy
    out and one back. Inside a window ``save_topk_policy()`` offloads what it saves, too. The copies run on the current
    stream. On a CPU the same happens and saves nothing.

    One window may span a whole forward; put it around a compiled call, not inside one. Yields an ``OffloadWindow``
    with the counts ``storages`` and ``bytes``. Raises ``ConfigError`` for a size that cannot be meant.
    """
    if torch.compiler.is_compiling():
        raise ConfigError(
            "offload_topk inside a compiled function: the hooks would be fixed at compile time; put it around the "
            "compiled call"
        )
    window = OffloadWindow(parse_bytes(min_bytes, "offload_topk(min_bytes)"), WINDOW.get())
    token = WINDOW.set(window)
    try:
        with torch.autograd.graph.saved_tensors_hooks(window.pack, unpack):
            yield window
    finally:
        WINDOW.reset(token)
