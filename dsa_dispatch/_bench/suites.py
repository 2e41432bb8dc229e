"""Named lists of cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from dsa_dispatch._bench.case import Case

HEADS: Final = (128, 64, 32, 16, 8)


SMALL: Final = Case(
    "attention_forward",
    rows=64,
    keys=256,
    topk=32,
    heads=4,
    qk_channels=80,
    v_channels=64,
    index_heads=4,
    index_channels=64,
    dtype="float32",
)


def quick() -> Iterator[Case]:
    """A moment on a CPU: every stage once, in fp32."""
    yield SMALL
    yield replace(SMALL, pattern="local")
    for deterministic in (False, True):
        yield replace(SMALL, stage="attention_backward", deterministic=deterministic)
    yield replace(SMALL, stage="indexer_topk")
    for finds in (False, True):
        yield replace(SMALL, stage="indexer_loss", finds_lse=finds)
    for whole in (False, True):
        yield replace(SMALL, stage="decode", rows=1, deterministic=whole)


def h200() -> Iterator[Case]:
    """The shapes of DeepSeek-V3.2 and of its tensor-parallel shards, at the sizes of published H200 figures."""
    for stage in ("attention_forward", "attention_backward"):
        for pattern in ("random", "local"):
            yield from (Case(stage, heads=heads, pattern=pattern) for heads in HEADS)
    yield from (Case("attention_backward", heads=heads, deterministic=True) for heads in HEADS)
    yield from (Case("indexer_topk", keys=keys) for keys in (8192, 32768))
    yield Case("indexer_topk", keys=32768, memory_budget="64MiB")
    yield Case("indexer_topk", rows=131072, keys=131072)
    yield from (Case("indexer_loss", deterministic=deterministic) for deterministic in (False, True))
    yield Case("indexer_loss", finds_lse=True)
    for heads in (128, 16):
        for rows in (1, 16):
            yield from (
                Case("decode", rows=rows, heads=heads, deterministic=whole) for whole in (False, True)
            )


SUITES: Final[Mapping[str, Callable[[], Iterator[Case]]]] = {"quick": quick, "h200": h200}
