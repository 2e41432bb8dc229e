"""One thing to measure, as frozen data, with the arithmetic that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from dsa_dispatch._stages import Stage

Measured = Literal["attention_forward", "attention_backward", "indexer_topk", "indexer_loss", "decode"]
MEASURED: Final[tuple[Measured, ...]] = get_args(Measured)

STAGES_OF: Final[dict[Measured, tuple[Stage, ...]]] = {
    "attention_forward": ("attention_forward",),
    "attention_backward": ("attention_backward",),
    "indexer_topk": ("indexer_topk",),
    "indexer_loss": ("indexer_target", "indexer_loss"),
    "decode": ("attention_forward",),
}


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes as in ``CallSpec``; ``topk`` is the index width. ``pattern``: "random", "local", or a file of ids.

    ``decode`` is the forward of few rows. ``deterministic`` and ``memory_budget`` (of the backends) are those of a
    call; a deterministic decode runs unsplit. ``finds_lse``: a loss whose teacher is not given the attention's lse.
    """

    stage: Measured
    rows: int = 4096
    keys: int = 8192
    topk: int = 2048
    heads: int = 128
    qk_channels: int = 576
    v_channels: int = 512
    index_heads: int = 64
    index_channels: int = 128
    dtype: str = "bfloat16"
    pattern: str = "random"
    deterministic: bool = False
    finds_lse: bool = False
    memory_budget: str | None = None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages whose time is measured; any other that the call needs is left to ``auto``."""
        return STAGES_OF[self.stage]

    @property
    def scale(self) -> float:
        return float(self.qk_channels**-0.5)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matrix products, over all slots whether valid or not.

        Attention with ``n = rows * heads * topk``: forward ``2 n (qk + v)``, backward ``2 n (3 qk + 2 v)``. Selection:
        ``2 * index heads * channels`` for every key that a causal row sees. Loss: the teacher's scores and, of the
        indexer, the scores and the two products of their gradients.
        """
        slots = self.rows * self.topk
        attention = 2 * slots * self.heads
        indexer = 2 * self.index_heads * self.index_channels
        if self.stage == "attention_backward":
            return attention * (3 * self.qk_channels + 2 * self.v_channels)
        if self.stage == "indexer_topk":
            return indexer * causal_pairs(self.rows, self.keys)
        if self.stage == "indexer_loss":
            return attention * self.qk_channels + 3 * indexer * slots
        return attention * (self.qk_channels + self.v_channels)

    @property
    def title(self) -> str:
        size = f"{self.rows}×{self.keys} top {self.topk}"
        attention = f"{self.heads} heads {self.qk_channels}/{self.v_channels}"
        indexer = f"{self.index_heads} index heads × {self.index_channels}"
        parts = {"indexer_topk": [indexer], "indexer_loss": [attention, indexer]}.get(self.stage, [attention])
        if self.stage != "indexer_topk":
            parts.append(self.pattern)
        if self.deterministic:
            parts.append("unsplit" if self.stage == "decode" else "deterministic")
        if self.finds_lse:
            parts.append("without an lse")
        if self.memory_budget:
            parts.append(f"within {self.memory_budget}")
        return ", ".join([f"{self.stage} {size}", *parts, self.dtype])


def causal_pairs(rows: int, keys: int) -> int:
    """Pairs of a row and a key that it sees, with the causal triangle at the bottom right."""
    first = keys - rows + 1
    return sum(max(0, first + row) for row in range(rows)) if first < 0 else rows * (first + keys) // 2
