"""Names of the stages a backend provides, the groups decided together, and the operations made of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, get_args

Stage = Literal[
    "indexer_topk",
    "indexer_target",
    "indexer_loss",
    "attention_forward",
    "attention_backward",
    "gqa_forward",
    "gqa_backward",
]
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)

Group = Literal["topk", "loss", "attention", "gqa"]
"""Stages that one decision covers, because their results feed each other."""

GROUP_STAGES: Final[Mapping[Group, tuple[Stage, ...]]] = MappingProxyType(
    {
        "topk": ("indexer_topk",),
        "loss": ("indexer_target", "indexer_loss"),
        "attention": ("attention_forward", "attention_backward"),
        "gqa": ("gqa_forward", "gqa_backward"),
    }
)

BACKWARD_STAGES: Final[frozenset[Stage]] = frozenset({"attention_backward", "gqa_backward"})

OPERATION_GROUPS: Final[Mapping[str, tuple[Group, ...]]] = MappingProxyType(
    {
        "run_fused_qk_topk": ("topk",),
        "run_fused_qk_topk_with_loss": ("topk", "loss"),
        "run_fused_absorbed_sparse_attention": ("attention",),
        "run_fused_dsa_attention": ("topk", "loss", "attention"),
        "run_fused_gqa_sparse_attention": ("gqa",),
    }
)

OPERATION_OF: Final[Mapping[Stage, str]] = MappingProxyType(
    {
        "indexer_topk": "run_fused_qk_topk",
        "indexer_target": "run_fused_qk_topk_with_loss",
        "indexer_loss": "run_fused_qk_topk_with_loss",
        "attention_forward": "run_fused_absorbed_sparse_attention",
        "attention_backward": "run_fused_absorbed_sparse_attention",
        "gqa_forward": "run_fused_gqa_sparse_attention",
        "gqa_backward": "run_fused_gqa_sparse_attention",
    }
)
"""The operation that asks for a stage."""
