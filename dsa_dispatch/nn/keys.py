"""Index keys: projected once per pass, in row chunks into one buffer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch.nn.checks import check_rope, check_sizes
from dsa_dispatch.nn.rope import Rope, rotate
from dsa_dispatch.nn.row_chunks import map_rows


class IndexKey(nn.Module):
    """``rotate(LayerNorm(hidden @ weight.T))``, shared by all heads of the indexer (DeepSeek-V3.2).

    The parameters are this module's own and not a Linear's and a LayerNorm's: a hook that gathers them runs once per
    pass, whatever the number of chunks. Raises ``ConfigError`` for sizes below 1 and an unknown ``rope``.
    """

    def __init__(
        self,
        hidden: int,
        channels: int,
        *,
        rope: Rope | None = None,
        row_chunk: int = 4096,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        check_sizes("IndexKey", hidden=hidden, channels=channels, row_chunk=row_chunk)
        check_rope("IndexKey", rope)
        self.rope = rope
        self.row_chunk = row_chunk
        self.eps = eps
        self.weight = nn.Parameter(torch.randn(channels, hidden) * hidden**-0.5)
        self.norm_weight = nn.Parameter(torch.ones(channels))
        self.norm_bias = nn.Parameter(torch.zeros(channels))

    def forward(self, hidden: Tensor, angles: Tensor | None = None) -> Tensor:
        """``hidden [s, b, hidden]``, ``angles`` as in ``rotate`` -> ``[s, b, channels]``."""

        def project(x: Tensor, first: int, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
            key = self.normed(x, weight, scale, bias)
            if self.rope is None or angles is None:
                return key
            return rotate(key, angles.narrow(0, first, x.shape[0]), self.rope)

        parameters = (self.weight, self.norm_weight, self.norm_bias)
        return map_rows(project, hidden, parameters, chunk=self.row_chunk)

    def normed(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(F.linear(x, weight), scale.shape, scale, bias, self.eps)


class PooledIndexKey(IndexKey):
    """One key per pool of ``pool`` neighbouring rows, as in GLM-5.3-Flash (``index_kpool``), without RoPE.

    ``key[p, c] = sum_j softmax_j(gate[4 p + j, c] + position[j, c]) * k[4 p + j, c]`` for a pool of 4, with ``k`` as
    in ``IndexKey`` and ``gate = hidden @ gate_weight.T``: the softmax is over the rows of a pool, for each channel.
    Only complete pools have a key; they begin at row 0, so a sequence must stand there without padding before it.
    """

    def __init__(
        self, hidden: int, channels: int, pool: int, *, row_chunk: int = 4096, eps: float = 1e-6
    ) -> None:
        check_sizes("PooledIndexKey", pool=pool, row_chunk=row_chunk)
        super().__init__(hidden, channels, row_chunk=max(row_chunk // pool, 1) * pool, eps=eps)
        self.pool = pool
        self.gate_weight = nn.Parameter(torch.randn(channels, hidden) * hidden**-0.5)
        self.position = nn.Parameter(torch.zeros(pool, channels))

    def forward(self, hidden: Tensor, angles: Tensor | None = None) -> Tensor:
        """``hidden [s, b, hidden]`` -> ``[s // pool, b, channels]``."""

        def project(
            x: Tensor, first: int, weight: Tensor, scale: Tensor, bias: Tensor, gate: Tensor, position: Tensor
        ) -> Tensor:
            key = self.pools(self.normed(x, weight, scale, bias))
            wide = accumulation_dtype(key.dtype)
            logits = self.pools(F.linear(x, gate)).to(wide) + position[:, None].to(wide)
            return (logits.softmax(1) * key.to(wide)).sum(1).to(key.dtype)

        complete = hidden[: hidden.shape[0] // self.pool * self.pool]
        parameters = (self.weight, self.norm_weight, self.norm_bias, self.gate_weight, self.position)
        return map_rows(project, complete, parameters, chunk=self.row_chunk, group=self.pool)

    def pools(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] // self.pool, self.pool, *x.shape[1:])
