"""What a stage must hand back: looked at after every call, since a wrong dtype or an aliased input would surface
far away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._stages import Stage
from dsa_dispatch.errors import PluginError


@dataclass(frozen=True, slots=True)
class Expected:
    """One result, by name; ``shape=None`` is a result that was not asked for and may be None."""

    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype = torch.float32


Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]


def check_results(backend: str, stage: Stage, result: Any, args: Arguments, kwargs: Keywords) -> None:
    """Raise ``PluginError`` where a result has another shape or dtype than the contract asks, or is one of the
    inputs."""
    expected = _EXPECTED[stage](args, kwargs)
    results = (result,) if stage in _SINGLE else result
    where = f"backend {backend}, stage {stage}"
    if not isinstance(results, Sequence) or len(results) != len(expected):
        wanted = ", ".join(entry.name for entry in expected)
        raise PluginError(f"{where}: returned {_described(result)}, the contract asks for ({wanted})")
    inputs = {
        argument.untyped_storage().data_ptr()
        for argument in (*args, *kwargs.values())
        if isinstance(argument, Tensor) and argument.numel()
    }
    for entry, got in zip(expected, results, strict=True):
        if entry.shape is None:
            continue
        if not isinstance(got, Tensor) or tuple(got.shape) != entry.shape or got.dtype != entry.dtype:
            raise PluginError(
                f"{where}: {entry.name} is {_described(got)}, the contract asks for {list(entry.shape)} {entry.dtype}"
            )
        if got.untyped_storage().data_ptr() in inputs:
            raise PluginError(
                f"{where}: {entry.name} shares memory with an input; return a tensor of its own"
            )


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}"
    if isinstance(value, tuple):
        return f"({', '.join(_described(entry) for entry in value)})"
    return "None" if value is None else type(value).__name__


def _forward(query: Tensor, v_channels: int) -> tuple[Expected, ...]:
    rows, heads = query.shape[:2]
    return (
        Expected("out", (rows, heads, v_channels), query.dtype),
        Expected("lse", (rows, heads), accumulation_dtype(query.dtype)),
    )


def _backward(args: Arguments, kwargs: Keywords) -> tuple[Expected, ...]:
    query = args[0]
    return (Expected("dq", tuple(query.shape) if kwargs["need_dq"] else None, query.dtype),)


def _selection(args: Arguments, kwargs: Keywords) -> tuple[Expected, ...]:
    rows = args[0].shape[0]
    return Expected("indices", (rows, kwargs["topk"]), torch.int32), Expected("length", (rows,), torch.int32)


def _mass(args: Arguments, kwargs: Keywords) -> tuple[Expected, ...]:
    query, indices = args[0], kwargs["indices"]
    columns = kwargs["rows"].keys if indices is None else indices.shape[1]
    return (Expected("mass", (query.shape[0], columns), accumulation_dtype(query.dtype)),)


def _loss(args: Arguments, kwargs: Keywords) -> tuple[Expected, ...]:
    q, weights = args[0], args[2]
    wide = accumulation_dtype(q.dtype)
    return (
        Expected("kl", (q.shape[0],), wide),
        Expected("dq", tuple(q.shape) if kwargs["need_dq"] else None, wide),
        Expected("dw", tuple(weights.shape) if kwargs["need_dw"] else None, wide),
    )


_EXPECTED: Final[Mapping[Stage, Callable[[Arguments, Keywords], tuple[Expected, ...]]]] = {
    "indexer_topk": _selection,
    "indexer_target": _mass,
    "indexer_loss": _loss,
    "attention_forward": lambda args, kwargs: _forward(args[0], kwargs["v_channels"]),
    "attention_backward": _backward,
    "gqa_forward": lambda args, kwargs: _forward(args[0], args[2].shape[2]),
    "gqa_backward": _backward,
}
_SINGLE: Final = frozenset({"indexer_target", "attention_backward", "gqa_backward"})
