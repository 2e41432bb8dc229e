"""What holds for a selection: order, ties, ranges, form, and that nothing outside a row's range matters."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dsa_dispatch.testing import formulas
from dsa_dispatch.testing.checks import common_checks
from dsa_dispatch.testing.guards import GuardedAllocations
from dsa_dispatch.testing.judge import ConformanceError, unchanged
from dsa_dispatch.testing.operands import Operands, Subject, make
from dsa_dispatch.testing.sizes import Sizes, several_items, within_limits
from dsa_dispatch.testing.tiles import sizes_beyond


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Exact scores of all keys for every row, ``[T, S]`` fp64, -inf outside the row's range."""

    score: Tensor
    allowed: Tensor
    slack: Tensor
    """``[T]``: by how much a rejected key may score above a chosen one."""


def scores_of(operands: Operands, score_error: float) -> Scores:
    q, k, w = (operands.plain[name].detach().to("cpu", torch.float64) for name in ("q", "k", "w"))
    starts, ends = operands.given["starts"], operands.given["ends"]
    assert starts is not None
    assert ends is not None
    ids = torch.arange(len(k)).expand(len(q), -1)
    allowed = (ids >= starts.cpu()[:, None]) & (ids < ends.cpu()[:, None])
    ids = torch.where(allowed, ids, -1)
    score = formulas.index_scores(q, k, w, ids, operands.host["use_relu"])
    # Both the chosen and the rejected key may be off, and fp64 itself is.
    bound = formulas.index_score_bound(q, k, w, ids).amax(1)
    return Scores(score.masked_fill(~allowed, -torch.inf), allowed, 2 * score_error * bound + 1e-12 * bound)


def check_form(claim: str, indices: Tensor, length: Tensor, allowed: Tensor, topk: int) -> list[list[int]]:
    """The chosen ids of every row, after everything but the choice itself has been checked."""
    rows = len(allowed)
    if list(indices.shape) != [rows, topk] or list(length.shape) != [rows]:
        raise ConformanceError(
            f"{claim}: indices {list(indices.shape)} and length {list(length.shape)}, "
            f"expected [{rows}, {topk}] and [{rows}]"
        )
    if indices.dtype != torch.int32 or length.dtype != torch.int32:
        raise ConformanceError(f"{claim}: indices are {indices.dtype}, length {length.dtype}, expected int32")
    chosen = []
    for row, slots in enumerate(indices.tolist()):
        count = min(topk, int(allowed[row].sum()))
        if int(length[row]) != count:
            raise ConformanceError(f"{claim}: length of row {row} is {int(length[row])}, expected {count}")
        ids = slots[:count]
        if any(slot != -1 for slot in slots[count:]):
            raise ConformanceError(f"{claim}: row {row} has ids after its {count} valid ones, expected -1")
        outside = [key for key in ids if not (0 <= key < allowed.shape[1] and bool(allowed[row, key]))]
        if outside:
            raise ConformanceError(f"{claim}: row {row} chose {outside[0]}, which is outside its range")
        if len(set(ids)) != count:
            raise ConformanceError(f"{claim}: row {row} chose a key twice")
        chosen.append(ids)
    return chosen


def check_exact(
    claim: str, chosen: list[list[int]], scores: Scores, topk: int, tie_rule: str, in_order: bool
) -> None:
    """Scores are exact in any order of summation, so the answer is known, ties included."""
    for row, ids in enumerate(chosen):
        score = scores.score[row].tolist()
        candidates = scores.allowed[row].nonzero()[:, 0].tolist()
        wanted = sorted(candidates, key=lambda key: (-score[key], key))[:topk]
        if sorted(score[key] for key in ids) != sorted(score[key] for key in wanted):
            raise ConformanceError(
                f"{claim}: row {row} chose keys {sorted(ids)}, but higher scores are {sorted(wanted)}"
            )
        if tie_rule == "lower_index" and set(ids) != set(wanted):
            worse, better = min(set(ids) - set(wanted)), min(set(wanted) - set(ids))
            raise ConformanceError(
                f"{claim}: wrong tie rule: row {row} chose key {worse} and left out key {better} of the same score; "
                f"the lower index goes first. Declare tie_rule='arbitrary' if the kernel cannot"
            )
        if in_order and ids != wanted:
            raise ConformanceError(f"{claim}: sorted is declared, but row {row} is {ids}, expected {wanted}")


def check_close(claim: str, chosen: list[list[int]], scores: Scores) -> None:
    """No rejected key scores above a chosen one by more than the declared error."""
    for row, ids in enumerate(chosen):
        rejected = scores.allowed[row].clone()
        rejected[ids] = False
        if not ids or not bool(rejected.any()):
            continue
        best = float(scores.score[row][rejected].max())
        worst = float(scores.score[row][ids].min())
        if best - worst > float(scores.slack[row]):
            raise ConformanceError(
                f"{claim}: in row {row} a rejected key scores {best - worst:.3g} above a chosen one, the declared "
                f"score_error allows {float(scores.slack[row]):.3g}"
            )


