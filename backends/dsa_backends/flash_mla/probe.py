"""What a provider says about a row whose answer is known: its lse base, its empty row, its output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from dsa_backends.flash_mla.slots import LN2, on_device

HEADS: Final = 64
CHANNELS: Final = 576
VALUE_CHANNELS: Final = 512
WIDTH: Final = 128
BASES: Final = ((LN2, 1.0), (1.0, LN2))
"""lse of two equal scores of zero, in the natural base and in base 2, with what converts it."""


class ProbeError(Exception):
    def __init__(self, found: str, wanted: str) -> None:
        super().__init__(f"got {found}, expected {wanted}")
        self.found = found
        self.wanted = wanted


def lse_to_natural(
    run: Callable[[Tensor, Tensor, Tensor, float, int, Tensor], tuple[Tensor, Tensor]], device: torch.device
) -> float:
    """The factor that makes the provider's lse natural. Raises ``ProbeError``.

    Read from a zero query over two keys: releases of one kernel have said 0.6931 and 1.0 for it, and their
    documentation the other.
    """
    q = torch.zeros(2, HEADS, CHANNELS, dtype=torch.bfloat16, device=device)
    kv = torch.zeros(3, 1, CHANNELS, dtype=torch.bfloat16, device=device)
    kv[0], kv[1], kv[2] = 1.0, 3.0, torch.nan
    ids = torch.full((2, 1, WIDTH), -1, dtype=torch.int32, device=device)
    ids[0, 0, 0], ids[0, 0, 2] = 0, 1
    length = torch.tensor([3, 0], dtype=torch.int32, device=device)
    with on_device(q):
        out, lse = run(q, kv, ids, 0.5, VALUE_CHANNELS, length)
    if out.shape != (2, HEADS, VALUE_CHANNELS) or lse.shape != (2, HEADS):
        raise ProbeError(
            f"shapes {list(out.shape)} and {list(lse.shape)}",
            f"out {[2, HEADS, VALUE_CHANNELS]} and lse {[2, HEADS]}",
        )
    values = out.float().cpu()
    if not torch.equal(values[0], torch.full_like(values[0], 2.0)):
        raise ProbeError(f"{float(values[0, 0, 0])} as the mean of two values", "2.0")
    if not torch.equal(values[1], torch.zeros_like(values[1])):
        raise ProbeError(f"{float(values[1, 0, 0])} for a row without a key", "0.0")
    logarithms = lse.float().cpu()
    if not bool(logarithms[1].isinf().all()):
        raise ProbeError(f"lse {float(logarithms[1, 0])} for a row without a key", "an infinity")
    for known, factor in BASES:
        if all(math.isclose(value, known, abs_tol=1e-4) for value in logarithms[0].tolist()):
            return factor
    raise ProbeError(f"lse {float(logarithms[0, 0]):.4f} for two equal scores of zero", "0.6931 or 1.0")
