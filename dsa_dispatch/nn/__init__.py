"""Modules made of the library's operations: an indexer, and the absorbed sparse attention core.

They hold parameters, rotate and project; what runs is decided by the operations. Every parameter is read in the forward
of the module that owns it, so a hook there that gathers a sharded parameter has run before.
"""

from __future__ import annotations

from dsa_dispatch.nn.attention import AbsorbedSparseAttention, AttentionOutput, HeadLinear
from dsa_dispatch.nn.indexer import Indexer, Selection, Teacher
from dsa_dispatch.nn.keys import IndexKey, PooledIndexKey
from dsa_dispatch.nn.pools import expand_pools, pool_ends
from dsa_dispatch.nn.rope import Rope, rope_angles, rotate

__all__ = [
    "AbsorbedSparseAttention",
    "AttentionOutput",
    "HeadLinear",
    "IndexKey",
    "Indexer",
    "PooledIndexKey",
    "Rope",
    "Selection",
    "Teacher",
    "expand_pools",
    "pool_ends",
    "rope_angles",
    "rotate",
]