def _judge(subject: Subject, claim: str, operands: Operands, *, integers: bool = False) -> None:
    got = operands.call(subject.function)
    scores = scores_of(operands, subject.capability.score_error)
    topk = operands.host["topk"]
    chosen = check_form(claim, got["indices"], got["length"], scores.allowed, topk)
    if integers:
        capability = subject.capability
        check_exact(claim, chosen, scores, topk, capability.tie_rule, capability.sorted)
    else:
        check_close(claim, chosen, scores)


def _more_keys(subject: Subject) -> Sizes:
    """Several keys for every slot, so that there is something to reject."""
    sizes = subject.sizes
    return within_limits(subject.capability, dataclasses.replace(sizes, keys=4 * sizes.width))


def _small_integers(seed: int, plain: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, low, high in (("q", -2, 3), ("k", -1, 2), ("w", -1, 3)):
        plain[name].copy_(torch.randint(low, high, plain[name].shape, generator=generator))
        if name != "w":
            plain[name][..., 3:] = 0


def integer_operands(
    subject: Subject, dtype: str | None = None, seed: int = 11, sizes: Sizes | None = None
) -> Operands:
    """Small integers in few channels: every product and sum is exact in every declared type, and most scores tie."""
    sizes = sizes or _more_keys(subject)
    return make(subject, sizes=sizes, dtype=dtype, seed=seed, adjust=partial(_small_integers, seed))


def values(subject: Subject, dtype: str) -> None:
    """Random keys, and many keys that are almost alike, whose scores a coarser type cannot tell apart."""
    for seed in subject.extent.seeds:
        _judge(subject, "values", make(subject, sizes=_more_keys(subject), dtype=dtype, seed=seed))

    def almost_alike(plain: dict[str, Tensor]) -> None:
        plain["k"].copy_(plain["k"][:1] + plain["k"] / 64)

    crowded = dataclasses.replace(subject.sizes, keys=subject.extent.crowd)
    crowded = within_limits(subject.capability, crowded)
    operands = make(subject, sizes=crowded, dtype=dtype, adjust=almost_alike)
    _judge(subject, "values of many keys that are almost alike", operands)


def ties(subject: Subject, dtype: str) -> None:
    for seed in (*subject.extent.seeds, 13):
        _judge(subject, "ties of exact scores", integer_operands(subject, dtype, seed), integers=True)


def twins(subject: Subject) -> None:
    """Every key stored twice, on random data: the higher twin is never chosen without the lower."""
    sizes = _more_keys(subject)
    half = sizes.keys // 2
    operands = make(subject, sizes=sizes)
    for tensor in (operands.plain["k"], operands.given["k"]):
        assert tensor is not None
        tensor[half : 2 * half] = tensor[:half].clone()
    got = operands.call(subject.function)
    allowed = scores_of(operands, 0.0).allowed
    for row, ids in enumerate(
        check_form("twins", got["indices"], got["length"], allowed, operands.host["topk"])
    ):
        alone = [
            key
            for key in ids
            if half <= key < 2 * half and bool(allowed[row, key - half]) and key - half not in ids
        ]
        if alone:
            raise ConformanceError(
                f"wrong tie rule: row {row} chose key {alone[0]} without its twin {alone[0] - half}, which is equal "
                f"and lower; equal keys must score equally wherever they stand"
            )


def ranges(subject: Subject) -> None:
    """NaN everywhere outside the rows' ranges: not chosen, and without effect."""
    operands = make(subject, sizes=_more_keys(subject))
    starts, ends = operands.given["starts"], operands.given["ends"]
    assert starts is not None
    assert ends is not None
    some = ends > starts
    low, high = int(starts[some].min()), int(ends[some].max())
    key = operands.given["k"]
    assert key is not None
    key[:low] = torch.nan
    key[high:] = torch.nan
    _judge(subject, "keys outside every range have no effect, even when they hold NaN", operands)


def causal(subject: Subject) -> None:
    """``rows.bounds == "causal"``: aligned to the bottom right of the row's own batch item, in slices too. The first
    rows of a query that is longer than the keys see nothing."""
    claim = "causal rows: row i of a batch item sees its keys 0 .. keys - rows + i"
    more = _more_keys(subject)
    long = dataclasses.replace(more, rows=subject.extent.causal_rows)
    long = within_limits(subject.capability, long)
    long = dataclasses.replace(long, keys=max(min(long.keys, long.rows - 3), 1))
    _judge(subject, claim, make(subject, sizes=long, bounds="causal"))
    for sizes in (more, dataclasses.replace(more, rows=5, keys=3)):
        items = several_items(subject.capability, sizes, rows=5)
        whole = make(subject, sizes=items, bounds="causal")
        _judge(subject, f"{claim}, in {items.batch} batch items", whole)
        total = items.batch * items.rows
        cuts = sorted({0, 1, items.rows - 1, items.rows + 1, total} & set(range(total + 1)))
        for first, last in itertools.pairwise(cuts):
            part = whole.rows_of(first, last)
            _judge(subject, f"{claim}, in a slice that begins at `rows.first_row` = {first}", part)


def broken_scores(subject: Subject) -> None:
    """A row whose scores are NaN keeps unique ids inside its range, and leaves the other rows alone."""
    claim = "a row with NaN scores"
    sizes = _more_keys(subject)
    clean = make(subject, sizes=sizes).call(subject.function)
    operands = make(subject, sizes=sizes)
    query = operands.given["q"]
    assert query is not None
    query[0] = torch.nan
    got = operands.call(subject.function)
    allowed = scores_of(make(subject, sizes=sizes), 0.0).allowed
    chosen = check_form(claim, got["indices"], got["length"], allowed, operands.host["topk"])
    for row, ids in enumerate(chosen[1:], start=1):
        if set(ids) != set(clean["indices"][row].tolist()) - {-1}:
            raise ConformanceError(f"{claim} changed the choice of row {row}")


def chunks(subject: Subject) -> None:
    """Selection is the same set bit for bit in chunks, beside other batch items, and alone."""
    claim = "the selection of a row does not depend on the chunk or the batch beside it"
    sizes = several_items(subject.capability, _more_keys(subject))
    whole = make(subject, sizes=sizes)
    _judge(subject, "two batch items in one call", whole)
    wanted = whole.call(subject.function)
    for row in range(sizes.batch * sizes.rows):
        one = whole.rows_of(row, row + 1).call(subject.function)
        if set(one["indices"][0].tolist()) != set(wanted["indices"][row].tolist()):
            raise ConformanceError(f"{claim}: row {row} alone chose other keys")


def repeated(subject: Subject) -> None:
    first = make(subject, sizes=_more_keys(subject)).call(subject.function)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    make(subject, sizes=_more_keys(subject), seed=4, amplify=torch.nan).call(subject.function)
    unchanged("results do not depend on earlier calls", first, kept)
    second = make(subject, sizes=_more_keys(subject)).call(subject.function)
    for row, (one, other) in enumerate(
        zip(first["indices"].tolist(), second["indices"].tolist(), strict=True)
    ):
        if set(one) != set(other):
            raise ConformanceError(f"results do not depend on earlier calls: row {row} chose other keys")


def guards(subject: Subject) -> None:
    operands = make(subject, sizes=_more_keys(subject))
    with GuardedAllocations() as allocations:
        operands.call(subject.function)
    damage = allocations.damage()
    if damage:
        raise ConformanceError(f"writes outside its tensors: {'; '.join(damage)}")


def strided(subject: Subject) -> None:
    operands = make(subject, sizes=_more_keys(subject))
    given = dict(operands.given)
    for name in ("q", "k", "w"):
        tensor = given[name]
        assert tensor is not None
        given[name] = torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=1)[:, 0]
    operands = dataclasses.replace(operands, given=given)
    _judge(subject, "tensors may be strided in their first dimension", operands)


