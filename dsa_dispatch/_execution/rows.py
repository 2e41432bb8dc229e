"""From the caller's sbhd tensors to the flattened, batch-major rows of a stage, one chunk at a time.

Row ``t = n * sq + i`` is query ``i`` of batch item ``n``; key ``n * sk + j`` likewise. With one batch item everything
here is a view; with more, keys are copied once and the rows of a chunk that spans items are copied for that chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_dispatch._execution.copies import copy


@dataclass(frozen=True, slots=True)
class Chunk:
    """Flattened rows ``[start, stop)``."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def chunks(total: int, size: int) -> Iterator[Chunk]:
    """Chunks of at most ``size`` rows; the last may be shorter."""
    for start in range(0, total, size):
        yield Chunk(start, min(start + size, total))


def flatten_keys(key: Tensor) -> Tensor:
    """``[sk, b, ...] -> [b * sk, ...]``, each row contiguous; a view when the batch is one."""
    flat = key[:, 0] if key.shape[1] == 1 else key.transpose(0, 1).reshape(-1, *key.shape[2:])
    return _contiguous_rows(flat)


def take_rows(tensor: Tensor, chunk: Chunk) -> Tensor:
    """Rows of a chunk of ``[sq, b, ...]``, each row contiguous; a view where the chunk stays in one batch item."""
    rows = tensor.shape[0]
    pieces = []
    for item in range(chunk.start // rows, (chunk.stop - 1) // rows + 1):
        first = item * rows
        pieces.append(tensor[max(chunk.start - first, 0) : min(chunk.stop - first, rows), item])
    return _contiguous_rows(pieces[0] if len(pieces) == 1 else torch.cat(pieces))


def copied_row_bytes(tensor: Tensor) -> int:
    """Bytes that ``take_rows`` may copy for a row of ``[sq, b, ...]``; 0 where every chunk is a view."""
    if tensor.numel() == 0 or (tensor.shape[1] == 1 and tensor[0, 0].is_contiguous()):
        return 0
    return tensor[0, 0].numel() * tensor.element_size()


def copied_key_bytes(key: Tensor) -> int:
    """Bytes that ``flatten_keys`` copies of ``[sk, b, ...]``."""
    return copied_row_bytes(key) * key.shape[0] * key.shape[1]


def put_rows(tensor: Tensor, chunk: Chunk, values: Tensor) -> None:
    """Write a chunk's rows into ``[sq, b, ...]``."""
    rows = tensor.shape[0]
    for item in range(chunk.start // rows, (chunk.stop - 1) // rows + 1):
        first = item * rows
        low, high = max(chunk.start - first, 0), min(chunk.stop - first, rows)
        copy(tensor[low:high, item], values[first + low - chunk.start : first + high - chunk.start])


def item_offsets(chunk: Chunk, rows: int, keys: int, device: torch.device) -> Tensor:
    """Global id of key 0 of each row's batch item, ``[rows of the chunk]`` int64."""
    return torch.arange(chunk.start, chunk.stop, device=device) // rows * keys


def global_ids(indices: Tensor, chunk: Chunk, keys: int, sanitize: bool) -> Tensor:
    """A chunk of ``[b, sq, W]`` local ids as contiguous int32 global ids.

    Judged in the caller's own integer type: an id outside its batch item becomes -1 before the offset is added, or it
    would name a key of the next item, and before the cast, or 2**32 + 3 would name key 3. A single int32 batch item
    needs neither, and is passed on as it is unless ``sanitize`` asks.
    """
    batch, rows, _ = indices.shape
    ids = take_rows(indices.transpose(0, 1), chunk)
    if batch == 1 and ids.dtype == torch.int32 and not sanitize:
        return ids.contiguous()
    valid = (ids >= 0) & (ids < keys)
    if batch > 1:
        ids = ids + item_offsets(chunk, rows, keys, ids.device)[:, None]
    return ids.masked_fill(~valid, -1).to(torch.int32)


def row_lengths(length: Tensor | None, chunk: Chunk, width: int, device: torch.device) -> Tensor:
    """A chunk of ``[b, sq]`` prefix lengths, clamped to ``[0, width]``, int32; ``width`` everywhere when None."""
    if length is None:
        return torch.full((chunk.rows,), width, dtype=torch.int32, device=device)
    return take_rows(length.transpose(0, 1), chunk).clamp(0, width).to(torch.int32)


def global_bounds(
    starts: Tensor | None, ends: Tensor | None, rows: int, batch: int, keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """``starts`` and ``ends`` of all flattened rows as global ids, ``[b * sq]`` int32, clamped, ``starts <= ends``.

    None and None is causal, aligned to the bottom right: row ``i`` sees keys ``0 .. keys - rows + i``.
    """
    if starts is None or ends is None:
        end = torch.arange(keys - rows + 1, keys + 1, device=device).clamp(0, keys).expand(batch, rows)
        start = torch.zeros_like(end)
    else:
        start = starts.to(torch.int64).clamp(0, keys).expand(batch, rows)
        end = torch.maximum(ends.to(torch.int64).clamp(0, keys), start)
    offset = torch.arange(batch, device=device)[:, None] * keys
    return (
        (start + offset).reshape(-1).to(torch.int32),
        (end + offset).reshape(-1).to(torch.int32),
    )


def _contiguous_rows(tensor: Tensor) -> Tensor:
    if tensor.shape[0] == 0 or tensor[0].is_contiguous():
        return tensor
    return tensor.contiguous()
