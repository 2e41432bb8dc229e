"""``explain``: the very code that decides, without the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from dsa_dispatch._call import CallSpec, DeviceInfo
from dsa_dispatch._dispatch.decide import decide, needed_stages
from dsa_dispatch._dispatch.decision import Decision
from dsa_dispatch._dispatch.device import device_info
from dsa_dispatch._dispatch.recording import recording
from dsa_dispatch._dispatch.table import dtype_name, policy_of
from dsa_dispatch._policy.config import explicit_text
from dsa_dispatch._policy.values import nearest
from dsa_dispatch._runtime import current
from dsa_dispatch._stages import OPERATION_GROUPS, Group
from dsa_dispatch._typed import type_errors
from dsa_dispatch.errors import InvalidInputError


def explain_operation(
    operations: Mapping[str, Callable[..., Any]], operation: str, *args: Any, **kwargs: Any
) -> Decision:
    """Run the operation's own code up to its first kernel, and return all that it decided."""
    _check_operation(operation)
    with recording() as decisions:
        operations[operation](*args, **kwargs)
    return joined(decisions, _widest(decisions))


def joined(decisions: Sequence[Decision], call: CallSpec) -> Decision:
    """One decision of what an operation decided in turn."""
    return dataclasses.replace(
        decisions[0],
        call=call,
        stages=tuple(stage for decision in decisions for stage in decision.stages),
        faults=tuple(dict.fromkeys(fault for decision in decisions for fault in decision.faults)),
    )


def _check_operation(operation: object) -> None:
    if not (isinstance(operation, str) and operation in OPERATION_GROUPS):
        raise InvalidInputError(
            f"explain: unknown operation {operation!r}; known: {', '.join(OPERATION_GROUPS)}"
        )


def _widest(decisions: list[Decision]) -> CallSpec:
    """One call that holds the fields of all decisions of an operation, so that ``explain_call`` says the same of it.

    The last decision is the indexer's where there is one: its rows have bounds and a layout, an attention's have ids.
    """
    call = decisions[-1].call
    for decision in decisions[:-1]:
        other = decision.call
        changed = {
            name: getattr(other, name)
            for name in _FIELDS["attention"]
            if getattr(call, name) == _DEFAULTS[name]
        }
        call = dataclasses.replace(
            call,
            **changed,
            teacher_dtype=call.teacher_dtype or (other.dtype if other.dtype != call.dtype else ""),
            extras=call.extras | other.extras,
            needs_grad=call.needs_grad | other.needs_grad,
        )
    return call


def explain_call(call: CallSpec, device: DeviceInfo | None = None, config: object = None) -> Decision:
    """Decide a call that is given as data.

    ``device`` may describe hardware that is not here; then nothing is imported or tested, and "chosen" means that the
    declared data accept the call.
    """
    _check_operation(call.operation)
    if not (device is None or isinstance(device, DeviceInfo)):
        raise InvalidInputError(
            f"explain: device: got {device!r}, expected a DeviceInfo, such as "
            f"DeviceInfo('cuda', 'NVIDIA H200', (9, 0), total_memory=..., shared_memory=...)"
        )
    faults = [*type_errors(call, "call"), *(type_errors(device, "device") if device is not None else ())]
    faults = faults or [*_unknown_names(call, device)]
    if faults:
        raise InvalidInputError(f"explain: {'; '.join(faults)}")
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
    return joined(decisions, call)


_INPUTS: Final = ("q", "k", "weights", "query", "key", "value", "up_v_weight")
"""Every input that may need a gradient, of whichever operation."""
_FLOATS: Final = ("bfloat16", "float16", "float32", "float64")


def _unknown_names(call: CallSpec, device: DeviceInfo | None) -> Iterator[str]:
    """Fields of a well-typed call that hold a name of nothing: misspelt, they would describe another call."""
    for name in sorted(call.needs_grad - {*_INPUTS}):
        yield (
            f"call, field needs_grad: got {name!r}, expected names of inputs: {', '.join(_INPUTS)}."
            f"{nearest(name, _INPUTS)}"
        )
    for field in ("dtype", "weights_dtype", "teacher_dtype"):
        name = getattr(call, field)
        found = getattr(torch, name, None)
        known = isinstance(found, torch.dtype) and found.is_floating_point and dtype_name(found) == name
        if not known and not (field == "teacher_dtype" and name == ""):
            yield (
                f"call, field {field}: got {name!r}, expected a floating-point type by its name in torch: "
                f"{', '.join(_FLOATS)}.{nearest(name, _FLOATS)}"
            )
    if call.index_dtype not in ("int32", "int64"):
        yield (
            f"call, field index_dtype: got {call.index_dtype!r}, expected int32 or int64."
            f"{nearest(call.index_dtype, ('int32', 'int64'))}"
        )
    places = [("call, field device", call.device)]
    places += [("device, field type", device.type)] if device is not None else []
    for where, kind in places:
        if not _is_device_type(kind):
            yield (
                f"{where}: got {kind!r}, expected a type of device without an index, such as cpu or cuda."
                f"{nearest(kind.partition(':')[0], ('cpu', 'cuda'))}"
            )


def _is_device_type(name: str) -> bool:
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


_DEFAULTS: Final = {field.name: field.default for field in dataclasses.fields(CallSpec)}
_INDEXER: Final = (
    *("width", "index_heads", "index_channels", "weights_dtype"),
    *("use_relu", "sparse_loss", "bounds", "layout", "context_parallel"),
)
_FIELDS: Final[dict[Group, tuple[str, ...]]] = {
    "topk": _INDEXER,
    "loss": (*_INDEXER, "heads", "qk_channels", "teacher_dtype"),
    "attention": ("width", "heads", "qk_channels", "v_channels", "index_dtype"),
    "gqa": ("width", "heads", "kv_heads", "qk_channels", "v_channels", "index_dtype"),
}
"""The fields that the calls of one group set beside those that every call has."""
_COMMON: Final = frozenset(
    {"operation", "device", "dtype", "batch", "rows", "keys", "extras", "deterministic", "capturing"}
)


def _call_of_group(group: Group, call: CallSpec) -> CallSpec:
    """The call as the operation itself would put it for one group."""
    kept = {name: getattr(call, name) for name in (*_COMMON, *_FIELDS[group])}
    teacher = call.teacher_dtype or call.dtype
    if group == "loss":
        kept["teacher_dtype"] = teacher
    if group in ("attention", "gqa"):
        kept |= {"bounds": "ranges", "dtype": teacher}
    return CallSpec(**kept, needs_grad=call.needs_grad.intersection(_DIFFERENTIABLE[group]))


_DIFFERENTIABLE: Final[dict[Group, tuple[str, ...]]] = {
    "topk": (),
    "loss": ("q", "k", "weights"),
    "attention": ("query", "key"),
    "gqa": ("query", "key", "value"),
}


def _real_device(kind: str) -> torch.device | None:
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    return torch.device(kind) if kind == "cpu" else None
