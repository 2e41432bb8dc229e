"""Running a stage on operands and judging what it gives."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from dsa_dispatch.testing.judge import Faults, compare, error_of
from dsa_dispatch.testing.operands import Operands, Subject, exact_results


def run_stage(subject: Subject, operands: Operands) -> dict[str, Tensor]:
    """Run the stage once; results by name."""
    return operands.call(subject.function)


def judge_stage(
    subject: Subject,
    claim: str,
    operands: Operands,
    faults: Faults | None = None,
    nan_hint: str = "",
    slack: float = 0.0,
) -> None:
    """Run the stage and compare every result with the exact one; ``claim`` begins the text of a failure."""
    got = run_stage(subject, operands)
    judge_results(claim, operands, got, faults=faults, nan_hint=nan_hint, slack=slack)


def judge_results(
    claim: str,
    operands: Operands,
    got: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor] | None = None,
    *,
    faults: Faults | None = None,
    nan_hint: str = "",
    slack: float = 0.0,
) -> None:
    """Compare what a stage gave with ``wanted``, by default the exact results of ``operands``.

    ``wanted`` may hold the first rows alone. ``slack`` is what rounded scores may add to a relative error.
    """
    wanted = operands.exact() if wanted is None else wanted
    present = {name: tensor for name, tensor in wanted.items() if name in got}
    if "lse" in present and _left_to_its_own_check(operands, got["lse"], present["lse"]):
        del present["lse"]
    hint = _origin_of_nan(operands, got, nan_hint)
    compare(claim, got, present, operands.dtype, faults, hint, slack, operands.gradient_error)


def lse_faults(operands: Operands) -> Faults:
    """What backends with another idea of the lse give. The check of the lse names these; no other is to blame."""

    def base_two() -> dict[str, Tensor]:
        return {"lse": operands.exact()["lse"] / math.log(2.0)}

    def unscaled() -> dict[str, Tensor]:
        host = {**operands.host, "scale": 1.0}
        return {"lse": exact_results(operands.stage, operands.plain, operands.ids, host)["lse"]}

    return {"a logarithm of base 2": base_two, "the scale left out": unscaled}


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
