"""The operations under their public names, and ``explain`` over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from dsa_dispatch._call import CallSpec, DeviceInfo
from dsa_dispatch._dispatch.decision import Decision
from dsa_dispatch._dispatch.explain import explain_call, explain_operation
from dsa_dispatch._dispatch.table import policy_of
from dsa_dispatch._operations import autograd
from dsa_dispatch._operations.attention import (
    run_fused_absorbed_sparse_attention,
    run_fused_gqa_sparse_attention,
)
from dsa_dispatch._operations.dsa import run_fused_dsa_attention
from dsa_dispatch._operations.indexer import (
    TopK,
    TopKWithLoss,
    run_fused_qk_topk,
    run_fused_qk_topk_with_loss,
)
from dsa_dispatch._policy.config import explicit_text
from dsa_dispatch._runtime import current
from dsa_dispatch.errors import InvalidInputError

__all__ = [
    "TopK",
    "TopKWithLoss",
    "explain",
    "run_fused_absorbed_sparse_attention",
    "run_fused_dsa_attention",
    "run_fused_gqa_sparse_attention",
    "run_fused_qk_topk",
    "run_fused_qk_topk_with_loss",
    "use_fused_dsa_kernels",
]

autograd.register()

OPERATIONS: Final[Mapping[str, Any]] = {
    "run_fused_qk_topk": run_fused_qk_topk,
    "run_fused_qk_topk_with_loss": run_fused_qk_topk_with_loss,
    "run_fused_absorbed_sparse_attention": run_fused_absorbed_sparse_attention,
    "run_fused_dsa_attention": run_fused_dsa_attention,
    "run_fused_gqa_sparse_attention": run_fused_gqa_sparse_attention,
}


def explain(
    operation: str,
    *args: Any,
    call: CallSpec | None = None,
    device: DeviceInfo | None = None,
    **kwargs: Any,
) -> Decision:
    """Who would serve a call, and why the others would not: the code that decides, with its cache bypassed.

    Either ``explain("run_fused_qk_topk", config, q, k, ...)`` with the operation's own arguments, or
    ``explain("run_fused_qk_topk", call=CallSpec(...))`` with data, and then ``device=DeviceInfo(...)`` for hardware
    that
    is not here. Runs no kernel but the self-test of a backend that has not been used yet. The ``Decision`` prints
    as text
    and has ``to_markdown`` and ``to_json``. Raises what the operation raises on bad input, never ``NoBackendError``,
    and ``InvalidInputError`` for an unknown operation, a mixture of both forms or ill-typed data.
    """
    if call is not None:
        if not isinstance(call, CallSpec):
            raise InvalidInputError(f"explain: call: got {type(call).__name__}, expected a CallSpec")
        config = _only_config(args, kwargs)
        return explain_call(dataclasses.replace(call, operation=operation), device, config)
    if device is not None:
        raise InvalidInputError(
            "explain: device= is for a call as data, call=CallSpec(...); a call by its arguments is on the device of "
            "its tensors. Explain it without device=, and pass the `.call` of that as call= beside device=."
        )
    return explain_operation(OPERATIONS, operation, *args, **kwargs)


def _only_config(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    others = [type(argument).__name__ for argument in args[1:]]
    others += [name for name in kwargs if args or name != "config"]
    if others:
        raise InvalidInputError(
            f"explain: got {', '.join(others)} beside call=, which holds the whole call; possible beside it are config "
            f"and device=. Leave call= out to explain a call by the operation's own arguments."
        )
    return args[0] if args else kwargs.get("config")


def use_fused_dsa_kernels(config: object) -> bool:
    """Whether fused kernels may be tried: not when the host's ``attention_backend`` is unfused or the policy is
    ``none``."""
    backend = getattr(config, "attention_backend", None)
    if getattr(backend, "name", backend) == "unfused":
        return False
    return policy_of(current(), explicit_text(config)).allows_fused()
