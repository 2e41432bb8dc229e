"""The value up-projection of ``run_fused_dsa_attention``: an op, so that autocast reaches neither it nor its
backward."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_dispatch._execution.run import opaque


@opaque
def project_up(out: Tensor, weight: Tensor) -> Tensor:
    """``out [sq, b, h, dv]``, ``weight [h, vh, dv]`` -> ``[sq, b, h * vh]``."""
    return torch.einsum("sbhc,hdc->sbhd", out, weight).flatten(2).contiguous()


def fake_project_up(out: Tensor, weight: Tensor) -> Tensor:
    return out.new_empty((*out.shape[:2], weight.shape[0] * weight.shape[1]))


@opaque
def project_up_backward(
    gradient: Tensor, out: Tensor, weight: Tensor, need_out: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of ``out`` and ``weight``; a zero-size tensor stands for one that is not needed."""
    per_head = gradient.unflatten(2, weight.shape[:2])  # untyped in torch
    d_out = out.new_empty(0)
    d_weight = weight.new_empty(0)
    if need_out:
        d_out = torch.einsum("sbhd,hdc->sbhc", per_head, weight).contiguous()
    if need_weight:
        d_weight = torch.einsum("sbhd,sbhc->hdc", per_head, out).contiguous()
    return d_out, d_weight


def fake_project_up_backward(
    gradient: Tensor, out: Tensor, weight: Tensor, need_out: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    return out.new_empty(out.shape if need_out else (0,)), weight.new_empty(
        weight.shape if need_weight else (0,)
    )
