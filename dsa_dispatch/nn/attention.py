"""The absorbed sparse attention core: what stands between a layer's projections."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsa_dispatch._operations.attention import run_fused_absorbed_sparse_attention
from dsa_dispatch._operations.validate import check_coefficient
from dsa_dispatch.errors import InvalidInputError
from dsa_dispatch.nn.checks import check_sizes
from dsa_dispatch.nn.indexer import Indexer, Selection, Teacher


class HeadLinear(nn.Module):
    """A linear map of its own for each head: ``[s, b, heads, inputs] -> [s, b, heads, outputs]``."""

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        check_sizes("HeadLinear", heads=heads, inputs=inputs, outputs=outputs)
        self.weight = nn.Parameter(torch.randn(heads, outputs, inputs) * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("sbhi,hoi->sbho", x, self.weight)


class AttentionOutput(NamedTuple):
    """``out [s, b, heads, v_head]``, and the selection it attended with, for layers that share it."""

    out: Tensor
    selection: Selection


class AbsorbedSparseAttention(nn.Module):
    """Multi-head latent attention over selected keys, its up-projections absorbed (DeepSeek-V2, V3.2).

    All heads share one key per token, ``[latent, rope]``, whose first ``latent`` channels are the value as well.
    ``indexer`` is None in a layer that only attends with the selection of another one. ``softmax_scale`` is that of the
    unabsorbed heads, ``(nope + rope) ** -0.5``: from the absorbed width it would be wrong. Raises ``ConfigError`` for
    sizes below 1.
    """

    def __init__(
        self,
        heads: int,
        nope: int,
        latent: int,
        v_head: int,
        *,
        softmax_scale: float,
        indexer: Indexer | None = None,
    ) -> None:
        super().__init__()
        check_sizes("AbsorbedSparseAttention", heads=heads, nope=nope, latent=latent, v_head=v_head)
        self.v_channels = latent
        self.softmax_scale = softmax_scale
        self.key_up = HeadLinear(heads, nope, latent)
        self.value_up = HeadLinear(heads, latent, v_head)
        self.indexer = indexer

    def forward(
        self,
        query_nope: Tensor,
        query_rope: Tensor | None,
        latent: Tensor,
        key_rope: Tensor | None,
        *,
        shared: Selection | None = None,
        hidden: Tensor | None = None,
        query_latent: Tensor | None = None,
        angles: Tensor | None = None,
        loss_coeff: float = 0.0,
        sparse_loss: bool = True,
        starts: Tensor | None = None,
        ends: Tensor | None = None,
        config: Any = None,
    ) -> AttentionOutput:
        """``query_nope [s, b, h, nope]``, ``query_rope [s, b, h, r]`` rotated, ``latent [s, b, latent]`` normed,
        ``key_rope [s, b, r]`` rotated; None and None without RoPE.

        Attends with ``shared`` where it is given, and then runs no indexer; else with what the indexer selects from
        ``hidden``, ``query_latent`` and ``angles`` (see ``Indexer.forward``), with its loss where ``loss_coeff`` is
        above 0. Raises ``InvalidInputError`` when there is neither a selection nor what one is made from, and for a
        ``loss_coeff`` below 0.
        """
        query, key = self.key_up(query_nope), latent
        if (query_rope is None) != (key_rope is None):
            missing = "query_rope" if query_rope is None else "key_rope"
            raise InvalidInputError(
                f"AbsorbedSparseAttention: {missing} is None and the other is not: give both rotated parts or neither"
            )
        if query_rope is not None and key_rope is not None:
            query, key = torch.cat([query, query_rope], dim=-1), torch.cat([key, key_rope], dim=-1)
        # Under CUDA's autocast a normed latent is fp32 beside projections in bf16.
        key = key.unsqueeze(2).to(query.dtype)
        if shared is None:
            if self.indexer is None or hidden is None or query_latent is None:
                raise InvalidInputError(
                    "AbsorbedSparseAttention: got no selection to share; give one with shared=, or a layer with an "
                    "indexer its hidden and query_latent"
                )
            teacher = None
            if check_coefficient(loss_coeff) > 0:
                teacher = Teacher(query, key, self.softmax_scale, loss_coeff, sparse_loss)
            selection = self.indexer(
                hidden, query_latent, angles, teacher=teacher, starts=starts, ends=ends, config=config
            )
        else:
            selection = shared
        mixed = run_fused_absorbed_sparse_attention(
            config, query, key, selection.indices, self.softmax_scale, self.v_channels, selection.length
        )
        return AttentionOutput(self.value_up(mixed), selection)
