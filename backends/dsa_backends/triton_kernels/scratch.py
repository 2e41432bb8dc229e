"""Bytes of scratch per row of every stage: what the launchers cut chunks by and what the capabilities declare."""

from __future__ import annotations

from typing import Final

SLOT_TILE: Final = 64
"""P and dS are written and read in whole tiles of so many slots; every key tile divides it."""

ORDER_BYTES_PER_SLOT: Final = 48
"""Ids and slots before and after sorting (4 + 4 + 8 + 8 bytes) and the sort's own copies of them."""

COLUMN_BLOCKS: Final = (1024, 4096, 16384, 32768)
"""Columns the selection holds in registers at a time; the smallest that fits is taken, so few variants are compiled."""

DENSE_SLOT_BYTES: Final = 16
"""Per key of the dense form: its id and the temporaries that make it."""

PER_SLOT_COPIES: Final = "partial key gradients and their order"


def padded_slots(width: int) -> int:
    return -(-width // SLOT_TILE) * SLOT_TILE


def carry_width(topk: int) -> int:
    return max(16, 1 << (topk - 1).bit_length())


def column_block(keys: int) -> int:
    return next((block for block in COLUMN_BLOCKS if block >= keys), COLUMN_BLOCKS[-1])


def topk_rows(keys: int, topk: int, columns: int) -> tuple[tuple[str, int], ...]:
    """Scores of one block of columns, and two carries of ids and orders where the keys need several blocks."""
    carry = 16 * carry_width(topk) if keys > columns else 0
    return (("scores", columns * 4), ("chosen so far", carry))


def backward_rows(
    heads: int, channels: int, width: int, itemsize: int, *, pairs: bool, deterministic: bool
) -> tuple[tuple[str, int], ...]:
    """lse and delta; P and dS; in the deterministic form one row of key gradient per slot."""
    return (
        ("lse and delta", heads * 8),
        ("P and dS", 2 * heads * padded_slots(width) * itemsize if pairs else 0),
        (PER_SLOT_COPIES, width * (channels * 4 + ORDER_BYTES_PER_SLOT) if deterministic else 0),
    )


def target_rows(heads: int, dense_keys: int) -> tuple[tuple[str, int], ...]:
    return (("lse", heads * 4), ("dense slots", dense_keys * DENSE_SLOT_BYTES))


def loss_rows(width: int, dim: int, dense_keys: int, *, deterministic: bool) -> tuple[tuple[str, int], ...]:
    """Scores, their lse and the mass's sum; in the deterministic form one row of key gradient per slot."""
    return (
        ("scores", width * 4 + 8),
        ("dense slots", dense_keys * DENSE_SLOT_BYTES),
        (PER_SLOT_COPIES, width * (dim * 4 + ORDER_BYTES_PER_SLOT) if deterministic else 0),
    )


def total(parts: tuple[tuple[str, int], ...]) -> int:
    return sum(size for _, size in parts)
