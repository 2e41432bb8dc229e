"""Running a stage on operands and judging what it gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dsa_dispatch._call import CallSpec
from dsa_dispatch._dispatch.check import declines
from dsa_dispatch._dispatch.device import device_info
from dsa_dispatch._stages import BACKWARD_STAGES
from dsa_dispatch.testing.cases import call_of
from dsa_dispatch.testing.judge import ConformanceError, DeclinedHere, Faults, compare, error_of
from dsa_dispatch.testing.operands import Operands, Subject, exact_results
from dsa_dispatch.testing.rounding import allowances, backward_with


def run_stage(subject: Subject, operands: Operands) -> dict[str, Tensor]:
    """Run the stage once; results by name.

    Raises ``DeclinedHere`` where the declaration declines such a call, by a rule or a limit, as dispatch then never
    makes it; ``ConformanceError`` where the stage writes beside its accumulators.
    """
    refused = declines(
        subject.capability, subject.stage, call_asked(subject, operands), device_info(subject.device)
    )
    if refused:
        raise DeclinedHere(f"not run: declined: {'; '.join(str(decline) for decline in refused)}")
    got = operands.call(subject.function)
    damage = [
        f"{name}: {made.damage()}" for name, made in operands.accumulators.items() if made and made.damage()
    ]
    if damage:
        raise ConformanceError(
            f"writes outside its accumulators, as through an id below 0 or at or above S: {'; '.join(damage)}"
        )
    return got


def call_asked(subject: Subject, operands: Operands) -> CallSpec:
    """The call as dispatch would see it."""
    call = call_of(subject.capability, subject.stage, subject.device.type, operands.sizes)
    rows, host = operands.rows, operands.host
    changes: dict[str, Any] = {
        "dtype": operands.dtype,
        "bounds": rows.bounds,
        "layout": rows.layout,
        "context_parallel": rows.context_parallel,
        "use_relu": host["use_relu"],
        "deterministic": operands.options.deterministic,
    }
    if "w" in operands.plain:
        changes["weights_dtype"] = str(operands.plain["w"].dtype).removeprefix("torch.")
    if subject.stage in ("indexer_target", "indexer_loss"):
        changes["sparse_loss"] = operands.given["indices"] is not None
    if subject.stage in BACKWARD_STAGES:
        inputs = {"dk": "key", "dkv": "key", "dv": "value"}
        wanted = {inputs[name] for name, made in operands.accumulators.items() if made is not None}
        changes["needs_grad"] = frozenset(wanted | ({"query"} if host["need_dq"] else set()))
    return dataclasses.replace(call, **changes)


def judge_stage(
    subject: Subject,
    claim: str,
    operands: Operands,
    faults: Faults | None = None,
    nan_hint: str = "",
) -> None:
    """Run the stage and compare every result with the exact one; ``claim`` begins the text of a failure."""
    got = run_stage(subject, operands)
    judge_results(claim, operands, got, faults=faults, nan_hint=nan_hint)


def judge_results(
    claim: str,
    operands: Operands,
    got: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor] | None = None,
    *,
    faults: Faults | None = None,
    nan_hint: str = "",
) -> None:
    """Compare what a stage gave with ``wanted``, by default the exact results of ``operands``.

    ``wanted`` may hold the first rows alone. What rounding explains is allowed beside the limits: see ``allowances``.
    """
    wanted = operands.exact() if wanted is None else wanted
    present = {name: tensor for name, tensor in wanted.items() if name in got}
    if "lse" in present and _left_to_its_own_check(operands, got["lse"], present["lse"]):
        del present["lse"]
    hint = _origin_of_nan(operands, got, nan_hint)

    def explained() -> dict[str, Tensor]:
        return allowances(operands.stage, operands.plain, operands.ids, operands.host, operands.dtype)

    named = {**(faults or {}), **delta_faults(operands)}
    compare(claim, got, present, operands.dtype, named, hint, operands.gradient_error, explained)


def lse_faults(operands: Operands) -> Faults:
    """What backends with another idea of the lse give. The check of the lse names these; no other is to blame."""

    def base_two() -> dict[str, Tensor]:
        return {"lse": operands.exact()["lse"] / math.log(2.0)}

    def unscaled() -> dict[str, Tensor]:
        host = {**operands.host, "scale": 1.0}
        return {"lse": exact_results(operands.stage, operands.plain, operands.ids, host)["lse"]}

    return {"a logarithm of base 2": base_two, "the scale left out": unscaled}


def delta_faults(operands: Operands) -> Faults:
    """What backwards give that use another delta than the sum of ``dout * out`` over channels."""
    if not operands.stage.endswith("backward"):
        return {}

    def with_delta(change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        plain = {name: tensor.to("cpu", torch.float64) for name, tensor in operands.plain.items()}
        delta = change((plain["dout"] * plain["out"]).sum(-1))
        return backward_with(operands.stage, plain, operands.ids, operands.host, delta)

    return {
        "delta (the sum of dout * out) left out": lambda: with_delta(torch.zeros_like),
        "delta (the sum of dout * out) of the row before": lambda: with_delta(lambda delta: delta.roll(1, 0)),
    }


def _left_to_its_own_check(operands: Operands, got: Tensor, wanted: Tensor) -> bool:
    if not error_of("lse", got, wanted, operands.dtype):
        return False
    explained = (fault()["lse"][: len(wanted)] for fault in lse_faults(operands).values())
    return any(not error_of("lse", got, lse, operands.dtype) for lse in explained)


def _origin_of_nan(operands: Operands, got: Mapping[str, Tensor], elsewhere: str) -> str:
    empty = (operands.ids < 0).all(dim=1)
    per_row = [
        tensor.cpu().reshape(len(tensor), -1).isnan().any(1)
        for name, tensor in got.items()
        if name in ("out", "lse", "dq", "mass", "kl", "dw")
    ]
    if any(bool((broken & ~empty).any()) for broken in per_row if len(broken) == len(empty)):
        return elsewhere
    return "The rows with NaN have no key: a softmax over nothing must give 0" if per_row else elsewhere
