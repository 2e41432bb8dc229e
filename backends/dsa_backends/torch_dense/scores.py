"""Indexer scores whose bits depend on row and key alone: not on the chunk, the batch, or a key's place.

BLAS promises no such thing: an entry's order of summation may change with the shape of the product and with
its place in the tile (fp64 products of 32 × 512 do so in MKL, whose micro-kernel there is 12 wide). So all
scores come from products of one fixed shape, zero-padded, over aligned contiguous copies; the shape is a
multiple of the micro-kernels in use; and a probe checks, before a shape is trusted, that one query against
one key gives the same bits at every place. Where it does not, channels are summed one by one with elementwise
operations, which round each entry by itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dsa_backends.torch_dense._buffers import Buffer, Workspace

PROBE_DRAWS: Final = 24


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and keys of one product. Constants of the device type, so that no call can change them."""

    rows: int
    keys: int


CPU_TILE: Final = Tile(48, 768)
OTHER_TILE: Final = Tile(256, 2048)


def tile_of(device_type: str) -> Tile:
    return CPU_TILE if device_type == "cpu" else OTHER_TILE


def tile_buffers(tile: Tile, heads: int, channels: int, acc: torch.dtype) -> tuple[Buffer, ...]:
    """Fixed: what ``score_tiles`` needs."""
    return (
        Buffer("query tile", heads * tile.rows * channels, acc),
        Buffer("weight tile", heads * tile.rows, acc),
        Buffer("key tile", tile.keys * channels, acc),
        Buffer("head scores", tile.rows * tile.keys, acc),
        Buffer("channel products", tile.rows * tile.keys, acc),
        Buffer("summed scores", tile.rows * tile.keys, acc),
    )


def multiply_tile(query: Tensor, keys: Tensor, out: Tensor, spare: Tensor, exact: bool) -> None:
    """``out [R, N] = query [R, Di] @ keys [Di, N]``; ``exact`` sums one channel after the other."""
    if not exact:
        torch.mm(query, keys, out=out)
        return
    torch.mul(query[:, :1], keys[0], out=out)
    for channel in range(1, keys.shape[0]):
        torch.mul(query[:, channel : channel + 1], keys[channel], out=spare)
        out.add_(spare)


@functools.cache
def _same_bits_everywhere(acc: torch.dtype, channels: int, device: str, threads: int) -> bool:
    tile = tile_of(torch.device(device).type)
    generator = torch.Generator().manual_seed(0)
    query = torch.empty(tile.rows, channels, dtype=acc, device=device)
    keys = torch.empty(channels, tile.keys, dtype=acc, device=device)
    out = torch.empty(tile.rows, tile.keys, dtype=acc, device=device)
    for _ in range(PROBE_DRAWS):
        query.copy_(torch.randn(1, channels, generator=generator, dtype=acc))
        keys.copy_(torch.randn(channels, 1, generator=generator, dtype=acc))
        torch.mm(query, keys, out=out)
        if not bool((out == out[0, 0]).all()):
            return False
    return True


def product_is_position_free(acc: torch.dtype, channels: int, device: torch.device) -> bool:
    """Whether the fixed product gives a query and a key the same bits at every place; probed once.

    The number of threads counts, since it may cut the product into other shapes.
    """
    return _same_bits_everywhere(acc, channels, str(device), torch.get_num_threads())


def score_tiles(
    workspace: Workspace,
    scores: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    *,
    windows: list[tuple[int, int]] | None,
    use_relu: bool,
    exact: bool,
) -> None:
    """Fill ``scores [n, keys]`` with ``sum_h w[t, h] * f(q[t, h] . k[j])``, heads in order.

    ``windows`` gives each row's range of keys where the host knows it; tiles that no row needs are left at 0.
    """
    count, heads, channels = q.shape
    keys = k.shape[0]
    tile = tile_of(q.device.type)
    query = workspace.take("query tile", heads, tile.rows, channels)
    weight = workspace.take("weight tile", heads, tile.rows, 1)
    key = workspace.take("key tile", channels, tile.keys)
    head_scores = workspace.take("head scores", tile.rows, tile.keys)
    spare = workspace.take("channel products", tile.rows, tile.keys)
    total = workspace.take("summed scores", tile.rows, tile.keys)
    scores.zero_()
    for row in range(0, count, tile.rows):
        n = min(tile.rows, count - row)
        low, high = _window(windows, row, n, keys)
        if low >= high:
            continue
        query[:, n:] = 0
        query[:, :n] = q[row : row + n].transpose(0, 1)
        weight[:, n:] = 0
        weight[:, :n, 0] = w[row : row + n].t()
        for start in range(low // tile.keys * tile.keys, high, tile.keys):
            m = min(tile.keys, keys - start)
            key[:, m:] = 0
            key[:, :m] = k[start : start + m].t()
            for head in range(heads):
                into = head_scores if head else total
                multiply_tile(query[head], key, into, spare, exact)
                if use_relu:
                    into.relu_()
                into.mul_(weight[head])
                if head:
                    total.add_(head_scores)
            scores[row : row + n, start : start + m] = total[:n, :m]


def _window(windows: list[tuple[int, int]] | None, row: int, count: int, keys: int) -> tuple[int, int]:
    if windows is None:
        return 0, keys
    seen = [(low, high) for low, high in windows[row : row + count] if low < high]
    return (min(low for low, _ in seen), max(high for _, high in seen)) if seen else (0, 0)
