"""Tile choices: one table per kernel and architecture, with a safe row for every other device.

Nothing is tuned on a caller's data: a tile is a pure function of architecture, heads, channels and element size.
The figures behind the rows are in ``benchmarks/triton``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final, Literal

Architecture = Literal["small", "sm80", "sm90", "sm100"]
HeadClass = Literal["few", "some", "many"]

SHARED_MEMORY: Final[dict[Architecture, int]] = {
    "small": 101_376,
    "sm80": 166_912,
    "sm90": 232_448,
    "sm100": 232_448,
}
"""Bytes of shared memory one block may have: 8.6, 8.9 and 12.x are "small"."""

WIDE: Final = 320
"""Key rows with more channels than this need the wide rows of the tables."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Heads and keys of a program's tile; ``parts`` equal slices of the value channels; warps; pipeline stages."""

    heads: int
    keys: int
    warps: int
    stages: int
    parts: int = 1
    wgmma: bool = False
    """Claims Hopper's warp-group products (checked in the machine code)."""


@dataclass(frozen=True, slots=True)
class HopperTile:
    """Of a kernel with warps that only gather (``hopper_common``): heads, buffers of 64 keys, warps that compute."""

    heads: int
    buffers: int
    warps: int
    registers: int | None = None
    """Most registers of a thread at launch, where two programs are to share a multiprocessor."""

    @property
    def keys(self) -> int:
        return 64


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """``pairs`` makes P and dS (and dQ where ``fused``), ``query`` the dQ product, ``key`` the dK product.

    ``whole`` does all of it in one kernel, where dkv is wanted.
    """

    pairs: AttentionTile | HopperTile
    key: AttentionTile
    query: AttentionTile | HopperTile | None = None
    whole: HopperTile | None = None

    @property
    def fused(self) -> bool:
        return self.query is None


def architecture(capability: tuple[int, int]) -> Architecture:
    """The table to use for a compute capability. Only exact relatives share one: 12.x is not 10.x."""
    if capability == (8, 0):
        return "sm80"
    if capability == (9, 0):
        return "sm90"
    return "sm100" if capability[0] == 10 else "small"


def head_class(heads: int) -> HeadClass:
    return "few" if heads <= 16 else "some" if heads <= 32 else "many"


_FORWARD: Final[dict[tuple[Architecture, HeadClass], AttentionTile]] = {
    ("small", "few"): AttentionTile(16, 32, 4, 2, 2),
    ("small", "some"): AttentionTile(16, 32, 4, 2, 2),
    ("small", "many"): AttentionTile(16, 32, 4, 2, 2),
    ("sm80", "few"): AttentionTile(16, 32, 4, 3, 2),
    ("sm80", "some"): AttentionTile(32, 32, 4, 3, 2),
    ("sm80", "many"): AttentionTile(32, 32, 4, 3, 2),
    ("sm90", "few"): AttentionTile(16, 64, 4, 3, 2),
    ("sm90", "some"): AttentionTile(32, 64, 4, 3, 2),
    ("sm90", "many"): AttentionTile(64, 32, 8, 3, 2, wgmma=True),
    ("sm100", "few"): AttentionTile(16, 64, 4, 3, 2),
    ("sm100", "some"): AttentionTile(32, 32, 4, 3, 2),
    ("sm100", "many"): AttentionTile(32, 32, 4, 3, 2),
}


HOPPER_FORWARD: Final[dict[HeadClass, HopperTile]] = {
    "few": HopperTile(16, 1, 4, registers=128),
    "some": HopperTile(32, 2, 4),
    "many": HopperTile(64, 2, 8),
}
HOPPER_TAILS: Final = (0, 16, 32, 64)


def has_hopper_kernels(arch: Architecture, qk: int, v: int, itemsize: int) -> bool:
    """Whether the kernels of ``hopper_common`` take these channels."""
    return arch == "sm90" and itemsize == 2 and v == 512 and qk - v in HOPPER_TAILS


