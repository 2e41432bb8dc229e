"""What a backend's stage accepts, as frozen data with three small vocabularies: heads, channels, index width."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from dsa_dispatch._call import Bounds, CallSpec, ContextParallel, Layout
from dsa_dispatch._decline import Decline

IndexForm = Literal["any", "holes", "prefix"]
TieRule = Literal["lower_index", "arbitrary"]
CapabilityRange = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts a kernel runs: a set, or multiples within limits, or powers of two within limits.

    ``pad=True`` says that the core may add zero heads to reach the next supported count (and slice them off again).
    """

    values: frozenset[int] | None = None
    multiple_of: int = 1
    power_of_two: bool = False
    minimum: int = 1
    maximum: int | None = None
    pad: bool = False

    def runs(self, count: int) -> bool:
        if self.values is not None:
            return count in self.values
        if count < self.minimum or (self.maximum is not None and count > self.maximum):
            return False
        if self.power_of_two and count & (count - 1):
            return False
        return count % self.multiple_of == 0

    def smallest(self) -> int | None:
        """The smallest count that runs; None where the fields contradict each other."""
        if self.values is not None:
            return min(self.values, default=None)
        if self.power_of_two:
            counts: Iterator[int] = (1 << bits for bits in range(63))
        else:
            first = -(-self.minimum // self.multiple_of) * self.multiple_of
            counts = iter((first,))
        return next((count for count in counts if self.runs(count)), None)

    def fit(self, count: int) -> int | None:
        """The smallest supported count that holds ``count`` heads; None where there is none."""
        if self.runs(count):
            return count
        if not self.pad:
            return None
        if self.values is not None:
            return min((value for value in self.values if value >= count), default=None)
        at_least = max(count, self.minimum)
        if self.power_of_two:
            at_least = 1 << (at_least - 1).bit_length()
        padded = -(-at_least // self.multiple_of) * self.multiple_of
        return padded if self.runs(padded) else None

    def __str__(self) -> str:
        if self.values is not None:
            text = ", ".join(str(value) for value in sorted(self.values))
        else:
            kind = (
                "powers of two"
                if self.power_of_two
                else f"multiples of {self.multiple_of}"
                if self.multiple_of > 1
                else "any count"
            )
            text = kind + (f" from {self.minimum}" if self.minimum > 1 else "")
            text += f" up to {self.maximum}" if self.maximum is not None else ""
        return f"{text}, fewer padded" if self.pad else text


@dataclass(frozen=True, slots=True)
class Channels:
    """Channel widths ``(query and key, value)`` a kernel runs. ``pairs=None`` is any pair up to ``maximum``.

    For the indexer stages only the first number counts. ``pad=True`` says that zero channels may be appended to query
    and key: for absorbed attention the value is a prefix of the key, so only the first number may grow.
    """

    pairs: tuple[tuple[int, int], ...] | None = None
    multiple_of: int = 1
    maximum: int | None = None
    pad: bool = False

    def smallest(self) -> tuple[int, int]:
        """A small pair of widths that runs."""
        if self.pairs is not None:
            qk, v = min(self.pairs)
            return qk, v or qk
        return self.multiple_of, min(16, self.multiple_of)

    def fit(self, qk: int, v: int | None) -> int | None:
        """The smallest supported query/key width that holds ``qk`` beside exactly ``v`` value channels."""
        if self.pairs is None:
            padded = -(-qk // self.multiple_of) * self.multiple_of
            fits = (padded == qk or self.pad) and (self.maximum is None or padded <= self.maximum)
            return padded if fits else None
        widths = [pair[0] for pair in self.pairs if v is None or pair[1] == v]
        if qk in widths:
            return qk
        return min((width for width in widths if width > qk), default=None) if self.pad else None

    def __str__(self) -> str:
        if self.pairs is None:
            text = "any width" if self.multiple_of == 1 else f"multiples of {self.multiple_of}"
            text += f" up to {self.maximum}" if self.maximum is not None else ""
        else:
            text = ", ".join(f"{qk}/{v}" if v else str(qk) for qk, v in self.pairs)
        return f"{text}, narrower padded" if self.pad else text


@dataclass(frozen=True, slots=True)
class IndexWidth:
    """Index widths (top-k) a kernel runs; ``pad=True`` lets the core append -1."""

    multiple_of: int = 1
    maximum: int | None = None
    power_of_two: bool = False
    pad: bool = False

    def smallest(self) -> int | None:
        """The smallest width above 0 that runs; None where the fields contradict each other."""
        width = dataclasses.replace(self, pad=True).fit(1)
        return None if width is None or dataclasses.replace(self, pad=False).fit(width) is None else width

    def fit(self, width: int) -> int | None:
        padded = -(-max(width, 1) // self.multiple_of) * self.multiple_of
        if self.power_of_two:
            padded = max(1 << (max(width, 1) - 1).bit_length(), self.multiple_of)
        if width == 0 and padded != width and not self.pad:
            padded = 0 if self.multiple_of == 1 and not self.power_of_two else padded
        if padded != width and not self.pad:
            return None
        return padded if self.maximum is None or padded <= self.maximum else None

    def __str__(self) -> str:
        text = (
            "powers of two"
            if self.power_of_two
            else "any width"
            if self.multiple_of == 1
            else f"multiples of {self.multiple_of}"
        )
        text += f" up to {self.maximum}" if self.maximum is not None else ""
        return f"{text}, narrower padded" if self.pad else text


@dataclass(frozen=True, slots=True)
class Scratch:
    """Transient memory of a stage, in bytes: what grows with the rows of a chunk, and what does not."""

    per_row: tuple[tuple[str, int], ...] = ()
    fixed: tuple[tuple[str, int], ...] = ()

    @property
    def row_bytes(self) -> int:
        return sum(size for _, size in self.per_row)

    @property
    def fixed_bytes(self) -> int:
        return sum(size for _, size in self.fixed)


def no_scratch(call: CallSpec) -> Scratch:
    return Scratch()


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package a stage needs: the distribution, the top-level module, and a version range such as ``>=1.32,<1.34``."""

    distribution: str
    module: str
    versions: str = ""
    hint: str = ""
    """How to get it, shown when it is missing, in place of ``pip install``."""
    extras: str = ""
    """Of the distribution, as pip takes them between brackets."""
    path_hint: str = ""
    """What to do where the distribution is installed and its module cannot be found."""


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Packages of which one is enough, such as two builds of the same kernels."""

    alternatives: tuple[Requirement, ...]
    hint: str = ""
    """How to get one; without it, that of the first alternative."""


Package = Requirement | AnyOf


FLOATS: frozenset[str] = frozenset({"float64", "float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class Capability:
    """What one stage of one backend accepts. Frozen data: the same object decides, explains, documents and tests.

    ``devices=None`` is any device type; ``compute_capabilities`` are half-open ranges of ``(major, minor)`` and
    apply to CUDA devices only. ``index_form`` says which ids the kernel bears: "any" (ids outside the keys and holes
    anywhere), "holes" (-1 anywhere, nothing else outside), "prefix" (valid ids first).
    ``score_error`` bounds |score - exact score| relative to the sum of absolute products.
    """

    devices: frozenset[str] | None = None
    compute_capabilities: tuple[CapabilityRange, ...] | None = None
    dtypes: frozenset[str] = FLOATS
    weights_dtypes: frozenset[str] = FLOATS
    heads: Heads = Heads()
    kv_heads: Heads = Heads()
    channels: Channels = Channels()
    width: IndexWidth = IndexWidth()
    layouts: frozenset[Layout] = frozenset({"bshd"})
    bounds: frozenset[Bounds] = frozenset({"causal", "ranges"})
    context_parallel: frozenset[ContextParallel] = frozenset({"none"})
    relu: frozenset[bool] = frozenset({True, False})
    losses: frozenset[str] = frozenset({"sparse", "dense"})
    index_form: IndexForm = "any"
    partial_gradients: bool = True
    """False: the backward cannot leave out a gradient that is not needed (it is computed and dropped)."""
    deterministic: bool = False
    tie_rule: TieRule = "arbitrary"
    sorted: bool = False
    """Ids come in the contract's order of preference, ties included; only then may the core pad ``index_topk``."""
    capture_safe: bool = False
    """No host synchronisation, so a CUDA graph may capture it after a warm-up."""
    shared_memory: int = 0
    max_rows: int | None = None
    max_keys: int | None = None
    max_elements: int | None = None
    score_error: float = 0.0
    gradient_error: float = 0.0
    """What a gradient in bfloat16 may be off, relative to fp64, where that is more than the contract allows; in another
    type as much less as its rounding is. 0 is the contract."""
    packages: tuple[Package, ...] = ()
    verified: str = "declared"
    extra_check: Callable[[CallSpec], Decline | None] | None = None
    """A pure rule that the fields above cannot say. Its presence makes the plan cache key on exact sizes."""
    scratch: Callable[[CallSpec], Scratch] = field(default=no_scratch)
