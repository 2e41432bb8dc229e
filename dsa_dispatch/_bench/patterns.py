"""Which keys the rows choose: at random, as a trained indexer does, or as a file says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from dsa_dispatch._bench.case import Case
from dsa_dispatch.errors import ConfigError

SHARED: Final = 0.83
"""Part of its keys that a row shares with the next one under "local"."""
_ELEMENTS_AT_ONCE: Final = 1 << 26


def indices_of(case: Case, device: torch.device) -> Tensor:
    """``[rows, topk]`` int32, distinct in a row. Raises ``ConfigError`` where the pattern does not fit the case."""
    make = _MAKERS.get(case.pattern)
    if make is None:
        return from_file(case).to(device)
    if case.topk > case.keys:
        raise ConfigError(
            f"pattern {case.pattern!r}: {case.topk} distinct keys of {case.keys} cannot be chosen; "
            f"ask for a smaller --topk or more --keys"
        )
    generator = torch.Generator(device).manual_seed(1)
    chunk = max(1, _ELEMENTS_AT_ONCE // case.keys)
    parts = [
        make(case, torch.arange(first, min(first + chunk, case.rows), device=device), generator)
        for first in range(0, case.rows, chunk)
    ]
    return torch.cat(parts).to(torch.int32).contiguous()


def _random(case: Case, rows: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.rand(len(rows), case.keys, generator=generator, device=rows.device)
    return noise.topk(case.topk, dim=1, sorted=False).indices


def _local(case: Case, rows: Tensor, generator: torch.Generator) -> Tensor:
    """A window of a quarter of the keys before the row (512 of 2048), a thirty-second of sinks at the start (64), and
    a global set that slides along one order of all keys so fast that neighbours share ``SHARED`` of their keys."""
    window, sinks = case.topk // 4, case.topk // 32
    free = case.topk - window - sinks
    # One key of the window changes too; of those that slide in, some stand in the window or the sinks already.
    changed = round(max(0.0, (1 - SHARED) * case.topk - 1) / (1 - (window + sinks) / case.keys))
    position = (rows + case.keys - case.rows).clamp(sinks + window - 1, case.keys - 1)
    first = position - window + 1
    near = first[:, None] + torch.arange(window, device=rows.device)
    # The same order for every chunk of rows, whatever was drawn before.
    order = torch.randperm(case.keys, generator=torch.Generator().manual_seed(2)).to(rows.device)
    reach = torch.arange(min(case.topk, case.keys), device=rows.device)
    far = order[(rows[:, None] * changed + reach) % case.keys]
    taken = (far < sinks) | ((far >= first[:, None]) & (far <= position[:, None]))
    kept = torch.sort(taken.to(torch.uint8), dim=1, stable=True).indices[:, :free]
    start = torch.arange(sinks, device=rows.device).expand(len(rows), sinks)
    return torch.cat([start, far.gather(1, kept), near], dim=1)


_MAKERS: Final[dict[str, Callable[[Case, Tensor, torch.Generator], Tensor]]] = {
    "random": _random,
    "local": _local,
}


def from_file(case: Case) -> Tensor:
    """Ids ``[rows, topk]`` or ``[1, rows, topk]`` of any integer type from a ``.pt`` or ``.npy`` file."""
    path = Path(case.pattern)
    if path.suffix not in (".pt", ".npy"):
        raise ConfigError(
            f"--pattern: got {case.pattern!r}, supports {', '.join(_MAKERS)}, or a .pt or .npy file of ids"
        )
    found = _load(path)
    ids = found[0] if found.dim() == 3 and found.shape[0] == 1 else found
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ConfigError(
            f"{path}: got {ids.dtype} of shape {tuple(found.shape)}, expected integers [rows, topk] or [1, rows, topk]"
        )
    if ids.shape != (case.rows, case.topk):
        raise ConfigError(
            f"{path}: holds ids for {ids.shape[0]} rows of {ids.shape[1]}, the case has {case.rows} of {case.topk}; "
            f"give --rows {ids.shape[0]} --topk {ids.shape[1]}"
        )
    return ids.to(torch.int32).contiguous()


def _load(path: Path) -> Tensor:
    if path.suffix == ".npy":
        import numpy

        try:
            return torch.from_numpy(numpy.load(path, allow_pickle=False))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}: not an array of numbers that torch has ({error})") from error
    loaded = torch.load(path, weights_only=True)
    if not isinstance(loaded, Tensor):
        raise ConfigError(f"{path}: holds a {type(loaded).__name__}, expected one tensor")
    return loaded
