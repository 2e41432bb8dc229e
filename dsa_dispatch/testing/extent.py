"""How large the cases of the suite are: in full, or small for a slow device such as an interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

Size = Literal["full", "small"]


@dataclass(frozen=True, slots=True)
class Extent:
    """Sizes of cases, in rows, slots, keys, heads or channels. Every check is run at every extent."""

    rows: int
    """Rows of an ordinary case."""
    seeds: tuple[int, ...]
    """Random operands that one claim is judged on, one after the other."""
    widths: tuple[int, ...]
    """Index widths beyond one tile, none a multiple of one."""
    heads: tuple[int, ...]
    """Head counts beyond one tile, and whole tiles of many heads."""
    channels: tuple[int, ...]
    channel_pairs: tuple[tuple[int, int], ...]
    """Channels of published models, of absorbed attention."""
    more_rows: int
    """Rows beyond one tile."""
    keys: int
    """Keys of a selection, or columns of a dense loss, beyond one block."""
    long_row: int
    """Slots over which a sum must not stop growing."""
    many_rows: int
    """Queries whose gradients meet in one key."""
    crowd: int
    """Keys with almost the same score."""
    causal_rows: int
    """Rows of a causal selection with fewer keys."""
    repeated_rows: int
    """Rows of a call whose bits must repeat."""
    largest_width: int
    largest_heads: int
    largest_channels: int
    largest_count: int
    """Rows or keys. Above these a declared value is judged but not run."""
    most_elements: int
    """Nor is one whose largest tensor, in the formulas too, would have more elements than this."""
    values: int | None = None
    """Of one kind of declared values so many are run, spread evenly; the others are judged by declaration alone."""


EXTENTS: Final[Mapping[Size, Extent]] = MappingProxyType(
    {
        "full": Extent(
            rows=6,
            seeds=(11, 12),
            widths=(67, 131, 2051, 4099),
            heads=(17, 20, 64, 128),
            channels=(80, 200),
            channel_pairs=((512, 512), (576, 512)),
            more_rows=67,
            keys=2100,
            long_row=1024,
            many_rows=4096,
            crowd=1024,
            causal_rows=40,
            repeated_rows=64,
            largest_width=8192,
            largest_heads=1024,
            largest_channels=1024,
            largest_count=1 << 20,
            most_elements=1 << 25,
        ),
        "small": Extent(
            rows=3,
            seeds=(11,),
            widths=(67,),
            heads=(17,),
            channels=(80,),
            channel_pairs=(),
            more_rows=17,
            keys=300,
            long_row=128,
            many_rows=32,
            crowd=256,
            causal_rows=9,
            repeated_rows=4,
            largest_width=512,
            largest_heads=64,
            largest_channels=1024,
            largest_count=512,
            most_elements=1 << 22,
            values=2,
        ),
    }
)
FULL: Final = EXTENTS["full"]
