"""What holds for every stage that sums over keys: one function per claim of the contract, each called with a stage."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._dispatch.check import INDEXED_STAGES
from dsa_dispatch.testing.guards import GuardedAllocations
from dsa_dispatch.testing.judge import ConformanceError, bits, compare, same, unchanged
from dsa_dispatch.testing.operands import ACCUMULATORS, Ids, Operands, Subject, exact_results, make
from dsa_dispatch.testing.sizes import Sizes, widths
from dsa_dispatch.testing.slots import (
    doubled,
    duplicates,
    empty_rows,
    holes,
    outside_ids,
    past_length,
    some_empty,
)
from dsa_dispatch.testing.stage_run import judge_stage, run_stage

LONG_ROW = 1024
MANY_ROWS = 4096


def values(subject: Subject, dtype: str) -> None:
    """Distinct keys, no holes: shapes, types and values."""
    operands = make(subject, dtype=dtype)
    got = run_stage(subject, operands)
    missing = [name for name in operands.exact() if name not in got]
    if missing:
        raise ConformanceError(f"values: {', '.join(missing)} is missing, though it is needed")
    _check_form(operands, got)
    for seed in (11, 12):
        judge_stage(subject, "values", make(subject, dtype=dtype, seed=seed))


def _check_form(operands: Operands, got: dict[str, Tensor]) -> None:
    kind: torch.dtype = getattr(torch, operands.dtype)
    wide = accumulation_dtype(kind)
    allowed = {"out": {kind}, "dq": {kind}}
    if operands.stage == "indexer_loss":
        allowed["dq"] = {wide}
    for name, wanted in operands.exact().items():
        if got[name].shape != wanted.shape:
            raise ConformanceError(
                f"values: {name} has shape {list(got[name].shape)}, expected {list(wanted.shape)}"
            )
        if got[name].dtype not in allowed.get(name, {wide}):
            expected = next(iter(allowed.get(name, {wide})))
            raise ConformanceError(f"values: {name} is {got[name].dtype}, expected {expected}")


def lse(subject: Subject) -> None:
    operands = make(subject, ids=some_empty)
    base_two = {"lse": operands.exact()["lse"] / math.log(2.0)}
    unscaled = exact_results(subject.stage, operands.plain, operands.ids, {**operands.host, "scale": 1.0})
    compare(
        "lse is the natural logarithm of the summed exponentials of the scaled scores, -inf without a key",
        {"lse": run_stage(subject, operands)["lse"]},
        {"lse": operands.exact()["lse"]},
        operands.dtype,
        {
            "a logarithm of base 2": lambda: base_two,
            "the scale left out": lambda: {"lse": unscaled["lse"]},
        },
    )


def large_scores(subject: Subject) -> None:
    judge_stage(
        subject, "queries scaled by 30 stay accurate (subtract the maximum)", make(subject, amplify=30.0)
    )


def guards(subject: Subject) -> None:
    operands = make(subject)
    with GuardedAllocations() as allocations:
        got = run_stage(subject, operands)
    damage = allocations.damage()
    for name, made in operands.accumulators.items():
        if made is not None and made.damage():
            damage.append(f"{name}: {made.damage()}")
    if damage:
        raise ConformanceError(
            f"writes outside its tensors: {'; '.join(damage)}. The call has {operands.sizes.heads} heads; a kernel "
            f"that rounds heads, rows or width up must mask what it stores"
        )
    wanted = {name: tensor for name, tensor in operands.exact().items() if name != "lse"}
    compare("a value is left unwritten where memory was not zero before", got, wanted, operands.dtype)


def unmodified(subject: Subject) -> None:
    operands = make(subject, ids=doubled)
    handed = {name: tensor for name, tensor in operands.given.items() if tensor is not None}
    copies = {name: tensor.clone() for name, tensor in handed.items()}
    run_stage(subject, operands)
    changed = [name for name, tensor in handed.items() if not torch.equal(bits(tensor), bits(copies[name]))]
    if changed:
        raise ConformanceError(f"inputs are not modified: it changed {', '.join(changed)}")


def repeatable(subject: Subject) -> None:
    """The same call again, with a call on NaN and one of other lengths in between."""
    claim = "results do not depend on earlier calls"
    first = run_stage(subject, make(subject))
    sums = ACCUMULATORS.get(subject.stage, {})
    kept = {name: tensor.clone() for name, tensor in first.items() if name not in sums}
    other = make(subject, seed=5, amplify=torch.nan)
    run_stage(subject, other)
    sizes = subject.sizes
    run_stage(subject, make(subject, sizes=dataclasses.replace(sizes, rows=1), seed=6))
    unchanged(claim, first, kept)
    second = run_stage(subject, make(subject))
    same(claim, {name: tensor for name, tensor in first.items() if name not in sums}, second)
    wanted = {name: tensor for name, tensor in first.items() if name in sums}
    compare(claim, second, wanted, subject.dtype)


def chunks(subject: Subject) -> None:
    """Two batch items in one call, and the same rows in chunks that do not respect the items."""
    base = subject.sizes
    most = subject.capability.max_rows or 6
    sizes = dataclasses.replace(base, batch=2, rows=max(min(3, most // 2), 1))
    if subject.capability.max_keys is not None:
        sizes = dataclasses.replace(sizes, keys=max(min(base.keys, subject.capability.max_keys // 2), 1))
    whole = make(subject, sizes=sizes)
    judge_stage(subject, "two batch items in one call: results do not depend on the neighbour", whole)
    _judge_neighbour(subject, sizes)
    total = 2 * sizes.rows
    pieces = make(subject, sizes=sizes)
    parts = []
    for first, last in ((0, total // 2 + 1), (total // 2 + 1, total)):
        if first < last:
            parts.append(run_stage(subject, pieces.rows_of(first, last)))
    sums = ACCUMULATORS.get(subject.stage, {})
    joined = {
        name: parts[-1][name] if name in sums else torch.cat([part[name] for part in parts])
        for name in parts[0]
    }
    wanted = {name: tensor for name, tensor in whole.exact().items() if name != "lse"}
    compare(
        "rows in chunks: a stage may be called with a slice of the rows, at `rows.first_row`",
        joined,
        wanted,
        whole.dtype,
    )


def _judge_neighbour(subject: Subject, sizes: Sizes) -> None:
    """The second item is NaN throughout: the first must not notice."""
    operands = make(subject, sizes=sizes)
    for name, count in (("q", sizes.rows), ("k", sizes.keys), ("v", sizes.keys)):
        tensor = operands.given.get(name)
        if tensor is not None:
            tensor[count:] = torch.nan
    got = run_stage(subject, operands)
    wanted = operands.exact()
    keys = ("dk", "dv", "dkv")
    own = {
        name: tensor[: sizes.keys if name in keys else sizes.rows]
        for name, tensor in wanted.items()
        if name != "lse"
    }
    mine = {name: got[name][: len(tensor)] for name, tensor in own.items()}
    compare("results do not depend on the batch neighbour: its NaN came through", mine, own, operands.dtype)


def strided(subject: Subject) -> None:
    operands = make(subject)
    given = dict(operands.given)
    for name in ("q", "k", "v", "w", "dout"):
        tensor = given.get(name)
        if tensor is not None:
            wide = torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=1)
            given[name] = wide[:, 0]
    judge_stage(
        subject, "tensors may be strided in their first dimension", dataclasses.replace(operands, given=given)
    )


def unneeded(subject: Subject) -> None:
    """Each gradient left out by itself: None for it, and the others unchanged."""
    gradients = [name for name in make(subject).exact() if name.startswith("d")]
    for left_out in gradients:
        operands = make(subject, need={left_out: False})
        got = run_stage(subject, operands)
        if left_out in got:
            raise ConformanceError(f"gradients that are not needed: {left_out} was returned, expected None")
        wanted = {name: tensor for name, tensor in operands.exact().items() if name != left_out}
        compare(f"gradients without {left_out}", got, wanted, operands.dtype)


def accumulates(subject: Subject) -> None:
    operands = make(subject)
    got = run_stage(subject, operands)
    names = list(ACCUMULATORS[subject.stage])
    wanted = {name: operands.exact()[name] for name in names}
    overwritten = {name: wanted[name] - operands.before[name].to("cpu", torch.float64) for name in names}
    compare(
        "accumulators are added into, never overwritten",
        got,
        wanted,
        operands.dtype,
        {f"{' and '.join(names)} overwritten instead of added to": lambda: overwritten},
    )


def long_rows(subject: Subject) -> None:
    """Equal scores over many keys: a sum in bf16 stops growing long before its end."""
    possible = [width for width in widths(subject.capability.width) if width <= LONG_ROW]
    if not possible:
        return
    sizes = dataclasses.replace(subject.sizes, width=possible[-1], keys=possible[-1], rows=2)
    dtype = next(
        name for name in ("bfloat16", "float16", "float32", "float64") if name in subject.capability.dtypes
    )
    operands = make(subject, sizes=sizes, dtype=dtype, amplify=0.01)
    for name in ("k", "v"):
        given, plain = operands.given.get(name), operands.plain.get(name)
        if given is not None and plain is not None:
            plain.copy_((plain.float() / 4 + 1).to(plain.dtype))
            given.copy_(plain)
    claim = f"sums over {sizes.width} keys run in fp32 (fp64 for fp64 inputs), not in {dtype}"
    got = run_stage(subject, operands)
    compare(claim, got, {name: got_ for name, got_ in operands.exact().items() if name in got}, dtype)


def many_rows(subject: Subject) -> None:
    """Thousands of queries on one key: its gradient must be summed in fp32."""
    if subject.capability.max_rows is not None and subject.capability.max_rows < MANY_ROWS:
        return
    dtype = next(
        name for name in ("bfloat16", "float16", "float32", "float64") if name in subject.capability.dtypes
    )
    native = subject.sizes
    sizes = dataclasses.replace(native, rows=MANY_ROWS, keys=2, width=widths(subject.capability.width)[0])

    def one_key(sizes: Sizes, generator: torch.Generator) -> Ids:
        slots = torch.full((sizes.rows, sizes.width), -1)
        slots[:, 0] = 1
        if sizes.width > 1:
            slots[::2, 1] = 0
        return Ids(slots, torch.full((sizes.rows,), min(sizes.width, 2)))

    operands = make(subject, ids=one_key, sizes=sizes, dtype=dtype)
    claim = f"the gradient of one key over {MANY_ROWS} queries is summed in fp32 (fp64 for fp64 inputs)"
    judge_stage(subject, claim, operands)


def deterministic(subject: Subject) -> None:
    """``options.deterministic``: equal bits again and again, accumulators included."""
    sizes = dataclasses.replace(subject.sizes, rows=min(64, subject.capability.max_rows or 64))
    first = run_stage(subject, make(subject, sizes=sizes, deterministic=True))
    for _ in range(2):
        again = run_stage(subject, make(subject, sizes=sizes, deterministic=True))
        same("deterministic=True gives equal bits every time", first, again)


def dense(subject: Subject) -> None:
    """The dense loss: every key of a row's range is a column, also in chunks of two batch items."""
    claim = "dense form: column c is key c of the row's own batch item, valid inside [starts, ends)"
    judge_stage(subject, claim, make(subject, sparse=False))
    judge_stage(subject, f"{claim}, with NaN in every key outside", make(subject, sparse=False, poison=True))
    sizes = dataclasses.replace(subject.sizes, batch=2, rows=min(3, subject.sizes.rows))
    whole = make(subject, sizes=sizes, sparse=False)
    first = run_stage(subject, whole.rows_of(0, sizes.rows + 1))
    second = run_stage(subject, whole.rows_of(sizes.rows + 1, 2 * sizes.rows))
    sums = ACCUMULATORS.get(subject.stage, {})
    joined = {
        name: second[name] if name in sums else torch.cat([first[name], second[name]]) for name in first
    }
    compare(f"{claim}, in chunks", joined, whole.exact(), whole.dtype)


