"""Selections whose scores are made on purpose: infinite, huge, zeros of either sign, thousands of ties, close ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from dsa_dispatch._call import ContextParallel, Layout
from dsa_dispatch.testing.judge import ConformanceError
from dsa_dispatch.testing.operands import Operands, Subject, make
from dsa_dispatch.testing.selection_judge import Scores, allowed_keys, check_same, judge, run
from dsa_dispatch.testing.sizes import Sizes, within_limits

_TOP: Final = {"float16": 15, "bfloat16": 127, "float32": 127, "float64": 1023}
"""The largest exponent of two that a type holds."""
_LEAST: Final = {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}
TIED_KEYS: Final = 2 * 4096 + 100
"""More equal scores than any candidate buffer that published kernels have room for."""


def more_keys(subject: Subject) -> Sizes:
    """Several keys for every slot, so that there is something to reject."""
    sizes = subject.sizes
    return within_limits(subject.capability, dataclasses.replace(sizes, keys=4 * sizes.width))


def set_ranges(operands: Operands, starts: Tensor, ends: Tensor) -> Operands:
    """Other ranges, where ranges are declared; causal rows keep theirs."""
    if operands.rows.bounds != "ranges":
        return operands
    given = dict(operands.given)
    for name, values in (("starts", starts), ("ends", ends)):
        old = given[name]
        assert old is not None
        given[name] = values.expand(old.shape).to(old.device, old.dtype).clone()
    return dataclasses.replace(operands, given=given)


def whole_ranges(operands: Operands) -> Operands:
    """Every row may choose from every key of a single batch item."""
    return set_ranges(operands, torch.tensor(0), torch.tensor(operands.sizes.keys))


def _widest_weights(subject: Subject, dtype: str) -> str:
    """The declared weights type of the greatest range, no finer than needed."""
    order = ("float32", "bfloat16", "float64", "float16")
    return next(name for name in order if name in subject.capability.weights_dtypes)


def made(
    subject: Subject,
    dtype: str,
    dots: Tensor,
    *,
    query: float = 1.0,
    weight: float = 1.0,
    sizes: Sizes | None = None,
    use_relu: bool | None = None,
) -> Operands:
    """Operands with ``score[t, j] = heads * weight * f(query * dots[j])``, all of it in one channel."""
    kind: torch.dtype = getattr(torch, _widest_weights(subject, dtype))

    def adjust(plain: dict[str, Tensor]) -> None:
        plain["q"].zero_()[..., 0] = query
        plain["k"].zero_()[:, 0] = dots.to(plain["k"].dtype)
        plain["w"] = torch.full(plain["w"].shape, weight, dtype=kind)

    host: dict[str, Any] = {} if use_relu is None else {"use_relu": use_relu}
    return make(subject, sizes=sizes or more_keys(subject), dtype=dtype, adjust=adjust, **host)


def _same_for_all(operands: Operands, score: Tensor) -> Scores:
    """Scores ``[S]`` that every row gives its keys; any greater or lesser numbers of the same order will do."""
    allowed = allowed_keys(operands)
    wide = score.double().expand(allowed.shape).masked_fill(~allowed, -torch.inf)
    return Scores(wide, allowed, torch.zeros(len(allowed), dtype=torch.float64))


def _split(exponent: int, dtype: str, weights: str) -> tuple[float, float] | None:
    """``query`` and ``weight`` with ``query * weight == 2 ** exponent``; None where the types cannot hold them."""
    query = min(_TOP[dtype] - 2, exponent // 2)
    weight = min(exponent - query, _TOP[weights] - 1)
    query = exponent - weight
    return (2.0**query, 2.0**weight) if query <= _TOP[dtype] - 2 else None


def _shuffled(count: int, seed: int = 17) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def infinite_scores(subject: Subject, dtype: str) -> None:
    """Finite operands whose scores overflow to -inf: after every finite one, and still selectable."""
    scale = _split(
        _TOP["float64" if dtype == "float64" else "float32"], dtype, _widest_weights(subject, dtype)
    )
    if scale is None:
        return  # No finite operands of these types overflow a sum in fp32.
    sizes = more_keys(subject)
    place, width = _shuffled(sizes.keys), sizes.width
    small = 2.0 ** -(sizes.heads - 1).bit_length()
    for claim, finite in (
        ("fewer finite scores than slots", max(width // 2, 1)),
        ("more finite scores than slots", width + width // 2),
        ("no finite score", 0),
    ):
        dots = torch.where(place < finite, small * 2.0 ** -(1 + place % 4), 4.0)
        operands = made(subject, dtype, dots, query=scale[0], weight=-scale[1], sizes=sizes)
        score = _same_for_all(operands, torch.where(place < finite, -dots, -torch.inf))
        text = f"scores of -inf come after every finite one and are still selectable ({claim}, {dtype})"
        judge(subject, text, operands, exact=True, scores=score)


def huge_negative_scores(subject: Subject, dtype: str) -> None:
    """Every score is negative and large: below any finite number that stands for "no key yet"."""
    sizes = more_keys(subject)
    dots = 1.0 + _shuffled(sizes.keys) % 64
    for exponent in (17, 100):
        scale = _split(exponent, dtype, _widest_weights(subject, dtype))
        if scale is not None:
            operands = made(subject, dtype, dots, query=scale[0], weight=-scale[1], sizes=sizes)
            claim = f"large negative scores, of about -2**{exponent} ({dtype}), are scores as any other"
            judge(subject, claim, operands, exact=True, scores=_same_for_all(operands, -dots))


def nan_keys(subject: Subject, dtype: str) -> None:
    """NaN keys that some rows see and others do not."""
    sizes = more_keys(subject)
    half = max(sizes.keys // 2, 1)
    odd = torch.arange(sizes.rows) % 2 == 1

    def operands() -> Operands:
        plain = make(subject, sizes=sizes, dtype=dtype)
        return set_ranges(plain, torch.where(odd, half, 0), torch.where(odd, sizes.keys, half))

    clean = run(subject, f"rows without NaN ({dtype})", operands())
    for count in (1, max(half - 1, 1)):
        spoilt = operands()
        causal = spoilt.rows.bounds == "causal"
        keys = slice(sizes.keys - 1, None) if causal else slice(0, count)
        key = spoilt.given["k"]
        assert key is not None
        key[keys] = torch.nan
        claim = f"NaN in {count} keys of some rows' ranges ({dtype})"
        choice = run(subject, claim, spoilt)
        check_same(claim, ~allowed_keys(spoilt)[:, keys].any(1), choice, clean)


def signed_zeros(subject: Subject, dtype: str) -> None:
    """Scores that are +0.0 or -0.0, as a masked product, a key of -0.0 or an underflow makes them."""
    sizes = more_keys(subject)
    number = torch.arange(sizes.keys)
    claim = f"-0.0 equals +0.0 ({dtype})"
    for use_relu in sorted(subject.capability.relu):
        text = f"{claim}, use_relu={use_relu}"
        if use_relu:
            dots = torch.where(number % 2 == 0, -1.0, 0.0)
            operands = made(subject, dtype, dots, sizes=sizes, use_relu=True)
            judge(subject, text, operands, exact=True, scores=_same_for_all(operands, 0.0 * dots))
            continue
        zeros = torch.where(number % 2 == 0, -0.0, 0.0)
        operands = made(subject, dtype, zeros, sizes=sizes, use_relu=False)
        judge(subject, text, operands, exact=True, scores=_same_for_all(operands, 0.0 * number))
        _underflow(subject, f"{text}, where products underflow", dtype, sizes)


def _underflow(subject: Subject, claim: str, dtype: str, sizes: Sizes) -> None:
    """Weights times dots of either sign, too small for the type of the sum; keys of score zero stand between."""
    total = -1090 if dtype == "float64" else -154
    dots = 2 * max(total // 4, _LEAST[dtype])
    weight = max(total - dots, _LEAST[_widest_weights(subject, dtype)])
    query = (total - weight) // 2
    key = total - weight - query
    if min(query, key) < _LEAST[dtype]:
        return  # No product of these types underflows.
    sign = torch.arange(sizes.keys) % 3 - 1.0
    operands = made(
        subject,
        dtype,
        2.0**key * sign.double(),
        query=2.0**query,
        weight=2.0**weight,
        sizes=sizes,
        use_relu=False,
    )
    try:
        judge(subject, claim, operands, exact=True, scores=_same_for_all(operands, 0.0 * sign.abs()))
    except ConformanceError as error:
        try:
            # Sums in a wider type do not underflow, and then these are different scores.
            judge(subject, claim, operands, exact=True, scores=_same_for_all(operands, sign))
        except ConformanceError:
            raise error from None


def crowded_threshold(subject: Subject, dtype: str) -> None:
    """Thousands of candidates for the last slots: equal scores, then scores that differ in low bits alone."""
    sizes = dataclasses.replace(subject.sizes, rows=min(subject.sizes.rows, 2), keys=TIED_KEYS)
    sizes = within_limits(subject.capability, sizes)
    place = _shuffled(sizes.keys)
    dots = torch.where(place < min(3, sizes.width - 1), 2.0, 1.0)
    operands = whole_ranges(made(subject, dtype, dots, sizes=sizes))
    claim = f"{sizes.keys} keys, almost all of one score ({dtype}): a buffer of candidates must not overflow"
    judge(subject, claim, operands, exact=True)
    if sizes.qk < 3:
        return
    steps = place % 8192

    def low_bits(plain: dict[str, Tensor]) -> None:
        plain["q"].zero_()[:, 0, :3] = torch.tensor([256.0, 128.0, 1.0])
        plain["k"].zero_()[:, :3] = torch.stack([torch.full_like(steps, 256), steps // 128, steps % 128], 1)
        plain["w"].zero_()[:, 0] = 1 / 16

    operands = whole_ranges(make(subject, sizes=sizes, dtype=dtype, adjust=low_bits))
    claim = f"{sizes.keys} keys whose scores differ in their low bits alone ({dtype})"
    judge(subject, claim, operands, exact=True)


def other_bounds(subject: Subject) -> None:
    """Calls of one shape with other bounds, first rows and ranges, in turn."""
    claim = "nothing is kept between calls of one shape"
    base = more_keys(subject)
    rows = within_limits(subject.capability, dataclasses.replace(base, rows=4))
    calls: list[tuple[str, Operands]] = []
    if "ranges" in subject.capability.bounds:
        plain = make(subject, sizes=rows)
        third = max(rows.keys // 3, 1)
        calls += [("these ranges", plain), ("all keys", whole_ranges(plain))]
        calls += [("other starts", set_ranges(plain, torch.tensor(third), torch.tensor(rows.keys)))]
        calls += [("other ends", set_ranges(plain, torch.tensor(0), torch.tensor(rows.keys - third)))]
        if rows.rows > 2:
            calls += [(f"ranges from row {first}", plain.rows_of(first, first + 2)) for first in (0, 1)]
    if "causal" in subject.capability.bounds:
        causal = make(subject, sizes=rows, bounds="causal")
        calls += [("causal rows", causal)]
        if rows.rows > 2:
            calls += [(f"causal from row {first}", causal.rows_of(first, first + 2)) for first in (0, 1, 2)]
    for name, operands in (*calls, *calls[:1]):
        judge(
            subject, f"{claim}: {name}, where bounds, starts, ends or first_row were others before", operands
        )


def weights(subject: Subject, dtype: str) -> None:
    """Weights of ``dtype`` beside queries of every type: two heads whose weights a coarser type would make one."""
    gaps = {
        "bfloat16": (),
        "float16": (2.0**-8,),
        "float32": (2.0**-8, 2.0**-12),
        "float64": (2.0**-8, 2.0**-12),
    }
    kind: torch.dtype = getattr(torch, dtype)
    for given, gap in itertools.product(sorted(subject.capability.dtypes), (0.0, *gaps[dtype])):

        def adjust(plain: dict[str, Tensor], gap: float = gap) -> None:
            plain["w"] = plain["w"].to(kind)
            if not gap or plain["q"].shape[1] < 2 or plain["q"].shape[2] < 2:
                return
            for name in ("q", "k", "w"):
                plain[name].zero_()
            plain["q"][:, 0, 0] = plain["q"][:, 1, 1] = plain["w"][:, 0] = 1
            plain["w"][:, 1] = 1 + gap
            better = _shuffled(len(plain["k"])) % 3 == 0
            plain["k"][~better, 0] = 1
            plain["k"][better, 1] = 1

        operands = make(subject, sizes=more_keys(subject), dtype=given, adjust=adjust)
        judge(subject, f"weights in {dtype} beside {given} are not rounded to a coarser type", operands)


def layout(subject: Subject, kind: Layout, parallel: ContextParallel) -> None:
    """Rows as that layout and context-parallel kind place them; their ranges alone say what they may choose."""
    sizes = more_keys(subject)
    number, keys = torch.arange(sizes.rows), sizes.keys
    place = number * keys // sizes.rows
    if parallel == "contiguous":
        place = (keys // 3 + number).clamp(max=keys - 1)
    if parallel == "zigzag":
        early = number < (sizes.rows + 1) // 2
        place = torch.where(early, (keys // 4 + number).clamp(max=keys - 1), keys - sizes.rows + number)
    place = place.clamp(min=0)
    cut = max(keys // 5, 1)
    starts = torch.where(place >= cut, cut, 0) if kind == "thd" else torch.zeros_like(place)
    for dtype in sorted(subject.capability.dtypes):
        operands = set_ranges(make(subject, sizes=sizes, dtype=dtype), starts, place + 1)
        rows = dataclasses.replace(operands.rows, layout=kind, context_parallel=parallel)
        claim = f"layout {kind}, context parallel {parallel} ({dtype})"
        judge(subject, claim, dataclasses.replace(operands, rows=rows))


def special_checks(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    """These checks, with their names."""
    capability = subject.capability
    for dtype in sorted(capability.dtypes):
        yield f"scores of -inf {dtype}", partial(infinite_scores, subject, dtype)
        yield f"large negative scores {dtype}", partial(huge_negative_scores, subject, dtype)
        yield f"NaN keys {dtype}", partial(nan_keys, subject, dtype)
        yield f"signed zeros {dtype}", partial(signed_zeros, subject, dtype)
        yield f"crowded threshold {dtype}", partial(crowded_threshold, subject, dtype)
    yield "calls of one shape", partial(other_bounds, subject)
    for dtype in sorted(capability.weights_dtypes):
        yield f"weights {dtype}", partial(weights, subject, dtype)
    if "ranges" in capability.bounds:
        # What is packed or context parallel comes with ranges.
        for kind, parallel in itertools.product(
            sorted(capability.layouts), sorted(capability.context_parallel)
        ):
            yield f"layout {kind}, context parallel {parallel}", partial(layout, subject, kind, parallel)
