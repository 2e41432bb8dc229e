"""What a provider says about rows whose answer is known: its lse base, its empty row, its output, and whether it reads
keys past a row's length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dsa_backends.flash_mla.slots import LN2, on_device

HEADS: Final = 64
CHANNELS: Final = 576
VALUE_CHANNELS: Final = 512
WIDTH: Final = 128
ROWS: Final = 3
BASES: Final = ((LN2, 1.0), (1.0, LN2))
"""lse of two equal scores of zero, in the natural base and in base 2, with what converts it."""


class ProbeError(Exception):
    def __init__(self, found: str, wanted: str) -> None:
        super().__init__(f"got {found}, expected {wanted}")
        self.found = found
        self.wanted = wanted


@dataclass(frozen=True, slots=True)
class Answer:
    """What the provider is known by."""

    lse_factor: float
    """What turns its lse into the natural logarithm."""
    ends_at_length: bool
    """An id at or past its row's length is not read, whatever it names."""


def ask(
    run: Callable[[Tensor, Tensor, Tensor, float, int, Tensor], tuple[Tensor, Tensor]], device: torch.device
) -> Answer:
    """Raises ``ProbeError``.

    The base is read from a zero query over two keys: releases of one kernel have said 0.6931 and 1.0 for it, and their
    documentation the other. Whether a length ends a row is read from a key of NaN in every slot past it: kernels that
    load a whole tile spread it through a probability of zero.
    """
    q = torch.zeros(ROWS, HEADS, CHANNELS, dtype=torch.bfloat16, device=device)
    kv = torch.zeros(3, 1, CHANNELS, dtype=torch.bfloat16, device=device)
    kv[0], kv[1], kv[2] = 1.0, 3.0, torch.nan
    ids = torch.full((ROWS, 1, WIDTH), -1, dtype=torch.int32, device=device)
    ids[0, 0, 0], ids[0, 0, 2] = 0, 1
    ids[2], ids[2, 0, 0] = 2, 0
    length = torch.tensor([3, 0, 1], dtype=torch.int32, device=device)
    with on_device(q):
        out, lse = run(q, kv, ids, 0.5, VALUE_CHANNELS, length)
    if out.shape != (ROWS, HEADS, VALUE_CHANNELS) or lse.shape != (ROWS, HEADS):
        raise ProbeError(
            f"shapes {list(out.shape)} and {list(lse.shape)}",
            f"out {[ROWS, HEADS, VALUE_CHANNELS]} and lse {[ROWS, HEADS]}",
        )
    values = out.float().cpu()
    if not torch.equal(values[0], torch.full_like(values[0], 2.0)):
        raise ProbeError(f"{float(values[0, 0, 0])} as the mean of two values", "2.0")
    if not torch.equal(values[1], torch.zeros_like(values[1])):
        raise ProbeError(f"{float(values[1, 0, 0])} for a row without a key", "0.0")
    logarithms = lse.float().cpu()
    if not bool(logarithms[1].isinf().all()):
        raise ProbeError(f"lse {float(logarithms[1, 0])} for a row without a key", "an infinity")
    ends = torch.equal(values[2], torch.ones_like(values[2])) and not bool(logarithms[2].any())
    for known, factor in BASES:
        if all(math.isclose(value, known, abs_tol=1e-4) for value in logarithms[0].tolist()):
            return Answer(factor, ends)
    raise ProbeError(f"lse {float(logarithms[0, 0]):.4f} for two equal scores of zero", "0.6931 or 1.0")
