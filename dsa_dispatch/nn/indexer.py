"""``Indexer``: scores every key for every row, selects the best, and learns from its own loss only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._operations.indexer import run_fused_qk_topk, run_fused_qk_topk_with_loss
from dsa_dispatch.errors import ConfigError, InvalidInputError
from dsa_dispatch.nn.checks import check_rope, check_sizes
from dsa_dispatch.nn.keys import IndexKey, PooledIndexKey
from dsa_dispatch.nn.pools import expand_pools, pool_ends
from dsa_dispatch.nn.rope import Rope, rotate


class Selection(NamedTuple):
    """The keys each row attends to, a value that layers pass on: ``indices [b, s, W]`` int32, valid ids first, then
    -1; ``length [b, s]`` int32. ``loss`` is the indexer's, or None."""

    indices: Tensor
    length: Tensor
    loss: Tensor | None = None

    def shared(self) -> Selection:
        """For the next layer: the indices, and not the loss, which counts once."""
        return Selection(self.indices, self.length)


@dataclass(frozen=True, slots=True)
class Teacher:
    """The attention an indexer learns from: absorbed ``query [s, b, h, dqk]`` and ``key [sk, b, 1, dqk]``."""

    query: Tensor
    key: Tensor
    softmax_scale: float
    loss_coeff: float = 1.0
    sparse_loss: bool = True
    valid_rows: Tensor | None = None


class Indexer(nn.Module):
    """Lightning indexer (DeepSeek-V3.2): ``score[i, j] = sum_h w[i, h] * relu(q[i, h] . k[j])``, the best ``topk``
    kept.

    ``rope`` rotates the first channels of q and k, as many as the angles given to ``forward`` have pairs for; None
    rotates nothing. With ``pool`` above 1 it scores complete pools of that many neighbouring keys, keeps
    ``topk // pool`` of them and adds the row's incomplete pool (GLM-5.3-Flash): the width is ``topk + pool - 1``.
    The Hadamard rotation some models apply to q and k leaves their products as they are, and is left out.
    Raises ``ConfigError`` for sizes that do not fit or are below 1, and for an unknown ``rope``.
    """

    def __init__(
        self,
        hidden: int,
        query_rank: int,
        *,
        heads: int,
        channels: int,
        topk: int,
        rope: Rope | None = None,
        pool: int = 1,
        use_relu: bool = True,
        row_chunk: int = 4096,
    ) -> None:
        super().__init__()
        check_sizes(
            "Indexer",
            hidden=hidden,
            query_rank=query_rank,
            heads=heads,
            channels=channels,
            topk=topk,
            pool=pool,
        )
        check_rope("Indexer", rope)
        if rope is not None and pool > 1:
            raise ConfigError(
                f"Indexer: got rope {rope!r} and pool {pool}; keys of pools have no position to rotate by"
            )
        if topk % pool:
            raise ConfigError(f"Indexer: topk {topk} is not a multiple of pool {pool}")
        self.heads, self.channels, self.topk = heads, channels, topk
        self.rope, self.pool, self.use_relu = rope, pool, use_relu
        self.query = nn.Linear(query_rank, heads * channels, bias=False)
        self.head_weights = nn.Linear(hidden, heads, bias=False)
        self.key = (
            IndexKey(hidden, channels, rope=rope, row_chunk=row_chunk)
            if pool == 1
            else PooledIndexKey(hidden, channels, pool, row_chunk=row_chunk)
        )

    @property
    def width(self) -> int:
        """Index width of the selection."""
        return self.topk + self.pool - 1

    def forward(
        self,
        hidden: Tensor,
        query_latent: Tensor,
        angles: Tensor | None = None,
        *,
        teacher: Teacher | None = None,
        starts: Tensor | None = None,
        ends: Tensor | None = None,
        config: Any = None,
    ) -> Selection:
        """``hidden [s, b, hidden]``, ``query_latent [s, b, query_rank]``, ``angles`` as in ``rotate``.

        Both inputs are detached: the indexer must not steer the model. Bounds and ``config`` as in
        ``run_fused_qk_topk``. With a ``teacher`` the selection has a loss. Raises ``InvalidInputError`` for bounds or a
        teacher beside pools: pools begin at key 0, and a teacher weighs keys.
        """
        if (self.rope is None) != (angles is None):
            raise InvalidInputError(
                f"Indexer: rope is {self.rope!r}, angles {'given' if angles is not None else 'None'}"
            )
        hidden, query_latent = hidden.detach(), query_latent.detach()
        q = self.query(query_latent).unflatten(-1, (self.heads, self.channels))
        if self.rope is not None and angles is not None:
            q = rotate(q, angles, self.rope)
        # Under CUDA's autocast a norm is fp32 beside projections in bf16.
        k = self.key(hidden, angles).to(q.dtype)
        weights = self.head_weights(hidden)
        weights = weights.to(accumulation_dtype(weights.dtype)) * (self.heads * self.channels) ** -0.5
        if self.pool > 1:
            if teacher is not None or starts is not None or ends is not None:
                raise InvalidInputError(
                    "Indexer: a pooled indexer selects causally from key 0 and has no loss: pass neither bounds nor a "
                    "teacher"
                )
            return self._select_pools(q, k, weights, hidden.shape[0], config)
        if teacher is None:
            chosen = run_fused_qk_topk(config, q, k, weights, self.topk, starts, ends, use_relu=self.use_relu)
            return Selection(chosen.indices, chosen.length)
        return Selection(
            *run_fused_qk_topk_with_loss(
                config, q, k, weights, self.topk, starts, ends, None, teacher.query.detach(), teacher.key.detach(),
                teacher.softmax_scale, teacher.loss_coeff, query_valid_rows=teacher.valid_rows,
                use_relu=self.use_relu, sparse_loss=teacher.sparse_loss,
            )
        )  # fmt: skip

    def _select_pools(self, q: Tensor, k: Tensor, weights: Tensor, keys: int, config: Any) -> Selection:
        rows = q.shape[0]
        ends = pool_ends(rows, keys, self.pool, q.device)
        chosen = run_fused_qk_topk(
            config,
            q,
            k,
            weights,
            self.topk // self.pool,
            torch.zeros_like(ends),
            ends,
            use_relu=self.use_relu,
        )
        return Selection(
            *expand_pools(chosen.indices, chosen.length, keys, self.pool, row_chunk=self.key.row_chunk)
        )
