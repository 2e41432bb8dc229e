"""Memory with marked surroundings, so that a read or write outside a tensor shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GUARD_ROWS: Final = 8
MARK: Final = 0xA5

_FACTORIES: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *(
            "zeros",
            "zeros_like",
            "new_zeros",
            "ones",
            "ones_like",
            "new_ones",
            "full",
            "full_like",
            "new_full",
        ),
    )
)


@dataclass(frozen=True, slots=True)
class Guarded:
    """A tensor in the middle of a larger allocation whose margins hold ``MARK`` in every byte."""

    tensor: Tensor
    raw: Tensor
    before: int

    def damage(self) -> str:
        """Where the margins were written to; "" when they were not."""
        size = self.tensor.numel() * self.tensor.element_size()
        low = self.raw[: self.before] != MARK
        high = self.raw[self.before + size :] != MARK
        parts = []
        if bool(low.any()):
            parts.append(f"{self.before - int(low.nonzero()[0])} bytes before its start")
        if bool(high.any()):
            parts.append(f"up to {int(high.nonzero()[-1]) + 1} bytes past its end")
        shape = list(self.tensor.shape)
        return f"a {self.tensor.dtype} tensor {shape} was written {' and '.join(parts)}" if parts else ""


def guard(values: Tensor) -> Guarded:
    """A contiguous copy of ``values`` between two margins of at least two of its rows."""
    size = values.numel() * values.element_size()
    row = size // max(values.shape[0], 1) if values.dim() else size
    margin = -(-max(2 * row, 4096) // 4096) * 4096
    raw = torch.full((margin + size + margin,), MARK, dtype=torch.uint8, device=values.device)
    middle = raw[margin : margin + size].view(values.dtype).view(values.shape)
    middle.copy_(values)
    return Guarded(middle, raw, margin)


def between_nan(values: Tensor) -> Tensor:
    """``values`` as a view between ``GUARD_ROWS`` rows of NaN on either side."""
    shape = (values.shape[0] + 2 * GUARD_ROWS, *values.shape[1:])
    buffer = torch.full(shape, torch.nan, dtype=values.dtype, device=values.device)
    middle = buffer[GUARD_ROWS : GUARD_ROWS + values.shape[0]]
    middle.copy_(values)
    return middle


class GuardedAllocations(TorchDispatchMode):  # torch has no types here
    """While active, tensors made with ``torch.empty`` and its kin lie between margins; floats without a value are NaN.

    A kernel's outputs are allocated by the backend itself; this is how writes past them are seen without an address
    sanitizer, on every device.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import the compiler, which takes six seconds, to guard against what nobody compiles here.
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Guarded] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name not in _FACTORIES or not isinstance(made, Tensor) or not made.numel():
            return made
        if not made.is_contiguous():
            return made
        if "empty" in name and made.is_floating_point():
            made.fill_(torch.nan)
        guarded = guard(made)
        self.made.append(guarded)
        return guarded.tensor

    def damage(self) -> list[str]:
        return [text for text in (guarded.damage() for guarded in self.made) if text]
