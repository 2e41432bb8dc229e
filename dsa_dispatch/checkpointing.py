"""Activation checkpointing that leaves the selection alone: ``save_topk_policy()``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dsa_dispatch._operations import library

SAVED: Final = frozenset({library.decide, library.indexer_topk})
"""The decision is saved with the ids, so that a replay runs the backends of the first pass."""


def save_topk_policy(extra_ops: Iterable[torch._ops.OpOverload] = ()) -> Callable[[], Any]:
    """A ``context_fn`` for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.

    The replay in backward then runs neither the selection nor the decision again, which costs
    ``4 * index_topk`` bytes a row and layer; everything else is recomputed. ``extra_ops`` are saved too.
    Without it a replay decides anew: there ``configure``, the environment and an explicit config hold, and a
    ``use_backend`` block that has ended does not.

    Raises ``TypeError`` when an extra op is not an overload (``torch.ops.x.y.default``): a packet would match nothing.
    """
    extra = frozenset(extra_ops)
    for op in extra:
        if not isinstance(op, torch._ops.OpOverload):
            raise TypeError(
                f"save_topk_policy: expected op overloads such as torch.ops.x.y.default, got {op!r}"
            )
    return functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, SAVED | extra))


def _policy(
    saved: frozenset[Any], context: Any, op: torch._ops.OpOverload, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE
