"""Bytes of scratch per row of every stage: what the launchers cut chunks by and what the capabilities declare."""

from __future__ import annotations

from typing import Final

SLOTS: Final = 64
FEW: Final = 16
"""Head counts up to this run in kernels of their own, whose tiles are padded to it."""

Parts = tuple[tuple[str, int], ...]


def tiles(width: int) -> int:
    return -(-width // SLOTS)


def padded_keys(keys: int) -> int:
    """Columns of a row of scores: whole 16-byte reads."""
    return -(-keys // 4) * 4


def topk_rows(keys: int, heads: int) -> Parts:
    return (("scores", padded_keys(keys) * 4), ("weights in fp32", heads * 4))


def backward_rows(heads: int, width: int) -> Parts:
    """lse and delta; P and dS in 16 bits, whole tiles of slots."""
    stored = FEW if heads <= FEW else heads
    return (("lse and delta", heads * 8), ("P and dS", 2 * stored * tiles(width) * SLOTS * 2))


def loss_rows(width: int, heads: int) -> Parts:
    return (("scores", tiles(width) * SLOTS * 4), ("weights in fp32", heads * 4))


def total(parts: Parts) -> int:
    return sum(size for _, size in parts)
