"""Running a stage on operands and judging what it gives."""

from __future__ import annotations

from torch import Tensor

from dsa_dispatch.testing.judge import Faults, compare
from dsa_dispatch.testing.operands import Operands, Subject


def run_stage(subject: Subject, operands: Operands) -> dict[str, Tensor]:
    """Run the stage once; results by name."""
    return operands.call(subject.function)


def judge_stage(
    subject: Subject, claim: str, operands: Operands, faults: Faults | None = None, nan_hint: str = ""
) -> None:
    """Run the stage and compare every result with the exact one; ``claim`` begins the text of a failure."""
    wanted = operands.exact()
    got = run_stage(subject, operands)
    present = {name: tensor for name, tensor in wanted.items() if name in got}
    if subject.stage.endswith("forward") and "natural" not in claim:
        # The lse has a check of its own, so that a wrong base is not blamed on holes.
        present.pop("lse")
    compare(claim, got, present, operands.dtype, faults, _origin_of_nan(operands, got, nan_hint))


def _origin_of_nan(operands: Operands, got: dict[str, Tensor], elsewhere: str) -> str:
    empty = (operands.ids < 0).all(dim=1)
    per_row = [
        tensor.cpu().flatten(1).isnan().any(1)
        for name, tensor in got.items()
        if name in ("out", "dq", "mass")
    ]
    if any(bool((broken & ~empty).any()) for broken in per_row if len(broken) == len(empty)):
        return elsewhere
    return "The rows with NaN have no key: a softmax over nothing must give 0" if per_row else elsewhere
