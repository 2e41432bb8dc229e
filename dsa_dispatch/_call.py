"""What is asked for, as frozen data: the call, the layout of its rows, and the device it runs on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Bounds = Literal["causal", "ranges"]
Layout = Literal["bshd", "thd"]
ContextParallel = Literal["none", "contiguous", "zigzag"]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the rows handed to a stage stand. Host data: reading it never touches the device.

    Rows are flattened batch-major: row ``t = n * rows + i`` belongs to batch item ``n``; key ``n * keys + j`` likewise.
    A stage may be called with a slice of the rows: ``first_row`` is the flattened id of its row 0.
    ``bounds == "causal"`` promises that row ``i`` of an item sees exactly its keys ``0 .. keys - rows + i``
    (possibly none); ``starts`` and ``ends`` are given in both cases and say the same.
    """

    batch: int
    rows: int
    keys: int
    bounds: Bounds = "causal"
    first_row: int = 0
    layout: Layout = "bshd"
    context_parallel: ContextParallel = "none"
    cp_size: int = 1
    cp_rank: int = 0
    cu_seqlens: tuple[int, ...] | None = None

    def at(self, first_row: int) -> RowLayout:
        """The same layout for a slice of rows that begins at flattened row ``first_row``."""
        return dataclasses.replace(self, first_row=first_row)


@dataclass(frozen=True, slots=True)
class StageOptions:
    """What every stage is told beside its tensors."""

    deterministic: bool = False
    memory_budget: int = 1 << 30
    """Bytes of scratch that may grow with the rows of this call."""


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One call, without its tensors. A field that the operation does not have keeps its default.

    Sizes are counted in elements; ``rows`` and ``keys`` are per batch item. ``heads``, ``qk_channels`` and
    ``v_channels`` describe the attention (or its teacher in the loss), ``index_heads`` and ``index_channels`` the
    indexer.
    """

    operation: str
    device: str = "cpu"
    """Type of the device, without an index."""
    dtype: str = "bfloat16"
    """As torch names it."""
    batch: int = 1
    rows: int = 1
    keys: int = 1
    width: int = 1
    """Index width: ``index_topk`` of a selection, the last dimension of ``topk_indices`` of an attention."""
    heads: int = 1
    kv_heads: int = 1
    qk_channels: int = 576
    v_channels: int = 512
    index_heads: int = 1
    index_channels: int = 128
    weights_dtype: str = "float32"
    index_dtype: str = "int32"
    teacher_dtype: str = ""
    """Of the loss's query and key, where it differs from ``dtype``."""
    use_relu: bool = True
    sparse_loss: bool = True
    bounds: Bounds = "causal"
    layout: Layout = "bshd"
    context_parallel: ContextParallel = "none"
    extras: frozenset[str] = frozenset()
    """Legal requests that no stage signature carries, so that every backend declines them: "explicit_values",
    "key_positions", "mask", "per_head_keys"."""
    needs_grad: frozenset[str] = frozenset()
    """Inputs that need a gradient, by name: "q", "k", "weights", "query", "key", "value", "up_v_weight"."""
    deterministic: bool = False
    capturing: bool = False
    """A CUDA graph is being captured."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device of a call, as far as capabilities ask about it."""

    type: str = "cpu"
    name: str = "cpu"
    compute_capability: tuple[int, int] | None = None
    total_memory: int = 0
    shared_memory: int = 0
    """Bytes of shared memory that one block may opt in to; 0 where the device has none."""
