"""Judging a selection: its form, the exact answer where scores are exact, and the declared error where they are not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_dispatch.testing.judge import ConformanceError, bits
from dsa_dispatch.testing.operands import Operands, Subject


@dataclass(frozen=True, slots=True)
class Scores:
    """Exact scores of all keys for every row, ``[T, S]`` fp64, -inf outside the row's range."""

    score: Tensor
    allowed: Tensor
    slack: Tensor
    """``[T]``: by how much a rejected key may score above a chosen one."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What every row chose, in a form already checked: ``ids [T, topk]`` int64, the first ``count [T]`` of a row valid,
    and the same as a set, ``chosen [T, S]`` bool."""

    ids: Tensor
    count: Tensor
    chosen: Tensor

    def of(self, row: int) -> list[int]:
        return self.ids[row, : int(self.count[row])].tolist()


def allowed_keys(operands: Operands) -> Tensor:
    """``[T, S]`` bool on the CPU."""
    starts, ends = operands.given["starts"], operands.given["ends"]
    assert starts is not None
    assert ends is not None
    keys = torch.arange(len(operands.plain["k"]))
    return (keys >= starts.cpu()[:, None]) & (keys < ends.cpu()[:, None])


def _weighted(q: Tensor, k: Tensor, w: Tensor, use_relu: bool) -> Tensor:
    """``[T, S]``. Over all keys at once: a gather per row would hold ``T * S * channels``."""
    dots = (q.flatten(0, 1) @ k.T).unflatten(0, q.shape[:2])
    return torch.einsum("ths,th->ts", dots.relu() if use_relu else dots, w)


def scores_of(operands: Operands, score_error: float) -> Scores:
    q, k, w = (operands.plain[name].detach().to("cpu", torch.float64) for name in ("q", "k", "w"))
    allowed = allowed_keys(operands)
    score = _weighted(q, k, w, operands.host["use_relu"]).masked_fill_(~allowed, -torch.inf)
    # Both the chosen and the rejected key may be off, and fp64 itself is.
    bound = _weighted(q.abs(), k.abs(), w.abs(), use_relu=False).masked_fill_(~allowed, 0.0).amax(1)
    return Scores(score, allowed, 2 * score_error * bound + 1e-12 * bound)


def _first(rows: Tensor) -> int | None:
    """The first row that is True."""
    return int(rows.nonzero()[0]) if bool(rows.any()) else None


def check_form(claim: str, indices: Tensor, length: Tensor, allowed: Tensor, topk: int) -> Choice:
    """The chosen ids of every row, after everything but the choice itself has been checked."""
    rows, keys = allowed.shape
    if list(indices.shape) != [rows, topk] or list(length.shape) != [rows]:
        raise ConformanceError(
            f"{claim}: indices {list(indices.shape)} and length {list(length.shape)}, "
            f"expected [{rows}, {topk}] and [{rows}]"
        )
    if indices.dtype != torch.int32 or length.dtype != torch.int32:
        raise ConformanceError(f"{claim}: indices are {indices.dtype}, length {length.dtype}, expected int32")
    if not (indices.is_contiguous() and length.is_contiguous()):
        raise ConformanceError(
            f"{claim}: indices have strides {indices.stride()}, length {length.stride()}, expected contiguous tensors"
        )
    ids, found = indices.to("cpu", torch.int64), length.to("cpu", torch.int64)
    count = allowed.sum(1).clamp(max=topk)
    valid = torch.arange(topk) < count[:, None]
    inside = (ids >= 0) & (ids < keys) & allowed.gather(1, ids.clamp(0, max(keys - 1, 0)))
    outside, after = valid & ~inside, ((ids != -1) & ~valid).any(1)
    chosen = torch.zeros(rows, keys + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(valid & inside, ids, keys), torch.tensor(True).expand(ids.shape))
    chosen = chosen[:, :keys]
    row = _first((found != count) | after | outside.any(1) | (chosen.sum(1) != count))
    if row is None:
        return Choice(ids, count, chosen)
    if found[row] != count[row]:
        raise ConformanceError(
            f"{claim}: length of row {row} is {int(found[row])}, expected {int(count[row])}"
        )
    if after[row]:
        raise ConformanceError(
            f"{claim}: row {row} has ids after its {int(count[row])} valid ones, expected -1"
        )
    if outside[row].any():
        key = int(ids[row][outside[row]][0])
        raise ConformanceError(f"{claim}: row {row} chose {key}, which is outside its range")
    raise ConformanceError(f"{claim}: row {row} chose a key twice")


def preferred(scores: Scores, topk: int) -> Tensor:
    """``[T, up to topk]``: the keys of every row in the contract's order, those of its range first."""
    # Adding zero makes -0.0 the +0.0 that it ties with. Both sorts are stable: ties stay in the order of the keys.
    order = (scores.score + 0.0).argsort(dim=1, descending=True, stable=True)
    absent = scores.allowed.logical_not().gather(1, order).to(torch.uint8)
    return order.gather(1, absent.argsort(dim=1, stable=True))[:, :topk]


