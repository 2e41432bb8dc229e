"""A row-wise function over a long sequence, in chunks of rows into one buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsa_dispatch._contract import accumulation_dtype

RowFunction = Callable[..., Tensor]
"""``function(x[first:stop], first, *parameters)``."""


def map_rows(
    function: RowFunction, x: Tensor, parameters: tuple[Tensor, ...], *, chunk: int, group: int = 1
) -> Tensor:
    """``function(x, 0, *parameters)``, where every ``group`` rows of ``x`` make one row of the result.

    Runs once forward and once backward over each row, ``chunk`` rows (a multiple of ``group``) at a time, into one
    buffer: of what lies between ``x`` and the result no more than a chunk exists, and nothing of it is saved. Gradients
    of ``parameters`` accumulate in fp32 (fp64). Compiled code runs the whole at once: it fuses what lies between, and a
    loop would be unrolled for one length.
    """
    if torch.compiler.is_compiling():
        return function(x, 0, *parameters)
    result: Tensor = _MapRows.apply(function, chunk, group, x, *parameters)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


def slices(rows: int, chunk: int) -> Iterator[slice]:
    """At least one, so that no rows give an empty result of the right shape."""
    for first in range(0, max(rows, 1), chunk):
        yield slice(first, min(first + chunk, rows))


def _group(rows: slice, group: int) -> slice:
    return slice(rows.start // group, rows.stop // group)


class _MapRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: RowFunction, chunk: int, group: int, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.function, ctx.chunk, ctx.group = function, chunk, group
        device = x.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.save_for_backward(x, *parameters)
        out: Tensor | None = None
        for rows in slices(x.shape[0], chunk):
            part = function(x[rows], rows.start, *parameters)
            if out is None:
                out = part.new_empty((x.shape[0] // group, *part.shape[1:]))
            out[_group(rows, group)] = part
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        need_x, *need = ctx.needs_input_grad[3:]
        dx = torch.empty_like(x) if need_x else None
        leaves = [parameter.detach().requires_grad_(n) for parameter, n in zip(parameters, need, strict=True)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        sums = [
            torch.zeros(leaf.shape, dtype=accumulation_dtype(leaf.dtype), device=leaf.device)
            for leaf in wanted
        ]
        device, dtype, enabled = ctx.autocast
        for rows in slices(x.shape[0], ctx.chunk):
            piece = x[rows].detach().requires_grad_(need_x)
            with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
                part = ctx.function(piece, rows.start, *leaves)
            inputs = [piece, *wanted] if need_x else wanted
            gradients = list(torch.autograd.grad(part, inputs, dout[_group(rows, ctx.group)]))
            if dx is not None:
                dx[rows] = gradients.pop(0)
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient
        made = iter(sums)
        return (
            None,
            None,
            None,
            dx,
            *(next(made).to(leaf.dtype) if leaf.requires_grad else None for leaf in leaves),
        )
