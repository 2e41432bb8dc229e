"""Comparing results with exact ones, and saying what a wrong one looks like."""

from __future__ import annotations

import math
import unittest
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from dsa_dispatch._contract import accumulation_dtype

LIMITS: Final = {"float64": 1e-11, "float32": 1e-5, "float16": 2e-3, "bfloat16": 6e-3}
"""Relative Frobenius error against fp64 formulas on the same rounded inputs: rounding of the type with a margin; bf16
as the contract promises for gradients."""
OUT_LIMITS: Final = {**LIMITS, "bfloat16": 4e-3}
LSE_LIMITS: Final = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-4, "bfloat16": 1e-4}
"""Absolute."""
CANCELLED: Final = 16
"""Units of rounding of the accumulation type that an entry of a gradient or divergence may be off however small it is:
where terms of about 1 cancel, what is left has no relative precision of its own."""
ROW_FACTOR: Final = 3
"""No single row may be worse than this many times the limit, measured by its own norm or the mean one."""

Faults = Mapping[str, Callable[[], Mapping[str, Tensor]]]
"""Names of faults to the results a backend with that fault would give."""


class ConformanceError(AssertionError):
    """A backend breaks the contract; the text names how."""


class NotHere(unittest.SkipTest):
    """What is to be checked cannot run on this machine; pytest reports it as skipped, with the reason."""


class DeclinedHere(NotHere):
    """The backend itself declined a declared call, for a reason that it found out at run time."""


def limit_of(what: str, dtype: str, gradient_error: float = 0.0) -> float:
    """Of a relative error. ``gradient_error`` is a declared one, of a gradient in bfloat16."""
    limit = (OUT_LIMITS if what == "out" else LIMITS)[dtype]
    if not what.startswith("d"):
        return limit
    coarser = torch.finfo(torch.bfloat16).eps / torch.finfo(getattr(torch, dtype)).eps
    return max(limit, gradient_error / coarser)


def exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def error_of(
    what: str, got: Tensor, wanted: Tensor, dtype: str, slack: float = 0.0, gradient_error: float = 0.0
) -> str:
    """What is wrong with one result; "" when nothing is. Shapes must agree.

    ``slack`` is the error that rounding alone may cause where the scores are large: the limit where it is greater.
    ``gradient_error`` is what the capability declares.
    """
    got, wanted = exact(got), exact(wanted)
    if got.shape != wanted.shape:
        return f"{what}: expected shape {list(wanted.shape)}, got {list(got.shape)}"
    if bool(got.isnan().any()):
        rows = sorted({int(row) for row in got.isnan().nonzero()[:, 0]})
        return f"{what}: NaN in rows {_few(rows)}, where the exact value has none"
    if not torch.equal(got.isinf(), wanted.isinf()):
        wrong = (got.isinf() != wanted.isinf()).nonzero()[0].tolist()
        return f"{what}: {float(got[tuple(wrong)])} at {wrong}, exact {float(wanted[tuple(wrong)])}"
    finite = wanted.isfinite()
    difference, wanted = (got - wanted).masked_fill(~finite, 0.0), wanted.masked_fill(~finite, 0.0)
    if what == "lse":
        worst = float(difference.abs().max()) if difference.numel() else 0.0
        allowed = max(LSE_LIMITS[dtype], slack)
        return f"lse: off by {worst:.2g}, limit {allowed:g} absolute" if worst > allowed else ""
    allowed = max(limit_of(what, dtype, gradient_error), slack)
    norm = float(wanted.norm())
    entry = _least_entry(what, dtype, allowed)
    norm = max(norm, entry * math.sqrt(wanted.numel()))
    relative = float(difference.norm()) / norm if norm else float(difference.norm())
    if not relative <= allowed:
        return f"{what}: relative error {relative:.2g} against fp64, limit {allowed:g} for {dtype}"
    return _row_error(what, difference, wanted, allowed, entry)


def _least_entry(what: str, dtype: str, allowed: float) -> float:
    """The entry whose relative limit is the rounding of what cancelled."""
    if what != "kl" and not what.startswith("d"):
        return 0.0
    kind: torch.dtype = getattr(torch, dtype)
    return CANCELLED * torch.finfo(accumulation_dtype(kind)).eps / allowed


def _row_error(what: str, difference: Tensor, wanted: Tensor, allowed: float, entry: float) -> str:
    if wanted.dim() < 2:
        return ""
    size = wanted.flatten(1).norm(dim=1)
    # A row that is almost zero by cancellation has no relative precision of its own.
    least = entry * math.sqrt(wanted.numel() / max(len(size), 1))
    size = size.clamp(min=max(float(size.norm()) / math.sqrt(max(len(size), 1)), least))
    errors = difference.flatten(1).norm(dim=1) / torch.where(size > 0, size, 1.0)
    row = int(errors.argmax())
    if float(errors[row]) <= ROW_FACTOR * allowed:
        return ""
    return (
        f"{what}: relative error {float(errors[row]):.2g} in row {row} against fp64, "
        f"limit {ROW_FACTOR * allowed:g} for a single row"
    )


def compare(
    claim: str,
    got: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    dtype: str,
    faults: Faults | None = None,
    nan_hint: str = "",
    slack: float = 0.0,
    gradient_error: float = 0.0,
) -> None:
    """Raise ``ConformanceError`` with ``claim``, what differs, and the fault that would explain it.

    ``nan_hint`` says where NaN can only have come from.
    """
    errors = [error_of(what, got[what], wanted[what], dtype, slack, gradient_error) for what in wanted]
    if not any(errors):
        return
    text = "; ".join(error for error in errors if error)
    for fault, results in (faults or {}).items():
        explained = results()
        if not any(
            error_of(what, got[what], explained[what], dtype, slack, gradient_error) for what in wanted
        ):
            text += f". This is the answer with {fault}"
            break
    if nan_hint and any(bool(got[what].isnan().any()) for what in wanted):
        text += f". {nan_hint}"
    raise ConformanceError(f"{claim}: {text}")


def same(claim: str, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Raise unless equal bit for bit."""
    for what, tensor in first.items():
        if not torch.equal(tensor, second[what]):
            raise ConformanceError(f"{claim}: {what} differs")


def _few(values: list[int]) -> str:
    return ", ".join(map(str, values[:5])) + (", …" if len(values) > 5 else "")


def bits(tensor: Tensor) -> Tensor:
    """What ``torch.equal`` compares bit for bit, NaN included."""
    return tensor.contiguous().view(torch.uint8) if tensor.is_floating_point() else tensor


def unchanged(claim: str, results: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
    """A result is the caller's own: a buffer that is returned every time would change under the caller's hands."""
    changed = [name for name, copy in copies.items() if not torch.equal(bits(results[name]), bits(copy))]
    if changed:
        raise ConformanceError(
            f"{claim}: {', '.join(changed)} of an earlier call changed in a later one; return a new tensor each time"
        )
