"""What holds for every stage that sums over keys: one function per claim of the contract, each called with a stage."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._dispatch.check import INDEXED_STAGES
from dsa_dispatch.testing import accuracy, dense
from dsa_dispatch.testing.dense import in_chunks
from dsa_dispatch.testing.guards import GuardedAllocations
from dsa_dispatch.testing.judge import ConformanceError, bits, compare, same, unchanged
from dsa_dispatch.testing.operands import ACCUMULATORS, Operands, Subject, exact_results, make
from dsa_dispatch.testing.sizes import Sizes, several_items
from dsa_dispatch.testing.slots import (
    doubled,
    duplicates,
    empty_rows,
    holes,
    outside_ids,
    past_length,
    some_empty,
)
from dsa_dispatch.testing.stage_run import judge_results, judge_stage, lse_faults, run_stage
from dsa_dispatch.testing.tiles import tile_checks


def values(subject: Subject, dtype: str) -> None:
    """Distinct keys, no holes: shapes, types and values."""
    operands = make(subject, dtype=dtype)
    got = run_stage(subject, operands)
    missing = [name for name in operands.exact() if name not in got]
    if missing:
        raise ConformanceError(f"values: {', '.join(missing)} is missing, though it is needed")
    _check_form(operands, got)
    for seed in subject.extent.seeds:
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
    compare(
        "lse is the natural logarithm of the summed exponentials of the scaled scores, -inf without a key",
        {"lse": run_stage(subject, operands)["lse"]},
        {"lse": operands.exact()["lse"]},
        operands.dtype,
        lse_faults(operands),
    )


def guards(subject: Subject) -> None:
    operands = make(subject, ids=some_empty)
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
    judge_results("a value is left unwritten where memory was not zero before", operands, got)


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
    sizes = several_items(subject.capability, subject.sizes)
    judge_stage(
        subject,
        "two batch items in one call: results do not depend on the neighbour",
        make(subject, sizes=sizes),
    )
    if sizes.batch > 1:
        _judge_neighbour(subject, sizes)
    in_chunks(subject, "rows in chunks", make(subject, sizes=sizes))


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
    own = {name: tensor[: sizes.keys if name in keys else sizes.rows] for name, tensor in wanted.items()}
    mine = {name: got[name][: len(tensor)] for name, tensor in own.items()}
    judge_results("results do not depend on the batch neighbour: its NaN came through", operands, mine, own)


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
        claim = f"gradients without {left_out}"
        judge_results(claim, operands, got, wanted)


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
        gradient_error=operands.gradient_error,
    )


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
    of_loss = stage in ("indexer_target", "indexer_loss")

    if stage.endswith("forward"):
        yield "lse", partial(lse, subject)
    if stage == "indexer_target":
        yield "lse given", partial(with_lse, subject)
    if not of_loss or "sparse" in capability.losses:
        if not cleaned:
            yield "holes", partial(holes, subject)
            yield "length", partial(past_length, subject)
        yield "empty rows", partial(empty_rows, subject)
        if subject.sizes.width > 2:
            yield "duplicates", partial(duplicates, subject)
        if capability.index_form == "any":
            yield "ids outside the keys", partial(outside_ids, subject)
    if of_loss and "dense" in capability.losses:
        if "ranges" in capability.bounds:
            yield "dense form", partial(dense.ranges, subject)
        if "causal" in capability.bounds:
            yield "dense form, causal", partial(dense.causal, subject)
    if stage == "indexer_loss":
        for kind in sorted(capability.losses):
            yield f"rows without mass, {kind}", partial(dense.without_mass, subject, kind == "sparse")
    if ACCUMULATORS.get(stage):
        yield "accumulators", partial(accumulates, subject)
        yield "many rows on one key", partial(accuracy.many_rows, subject)
    else:
        yield "long rows", partial(accuracy.long_rows, subject)
    if stage == "indexer_loss" or (stage.endswith("backward") and capability.partial_gradients):
        yield "unneeded gradients", partial(unneeded, subject)
    yield from common_checks(subject)
    for dtype in sorted(capability.dtypes):
        yield f"values {dtype}", partial(values, subject, dtype)
    yield "large scores", partial(accuracy.large_scores, subject)
    if capability.gradient_error:
        dtype = accuracy.coarsest_dtype(capability)
        yield f"large scores {dtype}", partial(accuracy.large_scores, subject, dtype)
    yield "chunks and batch", partial(chunks, subject)
    yield from tile_checks(subject)


def common_checks(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is checked alike for every stage that ``make`` can make operands for."""
    yield "guard rows", partial(guards, subject)
    yield "inputs unmodified", partial(unmodified, subject)
    yield "earlier calls", partial(repeatable, subject)
    yield "strided rows", partial(strided, subject)
    if subject.capability.deterministic:
        yield "deterministic", partial(accuracy.deterministic, subject)
    if subject.device.type == "cuda" and subject.capability.capture_safe:
        yield "no synchronisation", partial(no_synchronisation, subject)