def with_lse(subject: Subject) -> None:
    operands = make(subject)
    plain = {"q": operands.plain["q"], "k": operands.plain["k"]}
    host = {**operands.host, "v_channels": 1}
    lse = exact_results("attention_forward", plain, operands.ids, host)["lse"]
    kind: torch.dtype = getattr(torch, operands.dtype)
    given = {**operands.given, "lse": lse.to(subject.device, accumulation_dtype(kind))}
    judge_stage(
        subject, "values with the lse of the attention given", dataclasses.replace(operands, given=given)
    )


def no_synchronisation(subject: Subject) -> None:
    """Capture-safe stages never wait for the device. The first call may: it compiles and plans."""
    operands = make(subject)
    run_stage(subject, operands)
    torch.cuda.synchronize(subject.device)
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            # torch says that the mode is a prototype, which is no fault of the backend.
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
            operands.call(subject.function)
    except RuntimeError as error:
        raise ConformanceError(
            f"capture_safe is declared, but the stage waits for the device: {error}"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def softmax_checks(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    """The checks that apply to an attention, target or loss stage, with their names."""
    stage, capability = subject.stage, subject.capability
    cleaned = capability.index_form == "prefix" and stage in INDEXED_STAGES

    def bound(check: Callable[..., None], *args: Any) -> Callable[[], None]:
        return lambda: check(subject, *args)

    if stage.endswith("forward"):
        yield "lse", bound(lse)
    if stage == "indexer_target":
        yield "lse given", bound(with_lse)
    if stage not in ("indexer_target", "indexer_loss") or "sparse" in capability.losses:
        if not cleaned:
            yield "holes", bound(holes)
            yield "length", bound(past_length)
        yield "empty rows", bound(empty_rows)
        yield "duplicates", bound(duplicates)
        if capability.index_form == "any":
            yield "ids outside the keys", bound(outside_ids)
    if stage in ("indexer_target", "indexer_loss") and "dense" in capability.losses:
        yield "dense form", bound(dense)
    if ACCUMULATORS.get(stage):
        yield "accumulators", bound(accumulates)
        yield "many rows on one key", bound(many_rows)
    else:
        yield "long rows", bound(long_rows)
    if stage == "indexer_loss" or (stage.endswith("backward") and capability.partial_gradients):
        yield "unneeded gradients", bound(unneeded)
    yield from common_checks(subject)
    for dtype in sorted(capability.dtypes):
        yield f"values {dtype}", bound(values, dtype)
    yield "large scores", bound(large_scores)
    yield "chunks and batch", bound(chunks)


def common_checks(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is checked alike for every stage that ``make`` can make operands for."""
    yield "guard rows", lambda: guards(subject)
    yield "inputs unmodified", lambda: unmodified(subject)
    yield "earlier calls", lambda: repeatable(subject)
    yield "strided rows", lambda: strided(subject)
    if subject.capability.deterministic:
        yield "deterministic", lambda: deterministic(subject)
    if subject.device.type == "cuda" and subject.capability.capture_safe:
        yield "no synchronisation", lambda: no_synchronisation(subject)
