"""``explain``: the very code that decides, without the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsa_dispatch._call import CallSpec, DeviceInfo
from dsa_dispatch._dispatch.decide import decide, needed_stages
from dsa_dispatch._dispatch.decision import Decision
from dsa_dispatch._dispatch.device import device_info
from dsa_dispatch._dispatch.recording import recording
from dsa_dispatch._dispatch.table import INPUT_NAMES, policy_of
from dsa_dispatch._policy.config import explicit_text
from dsa_dispatch._runtime import current
from dsa_dispatch._stages import OPERATION_GROUPS, Group
from dsa_dispatch.errors import InvalidInputError


def explain_operation(
    operations: Mapping[str, Callable[..., Any]], operation: str, *args: Any, **kwargs: Any
) -> Decision:
    """Run the operation's own code up to its first kernel, and return all that it decided."""
    if operation not in operations:
        raise InvalidInputError(f"explain: unknown operation {operation!r}; known: {', '.join(operations)}")
    with recording() as decisions:
        operations[operation](*args, **kwargs)
    first = decisions[0]
    stages = tuple(stage for decision in decisions for stage in decision.stages)
    return dataclasses.replace(first, call=_widest(decisions), stages=stages)


def _widest(decisions: list[Decision]) -> CallSpec:
    """One call that holds the fields of all decisions of an operation; attention sizes come from the attention's
    own."""
    call = decisions[0].call
    for decision in decisions[1:]:
        changed = {
            field.name: getattr(decision.call, field.name)
            for field in dataclasses.fields(CallSpec)
            if getattr(decision.call, field.name) != field.default
            and getattr(call, field.name) in (field.default, frozenset())
        }
        call = dataclasses.replace(call, **changed)
    return call


def explain_call(call: CallSpec, device: DeviceInfo | None = None, config: object = None) -> Decision:
    """Decide a call that is given as data.

    ``device`` may describe hardware that is not here; then nothing is imported or tested, and "chosen" means that the
    declared data accept the call.
    """
    if call.operation not in OPERATION_GROUPS:
        raise InvalidInputError(
            f"explain: unknown operation {call.operation!r}; known: {', '.join(OPERATION_GROUPS)}"
        )
    runtime = current()
    snapshot = runtime.snapshot
    policy = policy_of(runtime, explicit_text(config))
    real = _real_device(call.device) if device is None else None
    if device is None:
        device = device_info(real) if real is not None else DeviceInfo(type=call.device, name=call.device)
    call = dataclasses.replace(
        call, device=device.type, deterministic=call.deterministic or policy.deterministic
    )
    decisions = []
    for group in OPERATION_GROUPS[call.operation]:
        asked = _call_of_group(group, call)
        stages = needed_stages(group, asked)
        decisions.append(decide(runtime, snapshot, asked, policy, real, device, stages))
    return dataclasses.replace(
        decisions[0], call=call, stages=tuple(stage for decision in decisions for stage in decision.stages)
    )


def _call_of_group(group: Group, call: CallSpec) -> CallSpec:
    """The call as the operation itself would put it for one group: only gradients of the group's own inputs count."""
    needs_grad = () if group == "topk" else call.needs_grad.intersection(INPUT_NAMES[group])
    if group == "loss":
        needs_grad = frozenset(needs_grad) - {"query", "key"}
    return dataclasses.replace(call, needs_grad=frozenset(needs_grad))


def _real_device(kind: str) -> torch.device | None:
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    return torch.device(kind) if kind == "cpu" else None
