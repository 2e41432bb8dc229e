"""What holds for a selection: order, ties, ranges, form, and that nothing outside a row's range matters."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsa_dispatch.testing.checks import no_synchronisation, unmodified
from dsa_dispatch.testing.guards import GuardedAllocations
from dsa_dispatch.testing.judge import ConformanceError, unchanged
from dsa_dispatch.testing.operands import Operands, Subject, make
from dsa_dispatch.testing.selection_cases import (
    more_keys,
    set_ranges,
    special_checks,
    whole_ranges,
)
from dsa_dispatch.testing.selection_judge import (
    Scores,
    allowed_keys,
    check_close,
    check_error_says_something,
    check_form,
    check_same,
    judge,
    run,
    scores_of,
)
from dsa_dispatch.testing.sizes import Sizes, head_counts, preferred_dtype, several_items, within_limits
from dsa_dispatch.testing.tiles import servable, sizes_beyond

__all__ = ["Scores", "check_close", "check_form", "selection_checks"]


def _small_integers(seed: int, negative: bool, plain: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, low, high in (("q", -2, 3), ("k", -1, 2), ("w", -1, 3)):
        plain[name].copy_(torch.randint(low, high, plain[name].shape, generator=generator))
        if name != "w":
            plain[name][..., 3:] = 0
    if negative:
        plain["w"].copy_(-1 - plain["w"].abs())


def integer_operands(
    subject: Subject,
    dtype: str | None = None,
    seed: int = 11,
    sizes: Sizes | None = None,
    *,
    negative: bool = False,
    use_relu: bool | None = None,
) -> Operands:
    """Small integers in few channels: every product and sum is exact in every declared type, and most scores tie.
    ``negative`` weights make every score of a ReLU at most zero."""
    adjust = partial(_small_integers, seed, negative)
    host: dict[str, Any] = {} if use_relu is None else {"use_relu": use_relu}
    return make(subject, sizes=sizes or more_keys(subject), dtype=dtype, seed=seed, adjust=adjust, **host)


def _each_dtype(subject: Subject) -> list[str]:
    """Declared types, the one in which faults show most sharply first."""
    first = preferred_dtype(subject.capability)
    return [first, *sorted(subject.capability.dtypes - {first})]


def values(subject: Subject, dtype: str) -> None:
    """Random keys, and many keys that are almost alike, whose scores a coarser type cannot tell apart."""
    for seed in subject.extent.seeds:
        operands = make(subject, sizes=more_keys(subject), dtype=dtype, seed=seed)
        exact = scores_of(operands, subject.capability.score_error)
        check_error_says_something("values", subject, exact)
        judge(subject, "values", operands, scores=exact)

    def almost_alike(plain: dict[str, Tensor]) -> None:
        plain["k"].copy_(plain["k"][:1] + plain["k"] / 64)

    crowded = dataclasses.replace(subject.sizes, keys=subject.extent.crowd)
    crowded = within_limits(subject.capability, crowded)
    operands = make(subject, sizes=crowded, dtype=dtype, adjust=almost_alike)
    judge(subject, "values of many keys that are almost alike", operands)


def ties(subject: Subject, dtype: str) -> None:
    for seed in (*subject.extent.seeds, 13):
        judge(subject, "ties of exact scores", integer_operands(subject, dtype, seed), exact=True)
    for use_relu in sorted(subject.capability.relu):
        claim = f"ties of exact scores, most of them negative, use_relu={use_relu}"
        negative = integer_operands(subject, dtype, 17, negative=True, use_relu=use_relu)
        judge(subject, claim, negative, exact=True)


def twins(subject: Subject) -> None:
    """Every key stored twice, on random data: the higher twin is never chosen without the lower."""
    sizes = more_keys(subject)
    half = sizes.keys // 2
    for dtype in _each_dtype(subject):
        operands = make(subject, sizes=sizes, dtype=dtype)
        for tensor in (operands.plain["k"], operands.given["k"]):
            assert tensor is not None
            tensor[half : 2 * half] = tensor[:half].clone()
        choice = run(subject, f"twins ({dtype})", operands)
        both = allowed_keys(operands)[:, :half]
        alone = choice.chosen[:, half : 2 * half] & both & ~choice.chosen[:, :half]
        if bool(alone.any()):
            row, key = alone.nonzero()[0].tolist()
            raise ConformanceError(
                f"wrong tie rule: row {row} chose key {key + half} without its twin {key}, which is equal "
                f"and lower ({dtype}); equal keys must score equally wherever they stand"
            )


def ranges(subject: Subject) -> None:
    """NaN everywhere outside the rows' ranges: not chosen, and without effect."""
    for dtype in _each_dtype(subject):
        operands = make(subject, sizes=more_keys(subject), dtype=dtype)
        starts, ends = operands.given["starts"], operands.given["ends"]
        assert starts is not None
        assert ends is not None
        some = ends > starts
        low, high = int(starts[some].min()), int(ends[some].max())
        key = operands.given["k"]
        assert key is not None
        key[:low] = torch.nan
        key[high:] = torch.nan
        claim = f"keys outside every range have no effect, even when they hold NaN ({dtype})"
        judge(subject, claim, operands)


