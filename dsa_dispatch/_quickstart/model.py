"""A causal language model of the kind that sparse attention is trained in, small enough for a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from dsa_dispatch._quickstart.attention import Kernels, SparseAttention
from dsa_dispatch._quickstart.layers import Norm, Projection
from dsa_dispatch._run_config import ModelShape
from dsa_dispatch.errors import ConfigError
from dsa_dispatch.nn import Selection, rope_angles

_LOGIT_SCALE: Final = 0.3
"""With tied embeddings a token's own logit begins at ``sqrt(hidden)``; scaled, the first loss is the uniform one."""
_INDEXER: Final = ".indexer."


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Logits of one pass; per computing layer its loss (empty outside training); per layer the selection it used."""

    logits: Tensor
    """``[s, b, vocabulary]``"""
    indexer_losses: tuple[Tensor, ...]
    selections: tuple[Selection, ...]


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202)."""

    def __init__(self, hidden: int, inner: int, output_gain: float) -> None:
        super().__init__()
        self.gate_up = Projection(hidden, 2 * inner)
        self.down = Projection(inner, hidden, output_gain)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        down: Tensor = self.down(functional.silu(gate) * up)
        return down


class Layer(nn.Module):
    """Attention and feed-forward block, each behind its norm and added to the residual stream."""

    def __init__(self, shape: ModelShape, inner: int, *, computes: bool) -> None:
        super().__init__()
        output_gain = (2 * shape.layers) ** -0.5  # the residual stream keeps its size however deep the model
        self.attention_norm = Norm(shape.hidden)
        self.attention = SparseAttention(shape, computes=computes, output_gain=output_gain)
        self.feed_forward_norm = Norm(shape.hidden)
        self.feed_forward = FeedForward(shape.hidden, inner, output_gain)

    def forward(
        self, x: Tensor, angles: Tensor, kernels: Kernels, shared: Selection | None
    ) -> tuple[Tensor, Selection]:
        mixed, selection = self.attention(self.attention_norm(x), angles, kernels, shared)
        x = x + mixed
        return x + self.feed_forward(self.feed_forward_norm(x)), selection


class LanguageModel(nn.Module):
    """Token ids ``[s, b]`` to logits. Raises ``ConfigError`` for a shape it cannot build."""

    def __init__(self, shape: ModelShape, vocabulary: int, kernels: Kernels) -> None:
        super().__init__()
        if shape.ffn is None or shape.dsa_layers != tuple(range(shape.layers)) or shape.index_kpool > 1:
            raise ConfigError(
                "this model needs model.ffn, dsa_layers: all and index_kpool 1. Presets of large models describe "
                "shapes for `explain`; run the preset 'quickstart' or a file made from it"
            )
        self.shape = shape
        self.kernels = kernels
        self.embedding = nn.Embedding(vocabulary, shape.hidden)
        self.sharing = shape.index_sharing
        self.layers = nn.ModuleList(
            Layer(shape, shape.ffn, computes=self.sharing.computes(number)) for number in range(shape.layers)
        )
        self.norm = Norm(shape.hidden)
        nn.init.normal_(self.embedding.weight, std=shape.hidden**-0.5)

    def forward(self, tokens: Tensor) -> ModelOutput:
        shape = self.shape
        x = self.embedding(tokens) * shape.hidden**0.5
        positions = torch.arange(tokens.shape[0], device=tokens.device)
        angles = rope_angles(positions, shape.qk_rope, shape.rope_theta or 10000.0)
        selections: list[Selection] = []
        for number, layer in enumerate(self.layers):
            source = self.sharing.source(number)
            shared = selections[source].shared() if source < number else None
            x, selection = layer(x, angles, self.kernels, shared)
            selections.append(selection)
        return ModelOutput(
            functional.linear(self.norm(x), self.embedding.weight) * _LOGIT_SCALE,
            tuple(selection.loss for selection in selections if selection.loss is not None),
            tuple(selections),
        )

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """bf16 products over fp32 weights where the kernels get bf16: a small step would vanish in bf16 weights."""
        if self.kernels.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.embedding.weight.device.type, dtype=self.kernels.dtype)

    def indexer_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that learn from the indexer's loss and from nothing else."""
        return (value for name, value in self.named_parameters() if _INDEXER in name)

    def language_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that learn from the next token and from nothing else."""
        return (value for name, value in self.named_parameters() if _INDEXER not in name)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats; ``logits [s,b,v]``, ``targets [s,b]``."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), torch.flatten(targets))
