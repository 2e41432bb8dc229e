"""What holds for the teacher and the loss alone: every key of a row's range as a column, and rows without mass."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from dsa_dispatch._call import Bounds
from dsa_dispatch.testing.judge import Faults
from dsa_dispatch.testing.operands import ACCUMULATORS, Operands, Subject, exact_results, make
from dsa_dispatch.testing.sizes import Sizes, several_items
from dsa_dispatch.testing.stage_run import judge_results, judge_stage, run_stage

CLAIM = "dense form: column c is key c of the row's own batch item, valid inside [starts, ends)"
CAUSAL_CLAIM = "dense form of causal rows: row i of a batch item sees its keys 0 .. keys - rows + i"


def in_chunks(subject: Subject, claim: str, whole: Operands) -> None:
    """The rows in two calls that do not respect the batch items; accumulators are shared, as the core shares them."""
    total = whole.sizes.batch * whole.sizes.rows
    cut = total // 2 + 1
    parts = [
        run_stage(subject, whole.rows_of(first, last))
        for first, last in ((0, cut), (cut, total))
        if first < last
    ]
    sums = ACCUMULATORS.get(subject.stage, {})
    joined = {
        name: parts[-1][name] if name in sums else torch.cat([part[name] for part in parts])
        for name in parts[0]
    }
    judge_results(
        f"{claim}: a stage may be called with a slice of the rows, at `rows.first_row`", whole, joined
    )


def ranges(subject: Subject) -> None:
    _judge(subject, CLAIM, subject.sizes, "ranges")


def causal(subject: Subject) -> None:
    """``rows.bounds == "causal"``, with more keys than rows and with fewer: then the first rows see nothing."""
    native = subject.sizes
    _judge(subject, CAUSAL_CLAIM, native, "causal")
    _judge(subject, CAUSAL_CLAIM, dataclasses.replace(native, rows=5, keys=3), "causal")


def _judge(subject: Subject, claim: str, sizes: Sizes, bounds: Bounds) -> None:
    one = several_items(subject.capability, dataclasses.replace(sizes, batch=1), rows=sizes.rows)
    for poison in (False, True):
        held = f"{claim}, with NaN in every key outside" if poison else claim
        judge_stage(subject, held, make(subject, sizes=one, sparse=False, bounds=bounds, poison=poison))
    in_chunks(subject, claim, make(subject, sizes=one, sparse=False, bounds=bounds))


def without_mass(subject: Subject, sparse: bool) -> None:
    """A row that has keys and a teacher of zeros, and zeros among other masses."""
    operands = make(subject, sparse=sparse, adjust=_thin_mass)

    def uniform() -> dict[str, Tensor]:
        mass = operands.plain["mass"].cpu()
        filled = torch.where(mass.sum(1, keepdim=True) > 0, mass, (operands.ids >= 0).to(mass))
        return exact_results(operands.stage, {**operands.plain, "mass": filled}, operands.ids, operands.host)

    claim = (
        f"rows without mass ({'sparse' if sparse else 'dense'}): a row with keys whose mass is all zero has loss and "
        f"gradients 0"
    )
    faults: Faults = {"a row of zero mass taken for a uniform teacher": uniform}
    judge_stage(
        subject, claim, operands, faults, "The mass of a row may be zero: clamp its sum, as 0 / 0 is NaN"
    )


def _thin_mass(plain: dict[str, Tensor]) -> None:
    plain["mass"][:, ::3] = 0
    plain["mass"][0] = 0
