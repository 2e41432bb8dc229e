"""Which slots are keys: holes, lengths, empty rows, duplicates, ids outside; and how the usual faults answer them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsa_dispatch.testing.judge import Faults
from dsa_dispatch.testing.operands import ACCUMULATORS, Ids, Operands, Subject, clean_ids, exact_results, make
from dsa_dispatch.testing.sizes import Sizes
from dsa_dispatch.testing.stage_run import judge_stage

BESIDE = (
    "Only the rows beside the keys hold NaN: memory outside the keys was read (id -1 is the row before row 0)"
)
UNNAMED = "Only keys that no slot names hold NaN: such a key was read and not masked (0 * NaN is NaN)"


def _slot_faults(operands: Operands) -> Faults:
    """What backends with the usual faults give for these slots."""
    keys = operands.sizes.batch * operands.sizes.keys
    given, length = operands.given["indices"], operands.given["length"]
    assert given is not None
    assert length is not None
    slots, named = given.cpu().long(), operands.ids
    inside = torch.arange(slots.shape[1]) < length.cpu()[:, None]

    def filled(value: int) -> Tensor:
        return torch.where((named < 0) & inside, value, named)

    def zero_key() -> dict[str, Tensor]:
        plain = dict(operands.plain)
        for name in ("k", "v"):
            if name in plain:
                plain[name] = torch.cat([plain[name], torch.zeros_like(plain[name][:1])])
        results = exact_results(operands.stage, plain, filled(keys), operands.host)
        sums = ACCUMULATORS.get(operands.stage, {})
        return {name: tensor[:-1] if name in sums else tensor for name, tensor in results.items()}

    def once() -> Tensor:
        single = named.clone()
        for row in single:
            for slot in range(1, len(row)):
                if int(row[slot]) in row[:slot].tolist():
                    row[slot] = -1
        return single

    def all_slots() -> Tensor:
        return Ids(slots, torch.full((len(slots),), slots.shape[1])).named(keys)

    def none_is_all() -> Tensor:
        return torch.where((named < 0) & ~inside.any(1, keepdim=True), 0, named)

    return {
        "a hole counted as key 0": lambda: operands.exact(filled(0)),
        "a hole (id -1) read as the last key": lambda: operands.exact(filled(keys - 1)),
        "a hole counted as a key of zeros": zero_key,
        "the slots at and past `length` (topk_length) counted: length is ignored": lambda: operands.exact(
            all_slots()
        ),
        "length ignored, and id -1 read as key 0": lambda: operands.exact(torch.where(named < 0, 0, named)),
        "a length of 0 taken for a full row": lambda: operands.exact(none_is_all()),
        "a key that is named twice counted once": lambda: operands.exact(once()),
    }


def _slots(subject: Subject, claim: str, pattern: Callable[[Sizes, torch.Generator], Ids]) -> None:
    """First with ordinary numbers everywhere, so that a fault can be told by its answer; then among NaN."""
    operands = make(subject, ids=pattern)
    ids = pattern(operands.sizes, torch.Generator().manual_seed(0))
    for seed in subject.extent.seeds:
        operands = make(subject, ids=lambda *_: ids, seed=seed)
        judge_stage(subject, claim, operands, _slot_faults(operands), BESIDE)
    poisoned = make(subject, ids=lambda *_: ids, poison=True)
    claim = f"{claim}, with NaN in every key that no slot names and beside the keys"
    judge_stage(subject, claim, poisoned, nan_hint=UNNAMED)


def _holes(sizes: Sizes, generator: torch.Generator) -> Ids:
    ids = clean_ids(sizes, generator)
    # Key 0 is left out, and the last too: reading either for a hole then changes the answer.
    slots = ids.slots.clone()
    slots[(slots == 0) | (slots == sizes.keys - 1)] = -1
    slots[:, ::3] = -1
    return Ids(slots, torch.full_like(ids.length, sizes.width))


def past_length_ids(sizes: Sizes, generator: torch.Generator) -> Ids:
    ids = clean_ids(sizes, generator)
    return Ids(ids.slots, ids.length * torch.arange(len(ids.length)) // len(ids.length))


def some_empty(sizes: Sizes, generator: torch.Generator) -> Ids:
    ids = clean_ids(sizes, generator)
    slots, length = ids.slots.clone(), ids.length.clone()
    slots[0] = -1
    length[-1] = 0
    return Ids(slots, length)


def doubled(sizes: Sizes, generator: torch.Generator) -> Ids:
    ids = clean_ids(sizes, generator)
    slots, length = ids.slots.clone(), ids.length.clone()
    if sizes.keys == 2 < sizes.width:
        # Beside one key alone, gradients cancel and tell nothing.
        slots[:, 2], length[:] = slots[:, 0], 3
    elif sizes.keys > 2:
        slots[:, 1::2] = slots[:, 0:1]
    return Ids(slots, length)


def _far_or_near(far: bool) -> Callable[[Sizes, torch.Generator], Ids]:
    def pattern(sizes: Sizes, generator: torch.Generator) -> Ids:
        slots = _holes(sizes, generator).slots
        bad = [-1, sizes.keys, -2, sizes.keys + 1, -sizes.keys, sizes.keys + 7]
        if far:
            bad = [2**31 - 1, -(2**31), 2**31 - 2, -(2**31) + 1]
        holes = (slots < 0).nonzero()
        for number, (row, slot) in enumerate(holes.tolist()):
            slots[row, slot] = bad[number % len(bad)]
        return Ids(slots, torch.full((len(slots),), sizes.width))

    return pattern


outside = _far_or_near(far=False)
"""Ids just outside the keys."""


def holes(subject: Subject) -> None:
    _slots(subject, "holes: a slot with id -1 is no key", _holes)


def past_length(subject: Subject) -> None:
    _slots(subject, "length: a slot at or past the row's length (topk_length) is no key", past_length_ids)


def empty_rows(subject: Subject) -> None:
    _slots(subject, "empty rows: a row without a key gives 0, never NaN", some_empty)


def duplicates(subject: Subject) -> None:
    _slots(subject, "duplicates: a key that is named twice counts twice", doubled)


def outside_ids(subject: Subject) -> None:
    claim = "ids outside the keys: an id below 0 or at or above S is no key"
    _slots(subject, claim, outside)
    _slots(subject, f"{claim}, also near the ends of int32", _far_or_near(far=True))