def causal(subject: Subject) -> None:
    """``rows.bounds == "causal"``: aligned to the bottom right of the row's own batch item, in slices too. The first
    rows of a query that is longer than the keys see nothing."""
    claim = "causal rows: row i of a batch item sees its keys 0 .. keys - rows + i"
    more = more_keys(subject)
    long = dataclasses.replace(more, rows=subject.extent.causal_rows)
    long = within_limits(subject.capability, long)
    long = dataclasses.replace(long, keys=max(min(long.keys, long.rows - 3), 1))
    judge(subject, claim, make(subject, sizes=long, bounds="causal"))
    for dtype in _each_dtype(subject)[1:]:
        judge(subject, f"{claim} ({dtype})", make(subject, sizes=more, dtype=dtype, bounds="causal"))
    for sizes in (more, dataclasses.replace(more, rows=5, keys=3)):
        items = several_items(subject.capability, sizes, rows=5)
        whole = make(subject, sizes=items, bounds="causal")
        judge(subject, f"{claim}, in {items.batch} batch items", whole)
        total = items.batch * items.rows
        cuts = sorted({0, 1, items.rows - 1, items.rows + 1, total} & set(range(total + 1)))
        for first, last in itertools.pairwise(cuts):
            part = whole.rows_of(first, last)
            judge(subject, f"{claim}, in a slice that begins at `rows.first_row` = {first}", part)


def broken_scores(subject: Subject) -> None:
    """A row whose scores are NaN keeps unique ids inside its range, and leaves the other rows alone."""
    sizes = more_keys(subject)
    for dtype in _each_dtype(subject):
        claim = f"a row with NaN scores ({dtype})"
        clean = run(subject, claim, make(subject, sizes=sizes, dtype=dtype))
        operands = make(subject, sizes=sizes, dtype=dtype)
        query = operands.given["q"]
        assert query is not None
        query[0] = torch.nan
        choice = run(subject, claim, operands)
        check_same(claim, torch.arange(len(query)) > 0, choice, clean)


def chunks(subject: Subject) -> None:
    """Selection is the same set bit for bit in chunks, beside other batch items, and alone."""
    claim = "the selection of a row does not depend on the chunk or the batch beside it"
    sizes = several_items(subject.capability, more_keys(subject))
    for dtype in _each_dtype(subject):
        whole = make(subject, sizes=sizes, dtype=dtype)
        wanted = judge(subject, f"two batch items in one call ({dtype})", whole)
        for row in range(sizes.batch * sizes.rows):
            one = run(subject, f"{claim} ({dtype})", whole.rows_of(row, row + 1))
            if not torch.equal(one.chosen[0], wanted.chosen[row]):
                raise ConformanceError(f"{claim} ({dtype}): row {row} alone chose other keys")


def repeated(subject: Subject) -> None:
    first = make(subject, sizes=more_keys(subject)).call(subject.function)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    make(subject, sizes=more_keys(subject), seed=4, amplify=torch.nan).call(subject.function)
    unchanged("results do not depend on earlier calls", first, kept)
    second = make(subject, sizes=more_keys(subject)).call(subject.function)
    for row, (one, other) in enumerate(
        zip(first["indices"].tolist(), second["indices"].tolist(), strict=True)
    ):
        if set(one) != set(other):
            raise ConformanceError(f"results do not depend on earlier calls: row {row} chose other keys")


def guards(subject: Subject) -> None:
    operands = make(subject, sizes=more_keys(subject))
    with GuardedAllocations() as allocations:
        operands.call(subject.function)
    damage = allocations.damage()
    if damage:
        raise ConformanceError(f"writes outside its tensors: {'; '.join(damage)}")


def strided(subject: Subject) -> None:
    operands = make(subject, sizes=more_keys(subject))
    given = dict(operands.given)
    for name in ("q", "k", "w"):
        tensor = given[name]
        assert tensor is not None
        given[name] = torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=1)[:, 0]
    operands = dataclasses.replace(operands, given=given)
    judge(subject, "tensors may be strided in their first dimension", operands)


