"""Two faults that compute-sanitizer must find with the command that finds none in the kernels of this library.

``write``: one row behind the end (memcheck). ``read``: one row that nobody wrote (initcheck).
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

ROWS, CHANNELS = 5, 512


@triton.jit
def one_row_too_many_kernel(source, to, rows, CHANNELS: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, CHANNELS)
    values = tl.load(source + row * CHANNELS + offs, mask=(row < rows) & (offs < CHANNELS), other=1.0)
    tl.store(to + row * CHANNELS + offs, values)


@triton.jit
def copy_kernel(source, to, CHANNELS: tl.constexpr):
    place = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    tl.store(to + place, tl.load(source + place))


def main() -> None:
    filled = torch.ones(ROWS, CHANNELS, device="cuda")
    to = torch.empty(ROWS, CHANNELS, device="cuda")
    if sys.argv[1] == "write":
        one_row_too_many_kernel[(ROWS + 1,)](filled, to, ROWS, CHANNELS=CHANNELS)
    else:
        copy_kernel[(ROWS - 1,)](filled, to, CHANNELS=CHANNELS)
        copy_kernel[(ROWS,)](to, filled, CHANNELS=CHANNELS)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
