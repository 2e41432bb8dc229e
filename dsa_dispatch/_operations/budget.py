"""A budget too small for several stages of one operation: the error names what does for all of them.

Each op refuses by itself, and the first one knows nothing of the tensors of the others. Whoever set what it named
would be refused by the next, so the operation asks all its stages once one has refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from dsa_dispatch._dispatch.plan import plan_of
from dsa_dispatch._execution.attention import attention_memories
from dsa_dispatch._execution.loss import loss_memory
from dsa_dispatch._execution.memory import MemoryPlan, require_budget
from dsa_dispatch._execution.topk import topk_memory
from dsa_dispatch.errors import ConfigError

T = TypeVar("T")


def naming_what_does(run: Callable[[], T], memories: Callable[[], Iterable[MemoryPlan]]) -> T:
    """``run()``; where a setting is refused, ``memories`` of every stage are asked for the budget that does."""
    if torch.compiler.is_compiling():
        # Compiled code raises outside of this frame; there each op names what it needs itself.
        return run()
    try:
        return run()
    except ConfigError:
        require_budget(*memories())
        raise


def memory_of_topk(
    plan: Tensor, q: Tensor, k: Tensor, weights: Tensor, topk: int, block_size: int | None
) -> MemoryPlan:
    return topk_memory(plan_of(plan), q, k, weights, topk, block_size)


def memory_of_loss(
    plan: Tensor, q: Tensor, k: Tensor, query: Tensor, columns: int, block_size: int | None
) -> MemoryPlan:
    return loss_memory(plan_of(plan), q, k, query, columns, block_size)


def memories_of_attention(
    plan: Tensor, query: Tensor, key: Tensor, topk: int, v_channels: int
) -> tuple[MemoryPlan, ...]:
    """Of the forward and, where gradients are needed, the backward, over a selection that need not exist yet."""
    found = plan_of(plan)
    indices = torch.empty((query.shape[1], query.shape[0], topk), dtype=torch.int32, device="meta")
    return attention_memories(found, found.stage("attention_forward"), query, (key,), indices, v_channels)
