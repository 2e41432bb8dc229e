"""Derivatives of the ops: each backward is an op of its own, and differentiable once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsa_dispatch._operations import library


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, indices, length, ctx.scale, ctx.v_channels, plan = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(query, key, indices, length, out, lse, plan)


def _attention(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    # Read once: a second read of saved_tensors raises under non-reentrant checkpointing.
    query, key, indices, length, out, lse, plan = ctx.saved_tensors
    need_dq, need_dkv = ctx.needs_input_grad[:2]
    dq, dkv = library.attention_backward(
        dout, query, key, indices, length, out, lse, ctx.scale, ctx.v_channels, need_dq, need_dkv, plan
    )
    return dq if need_dq else None, dkv if need_dkv else None, None, None, None, None, None


def _save_gqa(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, indices, length, ctx.scale, plan = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(query, key, value, indices, length, out, lse, plan)


def _gqa(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    query, key, value, indices, length, out, lse, plan = ctx.saved_tensors
    need = ctx.needs_input_grad[:3]
    gradients = library.gqa_backward(
        dout, query, key, value, indices, length, out, lse, ctx.scale, *need, plan
    )
    used = [gradient if wanted else None for gradient, wanted in zip(gradients, need, strict=True)]
    return *used, None, None, None, None


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, factor, dq, dk, dw = output
    ctx.mark_non_differentiable(factor, dq, dk, dw)
    # The gradients are saved in place of the inputs; the link, an input, leads a second derivative to them, and
    # so to an error: without it a gradient penalty would be taken for a constant.
    link = inputs[-2]
    ctx.save_for_backward(factor, link, dq, dk, dw)
    ctx.dtypes = [tensor.dtype for tensor in inputs[:3]]
    ctx.inputs = len(inputs)


def _loss(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
    factor, link, *unscaled = ctx.saved_tensors
    gradients = [
        library.scale_gradient(gradient, factor, upstream, link, dtype) if wanted else None
        for gradient, dtype, wanted in zip(unscaled, ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
    ]
    return *gradients, *([None] * (ctx.inputs - 3))


def _save_projection(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _projection(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    out, weight = ctx.saved_tensors
    need_out, need_weight = ctx.needs_input_grad
    d_out, d_weight = library.project_up_backward(gradient, out, weight, need_out, need_weight)
    return d_out if need_out else None, d_weight if need_weight else None


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return None


def _once(name: str) -> Any:
    def raise_second_derivative(ctx: Any, *gradients: Any) -> None:
        raise RuntimeError(
            f"{name} is once differentiable: a second derivative (create_graph=True) of these operations is not "
            f"implemented. Detach the gradient, or use a dense formula where a second derivative is needed."
        )

    return raise_second_derivative


def register() -> None:
    """Attach the derivatives; called once, when the library is imported."""
    name, lib = library.NAMESPACE, library.LIBRARY
    torch.library.register_autograd(
        f"{name}::attention_forward", _attention, setup_context=_save_attention, lib=lib
    )
    torch.library.register_autograd(f"{name}::gqa_forward", _gqa, setup_context=_save_gqa, lib=lib)
    torch.library.register_autograd(f"{name}::indexer_loss", _loss, setup_context=_save_loss, lib=lib)
    torch.library.register_autograd(
        f"{name}::project_up", _projection, setup_context=_save_projection, lib=lib
    )
    for op in ("attention_backward", "gqa_backward", "scale_gradient", "project_up_backward"):
        torch.library.register_autograd(f"{name}::{op}", _once(op), setup_context=_save_nothing, lib=lib)