def beyond(subject: Subject, name: str, sizes: Sizes) -> None:
    """Random scores, and exact ones that tie, over more than one tile or block of something."""
    claim = f"sizes beyond one tile: {name}"
    judge(subject, claim, whole_ranges(make(subject, sizes=sizes)))
    # In another type than the random ones, where there is one: paths of different types have sizes of their own.
    exact = integer_operands(subject, _each_dtype(subject)[-1], sizes=sizes)
    judge(subject, f"{claim}, ties of exact scores", whole_ranges(exact), exact=True)


def _beyond_checks(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    native, found = subject.sizes, dict(sizes_beyond(subject))
    few = dataclasses.replace(native, rows=min(native.rows, 3))
    blocks = dataclasses.replace(few, keys=subject.extent.keys)
    found[f"keys {blocks.keys}"] = blocks
    many_heads = 64
    if subject.capability.heads.values is None and many_heads in head_counts(subject.capability.heads):
        found[f"heads {many_heads}"] = dataclasses.replace(few, heads=many_heads)
    for name, sizes in found.items():
        if sizes.width > native.width:
            sizes = dataclasses.replace(sizes, keys=max(sizes.width + 40, 2 * native.keys))
        sizes = within_limits(subject.capability, sizes)
        yield f"beyond a tile, {name}", partial(beyond, subject, name, sizes)


def one_size(subject: Subject, name: str, sizes: Sizes) -> None:
    """Random scores, and exact ones that tie, of a size that a kernel may treat apart."""
    for dtype in _each_dtype(subject):
        judge(subject, f"sizes: {name} ({dtype})", make(subject, sizes=sizes, dtype=dtype))
    exact = whole_ranges(integer_operands(subject, sizes=sizes))
    judge(subject, f"sizes: {name}, ties of exact scores", exact, exact=True)


def many_rows(subject: Subject, sizes: Sizes) -> None:
    """More rows than any tile of rows has; exact scores alone, since a row costs what it costs."""
    operands = whole_ranges(integer_operands(subject, _each_dtype(subject)[-1], sizes=sizes))
    judge(subject, f"sizes: {sizes.rows} rows, ties of exact scores", operands, exact=True)


def large_ids(subject: Subject, sizes: Sizes) -> None:
    """The best keys are the last ones: ids that 16 bits do not hold."""

    def last_are_best(plain: dict[str, Tensor]) -> None:
        plain["q"].zero_()[..., 0] = 1
        plain["k"].zero_()[:, 0] = 1
        plain["k"][-sizes.width // 2 :, 0] = 2
        plain["w"].fill_(1)

    operands = whole_ranges(make(subject, sizes=sizes, adjust=last_are_best))
    judge(subject, f"ids beyond 65535, of {sizes.keys} keys", operands, exact=True)


def no_key(subject: Subject) -> None:
    """No row has a key."""
    claim = "rows without a key are all -1, with length 0"
    sizes = more_keys(subject)
    if "ranges" in subject.capability.bounds:
        half = torch.tensor(sizes.keys // 2)
        run(subject, claim, set_ranges(make(subject, sizes=sizes), half, half))
    if "causal" in subject.capability.bounds:
        longer = within_limits(subject.capability, dataclasses.replace(sizes, rows=5, keys=2))
        if longer.rows > longer.keys:
            rows = make(subject, sizes=longer, bounds="causal").rows_of(0, longer.rows - longer.keys)
            run(subject, f"{claim}, causal", rows)


def _size_checks(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    more, native = more_keys(subject), subject.sizes
    many = 4 * subject.extent.more_rows + 32
    for name, sizes in (
        ("one row", dataclasses.replace(more, rows=1)),
        ("one key", dataclasses.replace(native, keys=1)),
        ("fewer keys than top-k", dataclasses.replace(native, keys=max(native.width - 3, 1))),
    ):
        if servable(subject, sizes):
            yield f"size, {name}", partial(one_size, subject, name, sizes)
    sizes = dataclasses.replace(more, rows=many)
    if servable(subject, sizes):
        yield f"size, rows {many}", partial(many_rows, subject, sizes)
    sizes = dataclasses.replace(native, rows=1, keys=(1 << 16) + 41)
    if servable(subject, sizes):
        yield f"size, keys {sizes.keys}", partial(large_ids, subject, sizes)
    yield "size, no key in any row", partial(no_key, subject)


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
    yield from _size_checks(subject)
    yield from special_checks(subject)
    yield "inputs unmodified", partial(unmodified, subject)
    if subject.device.type == "cuda" and subject.capability.capture_safe:
        yield "no synchronisation", partial(no_synchronisation, subject)
