"""Absorbed multi-head latent attention over keys chosen by an indexer, built on the library's public functions.

Shapes are ``[rows, batch, ...]``: s rows, b batch, h heads, hi indexer heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import dsa_dispatch as dsa
from dsa_dispatch._quickstart.layers import Norm, Projection
from dsa_dispatch._quickstart.rotary import rotate
from dsa_dispatch._run_config import ModelShape


@dataclass(frozen=True, slots=True)
class Kernels:
    """How the library is to be called: its config, and what the indexer's loss needs beside the tensors."""

    config: Any = None
    """A ``DSAConfig`` or None."""
    loss_coeff: float = 1.0
    sparse_loss: bool = True
    dtype: torch.dtype = torch.float32
    """Type of the tensors handed to the kernels."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The keys each row attends to, as a value that layers pass on: ``indices [b, s, W]`` int32, ``length [b, s]``."""

    indices: Tensor
    length: Tensor


class Indexer(nn.Module):
    """Scores every key for every row and selects the best; learns from its own loss only."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.query = Projection(shape.q_lora_rank, shape.index_heads * shape.index_dim)
        self.key = Projection(shape.hidden, shape.index_dim)
        self.key_norm = nn.LayerNorm(shape.index_dim)
        # Scores that begin near zero give q and k next to no gradient, as it passes through the weights.
        self.head_weights = Projection(shape.hidden, shape.index_heads, gain=3.0)

    def forward(
        self, x: Tensor, low_rank_query: Tensor, query: Tensor, key: Tensor, angle: Tensor, kernels: Kernels
    ) -> tuple[Selection, Tensor | None]:
        """Select keys; in training also the loss of the scores against the attention that ``query`` and ``key`` make.

        ``x [s,b,hidden]``, ``low_rank_query [s,b,q_lora_rank]``, ``query [s,b,h,qk_width]``, ``key [s,b,1,qk_width]``.
        All four are detached: the indexer must not steer the model, nor its teacher the attention.
        """
        shape = self.shape
        x, low_rank_query = x.detach(), low_rank_query.detach()
        rows, batch = x.shape[:2]
        q = self._rotated(
            self.query(low_rank_query).view(rows, batch, shape.index_heads, shape.index_dim), angle
        ).to(kernels.dtype)
        k = self._rotated(self.key_norm(self.key(x)), angle).to(kernels.dtype)
        weights = self.head_weights(x) * (shape.index_heads**-0.5 * shape.index_dim**-0.5)
        if not self.training:
            chosen = dsa.run_fused_qk_topk(
                kernels.config, q, k, weights, shape.index_topk, use_relu=shape.index_relu
            )
            return Selection(chosen.indices, chosen.length), None
        chosen_with_loss = dsa.run_fused_qk_topk_with_loss(
            kernels.config,
            q,
            k,
            weights,
            shape.index_topk,
            None,
            None,
            None,
            query.detach(),
            key.detach(),
            shape.softmax_scale,
            kernels.loss_coeff,
            use_relu=shape.index_relu,
            sparse_loss=kernels.sparse_loss,
        )
        return Selection(chosen_with_loss.indices, chosen_with_loss.length), chosen_with_loss.loss

    def _rotated(self, x: Tensor, angle: Tensor) -> Tensor:
        turning, still = torch.split(
            x, [self.shape.qk_rope, self.shape.index_dim - self.shape.qk_rope], dim=-1
        )
        return torch.cat([rotate(turning, angle, self.shape.index_rope), still], dim=-1)


class SparseAttention(nn.Module):
    """MLA whose up-projections are absorbed: all heads share one latent key per token, which is the value as well.

    ``indexer`` is None in a layer that attends with the selection of another one.
    """

    def __init__(self, shape: ModelShape, *, computes: bool, output_gain: float) -> None:
        super().__init__()
        self.shape = shape
        heads, latent = shape.heads, shape.kv_lora_rank
        self.query_down = Projection(shape.hidden, shape.q_lora_rank)
        self.query_norm = Norm(shape.q_lora_rank)
        self.query_up = Projection(shape.q_lora_rank, heads * (shape.qk_nope + shape.qk_rope))
        self.key_down = Projection(shape.hidden, latent + shape.qk_rope)
        self.key_norm = Norm(latent)
        self.key_up = nn.Parameter(torch.randn(heads, shape.qk_nope, latent) * latent**-0.5)
        self.value_up = nn.Parameter(torch.randn(heads, shape.v_head, latent) * latent**-0.5)
        self.output = Projection(heads * shape.v_head, shape.hidden, output_gain)
        self.indexer = Indexer(shape) if computes else None

    def forward(
        self, x: Tensor, angle: Tensor, kernels: Kernels, shared: Selection | None
    ) -> tuple[Tensor, Selection, Tensor | None]:
        """``x [s,b,hidden]`` to the same shape, with the selection used and, in training, the indexer's loss."""
        shape = self.shape
        rows, batch = x.shape[:2]
        low_rank_query = self.query_norm(self.query_down(x))
        heads = self.query_up(low_rank_query).view(rows, batch, shape.heads, shape.qk_nope + shape.qk_rope)
        plain, turning = torch.split(heads, [shape.qk_nope, shape.qk_rope], dim=-1)
        absorbed = torch.einsum("sbhn,hnc->sbhc", plain, self.key_up)
        query = torch.cat([absorbed, rotate(turning, angle, shape.rope)], dim=-1).to(kernels.dtype)
        latent, turning = torch.split(self.key_down(x), [shape.kv_lora_rank, shape.qk_rope], dim=-1)
        key = torch.cat([self.key_norm(latent), rotate(turning, angle, shape.rope)], dim=-1)
        key = key.unsqueeze(2).to(kernels.dtype)
        loss = None
        if self.indexer is not None:
            shared, loss = self.indexer(x, low_rank_query, query, key, angle, kernels)
        if shared is None:
            raise ValueError("a layer without an indexer needs the selection of a layer before it")
        mixed = dsa.run_fused_absorbed_sparse_attention(
            kernels.config, query, key, shared.indices, shape.softmax_scale, shape.v_width, shared.length
        )
        value = torch.einsum("sbhc,hvc->sbhv", mixed, self.value_up.to(mixed.dtype))
        return self.output(value.flatten(2).to(x.dtype)), shared, loss
