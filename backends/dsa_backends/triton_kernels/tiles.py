"""Tile choices: one table per kernel and architecture, with a safe row for every other device.

Nothing is tuned on a caller's data: a tile is a pure function of architecture, heads, channels and element size.
The figures behind the rows are in ``benchmarks/triton``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Architecture = Literal["small", "sm80", "sm90", "sm100"]
HeadClass = Literal["few", "some", "many"]

SHARED_MEMORY: Final[dict[Architecture, int]] = {"small": 101_376, "sm80": 166_912, "sm90": 232_448, "sm100": 232_448}
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
    placed: bool = False
    """The kernel of ``hopper_kernels``, whose copies are placed by hand; ``stages`` means nothing there."""


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """``pairs`` makes P and dS (and dQ where ``fused``), ``query`` the dQ product, ``key`` the dK product."""

    pairs: AttentionTile
    key: AttentionTile
    query: AttentionTile | None = None

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
    ("sm100", "many"): AttentionTile(64, 32, 8, 2, 2),
}


def forward_tile(arch: Architecture, heads: int, channels: int, parts: int, itemsize: int) -> AttentionTile:
    """Tile of ``attention_forward``; ``parts`` is 1 where the value part is too narrow to be cut."""
    if itemsize == 4:
        return AttentionTile(16, 16, 4, 2, parts)
    tile = _FORWARD[arch, head_class(heads)]
    return AttentionTile(tile.heads, tile.keys, tile.warps, tile.stages, parts, tile.wgmma)


_SMALL_BACKWARD: Final = BackwardTiles(AttentionTile(16, 16, 4, 2, 2), AttentionTile(16, 32, 4, 2, 128))
_BACKWARD: Final[dict[tuple[Architecture, HeadClass], BackwardTiles]] = {
    ("sm80", "few"): BackwardTiles(AttentionTile(16, 32, 4, 3, 2), AttentionTile(16, 64, 4, 2, 128)),
    ("sm80", "some"): BackwardTiles(AttentionTile(32, 32, 8, 2, 2), AttentionTile(32, 64, 4, 2, 128)),
    ("sm80", "many"): BackwardTiles(AttentionTile(32, 32, 8, 2, 2), AttentionTile(128, 32, 8, 2, 128)),
    ("sm90", "few"): BackwardTiles(AttentionTile(16, 32, 4, 3, 2), AttentionTile(16, 64, 4, 3, 128)),
    ("sm90", "some"): BackwardTiles(AttentionTile(32, 32, 8, 3, 2), AttentionTile(32, 64, 4, 3, 128)),
    ("sm90", "many"): BackwardTiles(
        AttentionTile(64, 32, 4, 2, 2, wgmma=True),
        AttentionTile(128, 64, 8, 2, 128, wgmma=True),
        AttentionTile(128, 64, 8, 3, 256, wgmma=True),
    ),
    ("sm100", "few"): BackwardTiles(AttentionTile(16, 32, 4, 3, 2), AttentionTile(16, 64, 4, 3, 128)),
    ("sm100", "some"): BackwardTiles(AttentionTile(32, 32, 8, 3, 2), AttentionTile(32, 64, 4, 3, 128)),
    ("sm100", "many"): BackwardTiles(AttentionTile(32, 32, 8, 3, 2), AttentionTile(128, 32, 8, 2, 128)),
}
"""In ``key`` and ``query`` tiles ``parts`` is the width of a channel slice."""


def backward_tiles(arch: Architecture, heads: int, itemsize: int) -> BackwardTiles:
    if itemsize == 4:
        return BackwardTiles(AttentionTile(16, 16, 4, 1, 2), AttentionTile(16, 16, 4, 1, 64))
    return _SMALL_BACKWARD if arch == "small" else _BACKWARD[arch, head_class(heads)]


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
    return max(1, min(wanted, most, 64))


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
    "sm90": ScoreTile(128, 32, 4, 3, wgmma=True),
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
    """About 64 values of a row per thread."""
    return max(4, min(16, columns // 2048))


_MASS: Final[dict[tuple[Architecture, HeadClass], AttentionTile]] = {
    ("small", "few"): AttentionTile(16, 32, 4, 2, 2),
    ("small", "some"): AttentionTile(16, 32, 4, 2, 2),
    ("small", "many"): AttentionTile(16, 32, 4, 2, 2),
    ("sm80", "few"): AttentionTile(16, 32, 4, 3, 2),
    ("sm80", "some"): AttentionTile(32, 32, 4, 3, 2),
    ("sm80", "many"): AttentionTile(32, 32, 4, 3, 2),
    ("sm90", "few"): AttentionTile(16, 32, 4, 3, 2),
    ("sm90", "some"): AttentionTile(32, 32, 4, 3, 2),
    ("sm90", "many"): AttentionTile(64, 32, 4, 3, 2, wgmma=True),
    ("sm100", "few"): AttentionTile(16, 32, 4, 3, 2),
    ("sm100", "some"): AttentionTile(32, 32, 4, 3, 2),
    ("sm100", "many"): AttentionTile(32, 32, 4, 3, 2),
}


def mass_tile(arch: Architecture, heads: int, itemsize: int) -> AttentionTile:
    """Tile of ``indexer_target``."""
    return AttentionTile(16, 16, 4, 1, 2) if itemsize == 4 else _MASS[arch, head_class(heads)]


@dataclass(frozen=True, slots=True)
class LossTiles:
    """Key tiles of the two kernels of ``indexer_loss``; all heads of a row are in one tile."""

    score: ScoreTile
    gradient: ScoreTile


def loss_tiles(arch: Architecture, heads: int, itemsize: int) -> LossTiles:
    if itemsize == 4:
        return LossTiles(ScoreTile(16, 1, 4, 1), ScoreTile(16, 1, 4, 1))
    if arch in ("small", "sm80"):
        return LossTiles(ScoreTile(64, 1, 4, 2), ScoreTile(32, 1, 4, 2))
    return LossTiles(ScoreTile(64, 1, 4, 3), ScoreTile(64, 1, 8 if heads > 64 else 4, 2))