def forward_tile(
    arch: Architecture, heads: int, qk: int, v: int, itemsize: int
) -> AttentionTile | HopperTile:
    """Tile of ``attention_forward``. Value parts narrower than 512 are not cut in two."""
    parts = 2 if v >= 512 and v & (v - 1) == 0 else 1
    if itemsize == 4:
        return AttentionTile(16, 16, 4, 2, parts)
    if has_hopper_kernels(arch, qk, v, itemsize):
        return HOPPER_FORWARD[head_class(heads)]
    return dataclasses.replace(_FORWARD[arch, head_class(heads)], parts=parts)


_SMALL_BACKWARD: Final = BackwardTiles(AttentionTile(16, 16, 4, 2, 2), AttentionTile(16, 32, 4, 2, 128))
_BACKWARD: Final[dict[tuple[Architecture, HeadClass], BackwardTiles]] = {
    ("sm80", "few"): BackwardTiles(AttentionTile(16, 32, 4, 3, 2), AttentionTile(16, 64, 4, 2, 128)),
    ("sm80", "some"): BackwardTiles(AttentionTile(32, 32, 8, 2, 2), AttentionTile(32, 64, 4, 2, 128)),
    ("sm80", "many"): BackwardTiles(AttentionTile(32, 32, 8, 2, 2), AttentionTile(128, 32, 8, 2, 128)),
    ("sm90", "few"): BackwardTiles(AttentionTile(16, 32, 4, 2), AttentionTile(16, 64, 4, 3, 128)),
    ("sm90", "some"): BackwardTiles(AttentionTile(32, 32, 8, 3, 2), AttentionTile(32, 64, 4, 3, 128)),
    ("sm90", "many"): BackwardTiles(
        AttentionTile(64, 32, 4, 2, 2, wgmma=True),
        AttentionTile(128, 64, 4, 1, 128, wgmma=True),
        AttentionTile(128, 64, 8, 5, 256, wgmma=True),
    ),
    ("sm100", "few"): BackwardTiles(AttentionTile(16, 32, 4, 3, 2), AttentionTile(16, 64, 4, 3, 128)),
    ("sm100", "some"): BackwardTiles(AttentionTile(32, 32, 8, 3, 2), AttentionTile(32, 64, 4, 3, 128)),
    ("sm100", "many"): BackwardTiles(AttentionTile(32, 32, 8, 3, 2), AttentionTile(128, 32, 8, 2, 128)),
}
"""In ``key`` and ``query`` tiles ``parts`` is the width of a channel slice."""


def backward_tiles(arch: Architecture, heads: int, qk: int, v: int, itemsize: int) -> BackwardTiles:
    """Tiles of ``attention_backward``."""
    if itemsize == 4:
        # dQ in a kernel of its own: with it the first one needs more shared memory than a "small" device has.
        return BackwardTiles(
            AttentionTile(16, 16, 4, 1, 2), AttentionTile(16, 16, 4, 1, 64), AttentionTile(16, 16, 4, 1, 128)
        )
    tiles = _SMALL_BACKWARD if arch == "small" else _BACKWARD[arch, head_class(heads)]
    if not has_hopper_kernels(arch, qk, v, itemsize):
        return tiles
    if not tiles.fused:
        return dataclasses.replace(tiles, pairs=HOPPER_PAIRS, query=HOPPER_QUERY)
    # The transposed dQ product has the tail's channels on its M side, which is 64 at least.
    whole = HOPPER_WHOLE[head_class(heads)] if qk - v in (0, 64) else None
    return dataclasses.replace(tiles, whole=whole)


HOPPER_PAIRS: Final = HopperTile(64, 1, 4)
HOPPER_QUERY: Final = HopperTile(64, 2, 8)
HOPPER_WHOLE: Final[dict[HeadClass, HopperTile]] = {
    "few": HopperTile(16, 2, 4),
    "some": HopperTile(32, 1, 4),
}
HOPPER_MASS: Final = HopperTile(64, 2, 4)


MOST_SPLITS: Final = 64


