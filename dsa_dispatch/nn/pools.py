"""From chosen pools to the keys attention sees: expansion, and the incomplete pool that every row adds."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_dispatch._operations.validate import check_count
from dsa_dispatch.nn.row_chunks import slices


def key_ends(rows: int, keys: int, device: torch.device) -> Tensor:
    """Keys that each row of a causal call sees, aligned to the bottom right, ``[rows]`` int32."""
    return torch.arange(keys - rows + 1, keys + 1, device=device, dtype=torch.int32).clamp_min(0)


def pool_ends(rows: int, keys: int, pool: int, device: torch.device) -> Tensor:
    """Complete pools that each row sees, ``[rows]`` int32: the ``ends`` of the selection among pools.

    A pool is chosen whole: it is visible from the row that sees its last key. Scores are of pools, never copied to
    their keys, or a selection would cut inside a pool wherever its equal scores fall on the edge.
    """
    return key_ends(rows, keys, device) // pool


def expand_pools(
    pools: Tensor, counts: Tensor, keys: int, pool: int, *, row_chunk: int = 4096
) -> tuple[Tensor, Tensor]:
    """Ids of keys ``[b, s, chosen * pool + pool - 1]`` int32 and their number ``[b, s]``, of a causal call.

    ``pools [b, s, chosen]`` with ``counts [b, s]`` is a selection among pools, valid ids first. Each row's incomplete
    pool, up to ``pool - 1`` keys that stand between its last complete pool and itself, follows the chosen ones, and -1
    the last of them. For 512 pools of 4 keys the width is 2051. Made in row chunks into one buffer. Raises
    ``InvalidInputError`` for a ``pool`` or ``row_chunk`` below 1.
    """
    check_count("expand_pools: pool", pool)
    check_count("expand_pools: row_chunk", row_chunk)
    batch, rows, chosen = pools.shape
    ends = key_ends(rows, keys, pools.device)
    if torch.compiler.is_compiling():
        return _expand(pools, counts, ends, pool)
    ids = pools.new_empty((batch, rows, chosen * pool + pool - 1))
    length = torch.empty_like(counts)
    for part in slices(rows, row_chunk):
        ids[:, part], length[:, part] = _expand(pools[:, part], counts[:, part], ends[part], pool)
    return ids, length


def _expand(pools: Tensor, counts: Tensor, ends: Tensor, pool: int) -> tuple[Tensor, Tensor]:
    members = torch.arange(pool, device=pools.device, dtype=torch.int32)
    keys = torch.where(pools[..., None] >= 0, pools[..., None] * pool + members, -1).flatten(2)
    complete = ends // pool * pool
    tail = complete[:, None] + members[:-1]
    tail = torch.where(tail < ends[:, None], tail, -1).expand(*keys.shape[:2], -1)
    slots = (counts[..., None] * pool + members[:-1]).to(torch.int64)
    ids = torch.cat([keys, torch.full_like(tail, -1)], dim=2).scatter(2, slots, tail)
    return ids, counts * pool + (ends - complete)