def beyond(subject: Subject, name: str, sizes: Sizes) -> None:
    """Random scores, and exact ones that tie, over more than one tile or block of something."""
    claim = f"sizes beyond one tile: {name}"
    _judge(subject, claim, _from_all_keys(make(subject, sizes=sizes)))
    exact = integer_operands(subject, sizes=sizes)
    _judge(subject, f"{claim}, ties of exact scores", _from_all_keys(exact), integers=True)


def _from_all_keys(operands: Operands) -> Operands:
    """Every row may choose from every key, where ranges can say so."""
    starts, ends = operands.given["starts"], operands.given["ends"]
    assert starts is not None
    assert ends is not None
    if operands.rows.bounds == "ranges":
        starts.fill_(0)
        ends.fill_(operands.sizes.keys)
    return operands


def _beyond_checks(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    native, found = subject.sizes, dict(sizes_beyond(subject))
    blocks = dataclasses.replace(native, rows=min(native.rows, 3), keys=subject.extent.keys)
    found[f"keys {blocks.keys}"] = blocks
    for name, sizes in found.items():
        if sizes.width > native.width:
            sizes = dataclasses.replace(sizes, keys=max(sizes.width + 40, 2 * native.keys))
        sizes = within_limits(subject.capability, sizes)
        yield f"beyond a tile, {name}", partial(beyond, subject, name, sizes)


def selection_checks(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    """The checks of ``indexer_topk``, with their names."""
    for dtype in sorted(subject.capability.dtypes):
        yield f"ties {dtype}", partial(ties, subject, dtype)
        yield f"values {dtype}", partial(values, subject, dtype)
    if subject.capability.tie_rule == "lower_index":
        yield "twins", partial(twins, subject)
    if "ranges" in subject.capability.bounds:
        yield "ranges", partial(ranges, subject)
    if "causal" in subject.capability.bounds:
        yield "causal rows", partial(causal, subject)
    yield "NaN scores", partial(broken_scores, subject)
    yield "chunks and batch", partial(chunks, subject)
    yield "guard rows", partial(guards, subject)
    yield "earlier calls", partial(repeated, subject)
    yield "strided rows", partial(strided, subject)
    yield from _beyond_checks(subject)
    shared = dict(common_checks(subject))
    for name in ("inputs unmodified", "no synchronisation"):
        if name in shared:
            yield name, shared[name]
