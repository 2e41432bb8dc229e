"""The hot path: a plain tuple key, one dictionary lookup, one count."""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from dsa_dispatch._call import Bounds, CallSpec, ContextParallel, Layout
from dsa_dispatch._dispatch.decide import decide, needed_stages, plan
from dsa_dispatch._dispatch.decision import Decision
from dsa_dispatch._dispatch.device import device_info
from dsa_dispatch._dispatch.plan import Plan
from dsa_dispatch._dispatch.plugins import observe
from dsa_dispatch._dispatch.recording import RECORDED
from dsa_dispatch._policy.config import parse_text
from dsa_dispatch._policy.environment import environment_config
from dsa_dispatch._policy.policy import Policy, PolicyKey, check_names, policy_key, resolve_policy
from dsa_dispatch._registry.registry import Snapshot
from dsa_dispatch._runtime import Runtime, current
from dsa_dispatch._stages import Group

TABLE_SIZE: Final = 4096
"""Entries after which the decision table starts anew."""


@dataclass(frozen=True, slots=True)
class Request:
    """The part of a call that is fixed in the caller's code: everything but tensors and policy.

    It crosses the op boundary as text, so that compiled code keeps it as a constant.
    """

    group: Group
    operation: str
    width: int = 0
    v_channels: int = 0
    use_relu: bool = True
    sparse_loss: bool = True
    bounds: Bounds = "causal"
    layout: Layout = "bshd"
    context_parallel: ContextParallel = "none"
    extras: str = ""

    def text(self) -> str:
        return (
            f"{self.group}|{self.operation}|{self.width}|{self.v_channels}|{int(self.use_relu)}|"
            f"{int(self.sparse_loss)}|{self.bounds}|{self.layout}|{self.context_parallel}|{self.extras}"
        )


@functools.lru_cache(maxsize=1024)
def parse_request(text: str) -> Request:
    """What ``Request.text`` wrote, so that the words are those of its literals."""
    group, operation, width, v_channels, relu, sparse, bounds, layout, cp, extras = text.split("|")
    return Request(
        cast(Group, group),
        operation,
        int(width),
        int(v_channels),
        relu == "1",
        sparse == "1",
        cast(Bounds, bounds),
        cast(Layout, layout),
        cast(ContextParallel, cp),
        extras,
    )


def plan_for(inputs: Sequence[Tensor], request: str, needs_grad: Sequence[bool], policy: str) -> Plan:
    """The plan of a call, from the table or decided now.

    ``inputs`` in the order of the group's ``INPUT_NAMES`` entry; ``needs_grad`` beside them, True where a gradient is
    needed; ``policy`` the canonical text of an explicit config.
    """
    runtime = current()
    first = inputs[0]
    snapshot = runtime.snapshot
    settings = policy_key(policy, runtime.configured)
    key = (
        request,
        settings,
        first.device,
        tuple(needs_grad),
        tuple([(tensor.dtype, tensor.shape[2:]) for tensor in inputs]),
        _sizes(snapshot, inputs, request) if snapshot.sized else (),
        first.is_cuda and torch.cuda.is_current_stream_capturing(),
    )
    found = runtime.plans.get(key)
    if found is None:
        found = _miss(runtime, key, inputs, request, needs_grad, settings)
    counted = found.counted
    with runtime.counting:
        counters = runtime.counters
        counters[counted] = counters.get(counted, 0) + 1
    return found


def _sizes(snapshot: Snapshot, inputs: Sequence[Tensor], request: str) -> tuple[int, ...]:
    """Lengths as the limits they exceed, so that variable-length training hits; exact where a capability asks.

    Elements tensor by tensor: which of them count depends on the stage.
    """
    rows, batch, *_ = inputs[0].shape
    keys = inputs[1].shape[0]
    if snapshot.exact_sizes:
        return (rows, batch, keys)
    lengths = (bisect_left(snapshot.row_limits, rows * batch), bisect_left(snapshot.key_limits, keys * batch))
    limits = snapshot.element_limits
    if not limits:
        return lengths
    return (
        *lengths,
        *[bisect_left(limits, tensor.numel()) for tensor in inputs],
        bisect_left(limits, rows * batch * parse_request(request).width),
        # The output of grouped attention, which may be wider than its query.
        bisect_left(limits, rows * batch * inputs[0].shape[2] * inputs[2].shape[-1])
        if len(inputs) == 4
        else 0,
    )


def _miss(
    runtime: Runtime,
    key: object,
    inputs: Sequence[Tensor],
    request: str,
    needs_grad: Sequence[bool],
    settings: PolicyKey,
) -> Plan:
    epoch, snapshot = runtime.epoch, runtime.snapshot
    decision = decide_now(runtime, snapshot, inputs, request, needs_grad, settings)
    runtime.count("miss", decision.call.operation)
    observe(runtime, snapshot, decision)
    found = plan(runtime, snapshot, decision, inputs[0].device)
    with runtime.lock:
        # A registry that changed meanwhile has forgotten what was decided before; this came too late for that.
        if runtime.epoch == epoch:
            known = {} if len(runtime.plans) >= TABLE_SIZE else runtime.plans
            runtime.plans = {**known, key: found}
    return found


