"""What holds for every stage that sums over keys: one function per claim of the contract, each called with a stage."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._stages import BACKWARD_STAGES
from dsa_dispatch.testing import accuracy, dense
from dsa_dispatch.testing.dense import in_chunks
from dsa_dispatch.testing.guards import GuardedAllocations
from dsa_dispatch.testing.judge import ConformanceError, Faults, bits, compare, same, unchanged
from dsa_dispatch.testing.operands import (
    ACCUMULATORS,
    Operands,
    Subject,
    clean_ids,
    exact_results,
    make,
)
from dsa_dispatch.testing.sizes import Sizes, several_items
from dsa_dispatch.testing.slots import (
    doubled,
    duplicates,
    empty_rows,
    holes,
    outside,
    outside_ids,
    past_length,
    past_length_ids,
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
    """In every form a call can have, since each may be another path of a kernel; and the random state, which dropout
    elsewhere in a model draws from."""
    for form, operands in _forms(subject):
        handed = {name: tensor for name, tensor in operands.given.items() if tensor is not None}
        copies = {name: tensor.clone() for name, tensor in handed.items()}
        random = _random_state(subject.device)
        run_stage(subject, operands)
        changed = [
            name for name, tensor in handed.items() if not torch.equal(bits(tensor), bits(copies[name]))
        ]
        if changed:
            raise ConformanceError(f"inputs are not modified: it changed {', '.join(changed)} ({form})")
        if not torch.equal(random, _random_state(subject.device)):
            raise ConformanceError(f"the random state of torch is left alone: it changed ({form})")


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _forms(subject: Subject) -> Iterator[tuple[str, Operands]]:
    capability = subject.capability
    dense_too = subject.stage in ("indexer_target", "indexer_loss") and "dense" in capability.losses
    if subject.stage == "indexer_topk":
        yield "plain", make(subject)
    elif not dense_too or "sparse" in capability.losses:
        yield "keys named twice", make(subject, ids=doubled)
        yield "rows without a key", make(subject, ids=some_empty)
        if capability.index_form == "any":
            yield "ids outside the keys", make(subject, ids=outside)
    if dense_too:
        for bounds in sorted(capability.bounds):
            yield f"dense form, {bounds}", make(subject, sparse=False, bounds=bounds)
    if subject.stage in BACKWARD_STAGES and capability.partial_gradients:
        yield "without the gradient of the query", make(subject, need={"dq": False})
    if capability.deterministic and (subject.stage != "indexer_topk" or capability.tie_rule == "lower_index"):
        yield "deterministic", make(subject, ids=doubled, deterministic=True)


def repeatable(subject: Subject) -> None:
    """The same call again, with one on NaN, one of other lengths and one on other values in between."""
    claim = "results do not depend on earlier calls"
    first = run_stage(subject, make(subject))
    sums = ACCUMULATORS.get(subject.stage, {})
    kept = {name: tensor.clone() for name, tensor in first.items() if name not in sums}
    other = make(subject, seed=5, amplify=torch.nan)
    run_stage(subject, other)
    sizes = subject.sizes
    run_stage(subject, make(subject, sizes=dataclasses.replace(sizes, rows=1), seed=6))
    judge_stage(subject, claim, make(subject, seed=7))
    unchanged(claim, first, kept)
    second = run_stage(subject, make(subject))
    same(claim, {name: tensor for name, tensor in first.items() if name not in sums}, second)
    # Their order may change from run to run, so that they are equal up to rounding alone.
    again = make(subject)
    judge_results(claim, again, {name: tensor for name, tensor in second.items() if name in sums})


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


STRIDED = ("q", "k", "v", "w", "out", "dout", "lse", "mass")
"""What the core may hand over strided; ids, lengths and bounds it always makes anew."""


def strided(subject: Subject) -> None:
    for losses in _loss_forms(subject):
        operands = make(subject, ids=some_empty, sparse=losses)
        given = dict(operands.given)
        for name in STRIDED:
            tensor = given.get(name)
            if tensor is not None and tensor.dim() > 1:
                wide = torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=1)
                given[name] = wide[:, 0]
        claim = "tensors may be strided in their first dimension"
        judge_stage(subject, claim, dataclasses.replace(operands, given=given))


def _loss_forms(subject: Subject) -> list[bool | None]:
    """Whether sparse, for each declared form of a loss; None where there is one form alone."""
    if subject.stage not in ("indexer_target", "indexer_loss"):
        return [None]
    return [kind == "sparse" for kind in sorted(subject.capability.losses)]


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
    faults: Faults = {f"{' and '.join(names)} overwritten instead of added to": lambda: overwritten}
    claim = "accumulators are added into, never overwritten"
    judge_results(claim, operands, got, wanted, faults=faults)


def with_lse(subject: Subject) -> None:
    claim = "values with the lse of the attention given"
    if "sparse" in subject.capability.losses:
        for ids in (clean_ids, past_length_ids, some_empty):
            judge_stage(subject, claim, _lse_given(subject, make(subject, ids=ids)))
    if "dense" in subject.capability.losses:
        for bounds in sorted(subject.capability.bounds):
            operands = make(subject, sparse=False, bounds=bounds, poison=True)
            judge_stage(subject, f"{claim}, dense form, {bounds}", _lse_given(subject, operands))


def _lse_given(subject: Subject, operands: Operands) -> Operands:
    plain = {"q": operands.plain["q"], "k": operands.plain["k"]}
    host = {**operands.host, "v_channels": 1}
    lse = exact_results("attention_forward", plain, operands.ids, host)["lse"]
    kind: torch.dtype = getattr(torch, operands.dtype)
    given = {**operands.given, "lse": lse.to(subject.device, accumulation_dtype(kind))}
    return dataclasses.replace(operands, given=given)


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
    """The checks that apply to an attention, target or loss stage, with their names: what a stage does, in every type
    that it declares; where it declares equal bits, on that path too; and the slow ones in two types."""
    first, *others = subject.in_types()
    yield from _behaviour(first)
    for other in others:
        yield from ((f"{name} {other.dtype}", check) for name, check in _behaviour(other))
    if subject.capability.deterministic:
        for one in subject.sharp_and_coarse():
            held = dataclasses.replace(one, deterministic=True)
            yield from (
                (f"deterministic {one.dtype}, {name}", check) for name, check in _deterministic_path(held)
            )
    for dtype in sorted(subject.capability.dtypes):
        yield f"values {dtype}", partial(values, subject, dtype)
    if ACCUMULATORS.get(subject.stage):
        yield "many rows on one key", partial(accuracy.many_rows, subject)
    else:
        yield "long rows", partial(accuracy.long_rows, subject)
    if subject.device.type == "cuda" and subject.capability.capture_safe:
        yield "no synchronisation", partial(no_synchronisation, subject)
    yield from tile_checks(subject)


def _behaviour(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    stage, capability = subject.stage, subject.capability
    if stage.endswith("forward"):
        yield "lse", partial(lse, subject)
    if stage == "indexer_target":
        yield "lse given", partial(with_lse, subject)
    yield from _slot_checks(subject)
    if stage == "indexer_loss":
        for kind in sorted(capability.losses):
            yield f"rows without mass, {kind}", partial(dense.without_mass, subject, kind == "sparse")
    if ACCUMULATORS.get(stage):
        yield "accumulators", partial(accumulates, subject)
    if stage == "indexer_loss" or (stage in BACKWARD_STAGES and capability.partial_gradients):
        yield "unneeded gradients", partial(unneeded, subject)
    yield "guard rows", partial(guards, subject)
    yield "inputs unmodified", partial(unmodified, subject)
    yield "earlier calls", partial(repeatable, subject)
    yield "strided rows", partial(strided, subject)
    if capability.deterministic:
        yield "deterministic", partial(accuracy.deterministic, subject)
    yield "large scores", partial(accuracy.large_scores, subject)
    yield "chunks and batch", partial(chunks, subject)


def _slot_checks(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    """Which keys count."""
    stage, capability = subject.stage, subject.capability
    of_loss = stage in ("indexer_target", "indexer_loss")
    if not of_loss or "sparse" in capability.losses:
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


def _deterministic_path(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    yield from _slot_checks(subject)
    if ACCUMULATORS.get(subject.stage):
        yield "accumulators", partial(accumulates, subject)
    yield "guard rows", partial(guards, subject)
