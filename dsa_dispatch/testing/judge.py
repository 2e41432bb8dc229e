"""Comparing results with exact ones, and saying what a wrong one looks like."""

from __future__ import annotations

import math
import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    what: str,
    got: Tensor,
    wanted: Tensor,
    dtype: str,
    gradient_error: float = 0.0,
    allowance: Tensor | None = None,
) -> str:
    """What is wrong with one result; "" when nothing is. Shapes must agree.

    ``gradient_error`` is what the capability declares, of everything. ``allowance``, of the result's shape, is the
    absolute error of each entry that rounding explains: of what the stage is given and of terms that cancel. It is
    added to the limit.
    """
    got, wanted = exact(got), exact(wanted)
    if got.shape != wanted.shape:
        return f"{what}: expected shape {list(wanted.shape)}, got {list(got.shape)}"
    if bool(got.isnan().any()):
        rows = sorted({int(row) for row in got.isnan().nonzero()[:, 0]})
        return f"{what}: NaN in rows {_few(rows)}, where the exact value has none"
    # The sign of an infinity counts: exp(score - lse) of an empty row is 0 for one and infinite for the other.
    infinite = got.isinf() | wanted.isinf()
    wrong = (infinite & (got != wanted)).nonzero()
    if len(wrong):
        entry = wrong[0].tolist()
        return f"{what}: {float(got[tuple(entry)])} at {entry}, exact {float(wanted[tuple(entry)])}"
    difference, wanted = (got - wanted).masked_fill(infinite, 0.0), wanted.masked_fill(infinite, 0.0)
    granted = torch.zeros_like(wanted) if allowance is None else exact(allowance).nan_to_num(0.0, 0.0, 0.0)
    if what == "lse":
        allowed = granted.clamp(min=LSE_LIMITS[dtype])
        over = difference.abs() > allowed
        if not bool(over.any()):
            return ""
        worst = float(difference.abs().max())
        return f"lse: off by {worst:.2g}, limit {float(allowed[over].max()):g} absolute"
    limits = Limits(limit_of(what, dtype), limit_of(what, dtype, gradient_error), dtype)
    least = limits.least_entry(what)
    norm = max(float(wanted.norm()), least * math.sqrt(wanted.numel()))
    error = float(difference.norm())
    if not error <= limits.of(norm, float(granted.norm())):
        extra = limits.granted(norm, float(granted.norm()))
        relative = error / norm if norm else error
        return (
            f"{what}: relative error {relative:.2g} against fp64, limit {limits.total:g} for {dtype}{extra}"
        )
    return _row_error(what, difference, wanted, granted, limits)


@dataclass(frozen=True, slots=True)
class Limits:
    """Relative limits of one result: ``base`` is the contract's, ``total`` the declared one where that is greater."""

    base: float
    total: float
    dtype: str

    def of(self, norm: float, granted: float, factor: int = 1) -> float:
        """Absolute. A declared error is one of everything, so that nothing is granted on top of it."""
        return max(factor * self.base * norm + granted, factor * self.total * norm)

    def granted(self, norm: float, granted: float) -> str:
        if not granted or not norm:
            return ""
        return f" and {granted / norm:.2g} for the rounding of what it is given and of terms that cancel"

    def least_entry(self, what: str) -> float:
        """The entry whose relative limit is the rounding of what cancelled."""
        if what != "kl" and not what.startswith("d"):
            return 0.0
        kind: torch.dtype = getattr(torch, self.dtype)
        return CANCELLED * torch.finfo(accumulation_dtype(kind)).eps / self.total


def _row_error(what: str, difference: Tensor, wanted: Tensor, granted: Tensor, limits: Limits) -> str:
    if wanted.dim() < 2:
        return ""
    size = wanted.flatten(1).norm(dim=1)
    # A row that is almost zero by cancellation has no relative precision of its own.
    least = limits.least_entry(what) * math.sqrt(wanted.numel() / max(len(size), 1))
    size = size.clamp(min=max(float(size.norm()) / math.sqrt(max(len(size), 1)), least))
    errors, extras = difference.flatten(1).norm(dim=1), granted.flatten(1).norm(dim=1)
    for row in (errors / torch.where(size > 0, size, 1.0)).argsort(descending=True).tolist():
        norm, extra = float(size[row]), float(extras[row])
        if float(errors[row]) <= limits.of(norm, extra, ROW_FACTOR):
            continue
        relative = float(errors[row]) / norm if norm else float(errors[row])
        return (
            f"{what}: relative error {relative:.2g} in row {row} against fp64, "
            f"limit {ROW_FACTOR * limits.total:g} for a single row{limits.granted(norm, extra)}"
        )
    return ""


def compare(
    claim: str,
    got: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    dtype: str,
    faults: Faults | None = None,
    nan_hint: str = "",
    gradient_error: float = 0.0,
    allowances: Callable[[], Mapping[str, Tensor]] | None = None,
) -> None:
    """Raise ``ConformanceError`` with ``claim``, what differs, and the fault that would explain it.

    ``nan_hint`` says where NaN can only have come from. ``allowances`` gives that of ``error_of`` for results by name,
    and is asked only where a result is beyond its limit without one.
    """

    def errors_against(exact_ones: Mapping[str, Tensor], granted: Mapping[str, Tensor]) -> list[str]:
        return [
            error_of(what, got[what], exact_ones[what], dtype, gradient_error, granted.get(what))
            for what in wanted
        ]

    errors, granted = errors_against(wanted, {}), {}
    if any(errors) and allowances is not None:
        granted = {
            what: tensor[: len(wanted[what])] for what, tensor in allowances().items() if what in wanted
        }
        errors = errors_against(wanted, granted)
    if not any(errors):
        return
    text = "; ".join(error for error in errors if error)
    for fault, results in (faults or {}).items():
        if not any(errors_against(results(), granted)):
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
