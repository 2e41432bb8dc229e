"""The slots a row walks: given ones, or in the dense form its whole range of keys, made chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_backends.triton_kernels.launch import last_contiguous
from dsa_dispatch._call import RowLayout


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of all rows of a call; ``chunk`` gives those of some rows as ``(ids [n, W], length [n])``."""

    indices: Tensor | None
    length: Tensor | None
    starts: Tensor
    ends: Tensor
    rows: RowLayout

    @property
    def width(self) -> int:
        return self.rows.keys if self.indices is None else self.indices.shape[1]

    @property
    def dense_keys(self) -> int:
        """Keys whose ids have to be made: none in the sparse form."""
        return self.rows.keys if self.indices is None else 0

    def chunk(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        part = slice(first, last)
        if self.indices is not None:
            assert self.length is not None
            return last_contiguous(self.indices[part]), self.length[part]
        device = self.starts.device
        row = torch.arange(first, last, device=device, dtype=torch.int32) + self.rows.first_row
        item = torch.div(row, self.rows.rows, rounding_mode="floor")
        ids = (
            torch.arange(self.rows.keys, device=device, dtype=torch.int32) + (item * self.rows.keys)[:, None]
        )
        inside = (ids >= self.starts[part, None]) & (ids < self.ends[part, None])
        # Nothing is walked past the range's end.
        length = (self.ends[part] - item * self.rows.keys).clamp(0, self.rows.keys).to(torch.int32)
        return torch.where(inside, ids, -1), length
