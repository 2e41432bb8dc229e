"""Absorbed multi-head latent attention over keys chosen by an indexer, around the modules of ``dsa_dispatch.nn``.

Shapes are ``[rows, batch, ...]``: s rows, b batch, h heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsa_dispatch._quickstart.layers import Norm, Projection
from dsa_dispatch._run_config import ModelShape
from dsa_dispatch.nn import AbsorbedSparseAttention, AttentionOutput, Indexer, Selection, rotate


@dataclass(frozen=True, slots=True)
class Kernels:
    """How the library is to be called: its config, and what the indexer's loss needs beside the tensors."""

    config: Any = None
    """A ``DSAConfig`` or None."""
    loss_coeff: float = 1.0
    sparse_loss: bool = True
    dtype: torch.dtype = torch.float32
    """Type of the tensors handed to the kernels."""


def indexer_of(shape: ModelShape) -> Indexer:
    indexer = Indexer(
        shape.hidden,
        shape.q_lora_rank,
        heads=shape.index_heads,
        channels=shape.index_dim,
        topk=shape.index_topk,
        rope=None if shape.index_rope == "none" else shape.index_rope,
        use_relu=shape.index_relu,
    )
    nn.init.normal_(indexer.query.weight, std=shape.q_lora_rank**-0.5)
    # Scores that begin near zero give q and k next to no gradient, as it passes through the weights.
    nn.init.normal_(indexer.head_weights.weight, std=3.0 * shape.hidden**-0.5)
    return indexer


class SparseAttention(nn.Module):
    """MLA whose up-projections are absorbed. One that does not compute attends with another layer's selection."""

    def __init__(self, shape: ModelShape, *, computes: bool, output_gain: float) -> None:
        super().__init__()
        self.shape = shape
        self.query_down = Projection(shape.hidden, shape.q_lora_rank)
        self.query_norm = Norm(shape.q_lora_rank)
        self.query_up = Projection(shape.q_lora_rank, shape.heads * (shape.qk_nope + shape.qk_rope))
        self.key_down = Projection(shape.hidden, shape.kv_lora_rank + shape.qk_rope)
        self.key_norm = Norm(shape.kv_lora_rank)
        self.core = AbsorbedSparseAttention(
            shape.heads,
            shape.qk_nope,
            shape.kv_lora_rank,
            shape.v_head,
            softmax_scale=shape.softmax_scale,
            indexer=indexer_of(shape) if computes else None,
        )
        # Absorbed, it maps into the latent and keeps its variance.
        nn.init.normal_(self.core.key_up.weight, std=shape.kv_lora_rank**-0.5)
        self.output = Projection(shape.heads * shape.v_head, shape.hidden, output_gain)

    def forward(
        self, x: Tensor, angles: Tensor, kernels: Kernels, shared: Selection | None
    ) -> AttentionOutput:
        """``x [s,b,hidden]`` to the same shape, with the selection used; in training, one made here has a loss."""
        shape = self.shape
        query_latent = self.query_norm(self.query_down(x))
        heads = self.query_up(query_latent).unflatten(-1, (shape.heads, shape.qk_nope + shape.qk_rope))
        query, query_rope = torch.split(heads, [shape.qk_nope, shape.qk_rope], dim=-1)
        latent, key_rope = torch.split(self.key_down(x), [shape.kv_lora_rank, shape.qk_rope], dim=-1)
        rope = shape.rope  # a name of its own, which the type checker narrows
        out, selection = self.core(
            query,
            None if rope == "none" else rotate(query_rope, angles, rope),
            self.key_norm(latent),
            None if rope == "none" else rotate(key_rope, angles, rope),
            shared=shared,
            hidden=x,
            query_latent=query_latent,
            angles=None if shape.index_rope == "none" else angles,
            loss_coeff=kernels.loss_coeff if self.training else 0.0,
            sparse_loss=kernels.sparse_loss,
            config=kernels.config,
        )
        return AttentionOutput(self.output(out.flatten(2).to(x.dtype)), selection)