def decide_now(
    runtime: Runtime,
    snapshot: Snapshot,
    inputs: Sequence[Tensor],
    request: str,
    needs_grad: Sequence[bool],
    settings: PolicyKey,
) -> Decision:
    """Decide without the table: what a miss and ``explain`` share."""
    policy = checked_policy(runtime, settings)
    parsed = parse_request(request)
    call = call_of(parsed, inputs, needs_grad, policy.deterministic)
    device = inputs[0].device
    stages = needed_stages(parsed.group, call)
    return decide(runtime, snapshot, call, policy, device, device_info(device), stages)


def checked_policy(runtime: Runtime, settings: PolicyKey) -> Policy:
    """The policy of a key. Raises ``UnknownBackendError`` when any layer names a backend that nobody registered."""
    known = runtime.snapshot.names()
    for text in settings[:3]:
        check_names(parse_text(text), known)
    check_names(environment_config(settings[3]), known)
    return resolve_policy(settings)


def policy_of(runtime: Runtime, explicit: str) -> Policy:
    return checked_policy(runtime, policy_key(explicit, runtime.configured))


def record(inputs: Sequence[Tensor], request: str, needs_grad: Sequence[bool], policy: str) -> None:
    """Decide for ``explain``: nothing is cached, counted, warned of or raised."""
    recorded = RECORDED.get()
    assert recorded is not None
    runtime = current()
    settings = policy_key(policy, runtime.configured)
    recorded.append(decide_now(runtime, runtime.snapshot, inputs, request, needs_grad, settings))


def call_of(
    request: Request, inputs: Sequence[Tensor], needs_grad: Sequence[bool], deterministic: bool
) -> CallSpec:
    """The call that these tensors make."""
    first, second = inputs[:2]
    rows, batch = first.shape[:2]
    names = INPUT_NAMES[request.group]
    common = CallSpec(
        operation=request.operation,
        device=first.device.type,
        dtype=dtype_name(first.dtype),
        batch=batch,
        rows=rows,
        keys=second.shape[0],
        width=request.width,
        use_relu=request.use_relu,
        sparse_loss=request.sparse_loss,
        bounds=request.bounds,
        layout=request.layout,
        context_parallel=request.context_parallel,
        extras=frozenset(request.extras.split(",")) - {""},
        needs_grad=frozenset(name for name, need in zip(names, needs_grad, strict=False) if need),
        deterministic=deterministic,
        capturing=first.is_cuda and torch.cuda.is_current_stream_capturing(),
    )
    return dataclasses.replace(common, **_FIELDS_OF[request.group](request, inputs))


INPUT_NAMES: Final[dict[Group, tuple[str, ...]]] = {
    "topk": ("q", "k", "weights"),
    "loss": ("q", "k", "weights", "query", "key"),
    "attention": ("query", "key", "topk_indices"),
    "gqa": ("query", "key", "value", "topk_indices"),
}
"""The tensors that ``plan_for`` is given, per group."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _indexer_fields(request: Request, inputs: Sequence[Tensor]) -> dict[str, Any]:
    q, _, weights = inputs[:3]
    fields: dict[str, Any] = {
        "index_heads": q.shape[2],
        "index_channels": q.shape[3],
        "weights_dtype": dtype_name(weights.dtype),
    }
    if request.group == "loss":
        query = inputs[3]
        fields |= {
            "heads": query.shape[2],
            "qk_channels": query.shape[3],
            "teacher_dtype": dtype_name(query.dtype),
        }
    return fields


def _attention_fields(request: Request, inputs: Sequence[Tensor]) -> dict[str, Any]:
    query, _, indices = inputs
    return {
        "heads": query.shape[2],
        "qk_channels": query.shape[3],
        "v_channels": request.v_channels,
        "width": indices.shape[2],
        "index_dtype": dtype_name(indices.dtype),
    }


def _gqa_fields(request: Request, inputs: Sequence[Tensor]) -> dict[str, Any]:
    query, key, value, indices = inputs
    return {
        "heads": query.shape[2],
        "kv_heads": key.shape[2],
        "qk_channels": query.shape[3],
        "v_channels": value.shape[3],
        "width": indices.shape[2],
        "index_dtype": dtype_name(indices.dtype),
    }


_FIELDS_OF: Final[dict[Group, Callable[[Request, Sequence[Tensor]], dict[str, Any]]]] = {
    "topk": _indexer_fields,
    "loss": _indexer_fields,
    "attention": _attention_fields,
    "gqa": _gqa_fields,
}
