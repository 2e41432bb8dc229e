"""Transient memory: the object that names a buffer also allocates it, so a plan cannot drift from a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dsa_dispatch._capability import Scratch

BLOCK_BYTES: Final = 8 << 20
"""A block of rows on a CPU: about what stays in cache between its passes, 2 to 4 × faster than all rows."""
BLOCK_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class Buffer:
    """One transient tensor: its name, the elements it holds (per row or in all), and their type."""

    name: str
    elements: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """All transients of one stage.

    ``rows`` hold so much per row, ``fixed`` so much in all; ``loose`` is per row and allocated inside torch.
    ``block`` is the most rows worked on at once, None for all rows of the call. The scratch of a call is
    stated per row all the same: a call of fewer rows than a block needs just that, a call of more never more
    than a block.
    """

    rows: tuple[Buffer, ...]
    fixed: tuple[Buffer, ...] = ()
    loose: tuple[Buffer, ...] = ()
    block: int | None = None

    @property
    def row_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self.rows, *self.loose))

    def scratch(self) -> Scratch:
        return Scratch(
            per_row=tuple((buffer.name, buffer.nbytes) for buffer in (*self.rows, *self.loose)),
            fixed=tuple((buffer.name, buffer.nbytes) for buffer in self.fixed),
        )

    def allocate(self, rows: int, device: torch.device) -> Workspace:
        at_once = rows if self.block is None else min(rows, self.block)
        flat = {
            buffer.name: torch.empty(buffer.elements * at_once, dtype=buffer.dtype, device=device)
            for buffer in self.rows
        }
        flat.update(
            (buffer.name, torch.empty(buffer.elements, dtype=buffer.dtype, device=device))
            for buffer in self.fixed
        )
        return Workspace(flat, at_once)


@dataclass(frozen=True, slots=True)
class Workspace:
    """The buffers of one stage call. ``rows`` is how many rows fit at once."""

    flat: dict[str, Tensor]
    rows: int

    def take(self, name: str, *shape: int) -> Tensor:
        """The first elements of a buffer in this shape, contiguous and aligned, with whatever was there."""
        return self.flat[name][: math.prod(shape)].view(shape)


def in_blocks(plan: BufferPlan, device_type: str, deterministic: bool) -> BufferPlan:
    """The plan with its block chosen: from the widths and the device alone, never from the number of rows.

    Deterministic runs take one row at a time: the bits of a batched product may depend on the rows beside it.
    """
    if deterministic:
        block: int | None = 1
    elif device_type == "cpu":
        block = max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(plan.row_bytes, 1)))
    else:
        block = None
    return BufferPlan(plan.rows, plan.fixed, plan.loose, block)
