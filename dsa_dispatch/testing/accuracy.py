"""What holds where rounding hurts: large scores, long sums, many queries on one key, and equal bits on demand."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from dsa_dispatch.testing.judge import same
from dsa_dispatch.testing.operands import Ids, Subject, make
from dsa_dispatch.testing.sizes import Sizes, coarsest_dtype, widths, within_limits
from dsa_dispatch.testing.stage_run import judge_stage, run_stage

AMPLIFIED = 30.0


def large_scores(subject: Subject) -> None:
    """Scores of a hundred and more, where a softmax is one key or two: here two, since gradients of a single one
    cancel and would show nothing but rounding."""
    sizes = subject.sizes
    sizes = dataclasses.replace(sizes, keys=min(sizes.keys, max(sizes.width, 2)))
    operands = make(subject, sizes=sizes, amplify=AMPLIFIED, adjust=_tie_in_pairs)
    claim = f"queries scaled by {AMPLIFIED:g} stay accurate (subtract the maximum)"
    judge_stage(subject, claim, operands)


def _tie_in_pairs(plain: dict[str, Tensor]) -> None:
    """Keys 2n and 2n + 1 differ in channel 0 alone, which no query looks at."""
    plain["q"][..., 0] = 0
    key = plain["k"]
    odd = key[1::2]
    own = odd[..., :1].clone()
    odd.copy_(key[0 : 2 * len(odd) : 2])
    odd[..., :1] = own


def long_rows(subject: Subject) -> None:
    """Equal scores over many keys: a sum in bf16 stops growing long before its end."""
    possible = widths(subject.capability.width)
    width = max((width for width in possible if width <= subject.extent.long_row), default=possible[0])
    sizes = dataclasses.replace(subject.sizes, width=width, keys=width, rows=2)
    dtype = coarsest_dtype(subject.capability)

    def every_key(sizes: Sizes, generator: torch.Generator) -> Ids:
        slots = (torch.arange(sizes.width) % sizes.keys).repeat(sizes.rows, 1)
        return Ids(slots, torch.full((sizes.rows,), sizes.width))

    def alike(plain: dict[str, Tensor]) -> None:
        for name in ("k", "v"):
            if name in plain:
                plain[name].copy_((plain[name].double() / 4 + 1).to(plain[name].dtype))

    sizes = within_limits(subject.capability, sizes)
    operands = make(subject, ids=every_key, sizes=sizes, dtype=dtype, amplify=0.01, adjust=alike)
    claim = f"sums over {sizes.width} keys run in fp32 (fp64 for fp64 inputs), not in {dtype}"
    judge_stage(subject, claim, operands)


def many_rows(subject: Subject) -> None:
    """Many queries on one key: its gradient must be summed in fp32."""
    native = subject.sizes
    width = widths(subject.capability.width)[0]
    sizes = dataclasses.replace(native, rows=subject.extent.many_rows, keys=2, width=width)
    sizes = within_limits(subject.capability, sizes)

    def one_key(sizes: Sizes, generator: torch.Generator) -> Ids:
        slots = torch.full((sizes.rows, sizes.width), -1)
        slots[:, 0] = sizes.keys - 1
        if sizes.width > 1:
            slots[::2, 1] = 0
        return Ids(slots, torch.full((sizes.rows,), min(sizes.width, 2)))

    operands = make(subject, ids=one_key, sizes=sizes, dtype=coarsest_dtype(subject.capability))
    claim = f"the gradient of one key over {sizes.rows} queries is summed in fp32 (fp64 for fp64 inputs)"
    judge_stage(subject, claim, operands)


def deterministic(subject: Subject) -> None:
    """``options.deterministic``: equal bits again and again, accumulators included."""
    sizes = dataclasses.replace(subject.sizes, rows=subject.extent.repeated_rows)
    sizes = within_limits(subject.capability, sizes)
    first = run_stage(subject, make(subject, sizes=sizes, deterministic=True))
    for _ in range(2):
        again = run_stage(subject, make(subject, sizes=sizes, deterministic=True))
        same("deterministic=True gives equal bits every time", first, again)