def split_count(
    rows: int, head_blocks: int, width: int, keys_per_tile: int, processors: int, deterministic: bool
) -> int:
    """Splits of the index axis, so that few rows still fill the GPU.

    Always 1 under ``deterministic``: there the order of the sums must not depend on the row count.
    """
    programs = rows * head_blocks
    if deterministic or programs >= processors:
        return 1
    wanted = -(-2 * processors // programs)
    most = -(-width // (2 * keys_per_tile))
    return max(1, min(wanted, most, MOST_SPLITS))


@dataclass(frozen=True, slots=True)
class ScoreTile:
    """Keys of the stationary tile, rows that stream past it, warps, pipeline stages."""

    keys: int
    rows: int
    warps: int
    stages: int
    wgmma: bool = False


_SCORE: Final[dict[Architecture, ScoreTile]] = {
    "small": ScoreTile(64, 32, 4, 2),
    "sm80": ScoreTile(128, 32, 4, 3),
    "sm90": ScoreTile(256, 32, 8, 3, wgmma=True),
    "sm100": ScoreTile(128, 32, 4, 3),
}


def score_tile(arch: Architecture, heads: int, itemsize: int) -> ScoreTile:
    if itemsize == 4:
        return ScoreTile(32, 16, 4, 1)
    tile = _SCORE[arch]
    if heads > 64:
        return ScoreTile(tile.keys, tile.rows, 8, tile.stages, tile.wgmma)
    return tile


def select_warps(columns: int) -> int:
    """32 values of a row per thread: 64 would leave one program of few warps per multiprocessor."""
    return max(4, min(32, columns // 1024))


_MASS: Final[dict[tuple[Architecture, HeadClass], AttentionTile]] = {
    ("small", "few"): AttentionTile(16, 32, 4, 2, 2),
    ("small", "some"): AttentionTile(16, 32, 4, 2, 2),
    ("small", "many"): AttentionTile(16, 32, 4, 2, 2),
    ("sm80", "few"): AttentionTile(16, 32, 4, 3, 2),
    ("sm80", "some"): AttentionTile(32, 32, 4, 3, 2),
    ("sm80", "many"): AttentionTile(32, 32, 4, 3, 2),
    ("sm90", "few"): AttentionTile(16, 32, 4, 3, 2),
    ("sm90", "some"): AttentionTile(32, 32, 4, 3, 2),
    ("sm90", "many"): AttentionTile(64, 64, 4, 2, 2, wgmma=True),
    ("sm100", "few"): AttentionTile(16, 32, 4, 3, 2),
    ("sm100", "some"): AttentionTile(32, 32, 4, 3, 2),
    ("sm100", "many"): AttentionTile(32, 32, 4, 3, 2),
}


def mass_tile(arch: Architecture, heads: int, qk: int, itemsize: int) -> AttentionTile | HopperTile:
    """Tile of ``indexer_target``. The Hopper kernel adds up two blocks of heads at most."""
    if itemsize == 4:
        return AttentionTile(16, 16, 4, 1, 2)
    if 32 < heads <= 128 and has_hopper_kernels(arch, qk, 512, itemsize):
        return HOPPER_MASS
    return _MASS[arch, head_class(heads)]


@dataclass(frozen=True, slots=True)
class LossTiles:
    """Key tiles of the two kernels of ``indexer_loss``; all heads of a row are in one tile."""

    score: ScoreTile
    gradient: ScoreTile


def loss_tiles(arch: Architecture, heads: int, itemsize: int) -> LossTiles:
    if itemsize == 4:
        return LossTiles(ScoreTile(16, 1, 4, 1), ScoreTile(16, 1, 4, 1))
    warps = 8 if heads > 64 else 4
    if arch in ("small", "sm80"):
        return LossTiles(ScoreTile(64, 1, warps, 2), ScoreTile(32, 1, warps, 1 if heads > 64 else 2))
    return LossTiles(ScoreTile(64, 1, warps, 3), ScoreTile(64, 1, warps, 2))