def check_exact(claim: str, choice: Choice, scores: Scores, topk: int, tie_rule: str, in_order: bool) -> None:
    """Scores are exact in any order of summation, so the answer is known, ties included."""
    order = preferred(scores, topk)
    valid = torch.arange(order.shape[1]) < choice.count[:, None]
    wanted = torch.zeros_like(choice.chosen).scatter_(1, order, valid)
    for row in (choice.chosen != wanted).any(1).nonzero()[:, 0].tolist():
        score = scores.score[row]
        extra, missing = (choice.chosen[row] & ~wanted[row]), (wanted[row] & ~choice.chosen[row])
        if not torch.equal(score[extra].sort().values, score[missing].sort().values):
            worse, better = int(extra.nonzero()[0]), int(missing.nonzero()[0])
            raise ConformanceError(
                f"{claim}: row {row} chose keys {_some(extra)}, but higher scores are {_some(missing)} "
                f"(key {better} scores {float(score[better]):g}, key {worse} scores {float(score[worse]):g})"
            )
        if tie_rule == "lower_index":
            worse, better = int(extra.nonzero()[0]), int(missing.nonzero()[0])
            raise ConformanceError(
                f"{claim}: wrong tie rule: row {row} chose key {worse} and left out key {better} of the same score; "
                f"the lower index goes first. Declare tie_rule='arbitrary' if the kernel cannot"
            )
    if not in_order:
        return
    width = order.shape[1]
    if (row := _first(((choice.ids[:, :width] != order) & valid).any(1))) is not None:
        raise ConformanceError(
            f"{claim}: sorted is declared, but row {row} is {choice.of(row)}, "
            f"expected {order[row][valid[row]].tolist()}"
        )


def _some(keys: Tensor) -> list[int]:
    return keys.nonzero()[:8, 0].tolist()


def check_close(claim: str, choice: Choice, scores: Scores) -> None:
    """No rejected key scores above a chosen one by more than the declared error."""
    rejected = scores.allowed & ~choice.chosen
    best = scores.score.masked_fill(~rejected, -torch.inf).amax(1)
    worst = scores.score.masked_fill(~choice.chosen, torch.inf).amin(1)
    if (row := _first(best - worst > scores.slack)) is not None:
        raise ConformanceError(
            f"{claim}: in row {row} a rejected key scores {float(best[row] - worst[row]):.3g} above a chosen one, the "
            f"declared score_error allows {float(scores.slack[row]):.3g}"
        )


def check_error_says_something(claim: str, subject: Subject, scores: Scores) -> None:
    """A declared error as wide as the scores themselves would accept any choice."""
    error = subject.capability.score_error
    some = scores.allowed.sum(1) > 1
    if not bool(some.any()):
        return
    highest = scores.score.amax(1)
    spread = (highest - scores.score.masked_fill(~scores.allowed, torch.inf).amin(1))[some]
    if error and bool((scores.slack[some] >= spread).all()):
        raise ConformanceError(
            f"{claim}: score_error {error:g} is declared, which accepts any choice among random keys: it allows "
            f"{float(scores.slack[some].min()):.3g}, and scores differ by at most {float(spread.max()):.3g}"
        )


def run(subject: Subject, claim: str, operands: Operands) -> Choice:
    """Call the stage; its result in a form that has been checked, and its operands not modified."""
    handed = {name: tensor for name, tensor in operands.given.items() if tensor is not None}
    copies = {name: tensor.clone() for name, tensor in handed.items()}
    got = operands.call(subject.function)
    changed = [name for name, tensor in handed.items() if not torch.equal(bits(tensor), bits(copies[name]))]
    if changed:
        raise ConformanceError(f"{claim}: inputs are not modified: it changed {', '.join(changed)}")
    return check_form(claim, got["indices"], got["length"], allowed_keys(operands), operands.host["topk"])


def judge(
    subject: Subject, claim: str, operands: Operands, *, exact: bool = False, scores: Scores | None = None
) -> Choice:
    """Run and judge by the declared error, or, where scores are ``exact``, by the one right answer."""
    choice = run(subject, claim, operands)
    capability = subject.capability
    scores = scores or scores_of(operands, capability.score_error)
    if exact:
        check_exact(claim, choice, scores, operands.host["topk"], capability.tie_rule, capability.sorted)
    else:
        check_close(claim, choice, scores)
    return choice


def check_same(claim: str, rows: Tensor, choice: Choice, wanted: Choice) -> None:
    """The rows ``[T]`` bool chose the same set."""
    if (row := _first(rows & (choice.chosen != wanted.chosen).any(1))) is not None:
        raise ConformanceError(f"{claim} changed the choice of row {row}")
