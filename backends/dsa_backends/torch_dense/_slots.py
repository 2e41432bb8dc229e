"""Reading keys through index slots: which slots hold a key, and a gather that cannot touch any other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsa_backends.torch_dense._buffers import Buffer, Workspace


def slot_buffers(width: int) -> tuple[Buffer, ...]:
    """Per row: what ``mark_slots`` needs."""
    return (
        Buffer("slot is no key", width, torch.bool),
        Buffer("slot test", width, torch.bool),
        Buffer("safe ids", width, torch.int32),
    )


def slot_numbers(width: int) -> Buffer:
    """Fixed: the numbers of the slots, to compare with a row's length."""
    return Buffer("slot numbers", width, torch.int32)


def blocks(rows: int, at_once: int) -> Iterator[slice]:
    for first in range(0, rows, at_once):
        yield slice(first, min(first + at_once, rows))


def used_width(length: Tensor, width: int) -> int:
    """How many leading slots any of these rows may use; the full width where asking would stop the device."""
    if length.device.type != "cpu":
        return width
    return min(width, max(int(length.max()), 0))


def mark_slots(workspace: Workspace, indices: Tensor, length: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """``(absent [n, W] bool, safe [n * W] int32)``: slots that hold no key, and ids with 0 in their place."""
    rows, width = indices.shape
    absent = workspace.take("slot is no key", rows, width)
    test = workspace.take("slot test", rows, width)
    slots = workspace.take("slot numbers", width)
    torch.arange(width, out=slots)
    torch.ge(slots, length.unsqueeze(1), out=absent)
    torch.lt(indices, 0, out=test)
    absent.logical_or_(test)
    torch.ge(indices, keys, out=test)
    absent.logical_or_(test)
    safe = workspace.take("safe ids", rows, width)
    safe.copy_(indices).masked_fill_(absent, 0)
    return absent, safe.view(-1)


def key_buffers(
    name: str, width: int, channels: int, dtype: torch.dtype, acc: torch.dtype
) -> tuple[Buffer, ...]:
    """Per row: what ``gather`` needs under this name."""
    gathered = Buffer(name, width * channels, acc)
    return (gathered,) if dtype == acc else (Buffer(f"{name} as stored", width * channels, dtype), gathered)


def gather(workspace: Workspace, name: str, source: Tensor, absent: Tensor, safe: Tensor) -> Tensor:
    """``source[safe]`` as ``[n, W, D]`` in the accumulation type, zero where there is no key.

    Zeroed, not only masked later: 0 * NaN from memory that no slot names would spoil the row.
    """
    channels = source.shape[1]
    out = workspace.take(name, safe.numel(), channels)
    if source.dtype == out.dtype:
        torch.index_select(source, 0, safe, out=out)
    else:
        stored = workspace.take(f"{name} as stored", safe.numel(), channels)
        torch.index_select(source, 0, safe, out=stored)
        out.copy_(stored)
    keys = out.view(*absent.shape, channels)
    clear_absent(keys, absent)
    return keys


def clear_absent(keys: Tensor, absent: Tensor) -> None:
    if absent.device.type != "cpu" or bool(absent.any()):
        keys.masked_fill_(absent.unsqueeze(-1), 0)


def scatter_buffers(width: int, device_type: str, deterministic: bool) -> tuple[Buffer, ...]:
    """What torch allocates inside ``scatter_add``: the sort-based form keeps sorted and original places."""
    if device_type == "cpu" or not deterministic:
        return ()
    return (Buffer("sorted ids", 4 * width, torch.int64),)


def scatter_add(into: Tensor, safe: Tensor, parts: Tensor, absent: Tensor, deterministic: bool) -> None:
    """Add ``parts [n, W, D]`` into the rows of ``into`` that the ids name; a key named twice gets both.

    Parts of absent slots are cleared first: they may be 0 * inf. ``index_add_`` was the fastest form on a CPU
    (7 ms for 64 × 512 × 576; ``index_put_`` 12 to 32) and sums in slot order there; on other devices its
    order is not fixed.
    """
    clear_absent(parts, absent)
    flat = parts.view(-1, parts.shape[-1])
    if deterministic and into.device.type != "cpu":
        into.index_put_((safe.long(),), flat, accumulate=True)
    else:
        into.index_add_(0, safe, flat)
