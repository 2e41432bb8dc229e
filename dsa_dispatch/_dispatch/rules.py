"""The two fields of a capability that are code: ``extra_check`` and ``scratch``, asked with a guard.

A rule that breaks costs its own backend the call, and nobody else's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dsa_dispatch._call import CallSpec
from dsa_dispatch._capability import Capability, Scratch, no_scratch
from dsa_dispatch._decline import Decline, DeclineCode
from dsa_dispatch._policy.values import shown
from dsa_dispatch._registry.faults import raised, traced
from dsa_dispatch._stages import OPERATION_OF, Stage
from dsa_dispatch._typed import type_errors


@dataclass(frozen=True, slots=True)
class RuleFault:
    """A rule that did not answer: as a decline, with the traceback where it raised."""

    decline: Decline
    traceback: str = ""


def extra_decline(capability: Capability, call: CallSpec) -> Decline | None:
    """What ``extra_check`` says of a call."""
    answer = _extra_answer(capability, call)
    return answer.decline if isinstance(answer, RuleFault) else answer


def _extra_answer(capability: Capability, call: CallSpec) -> Decline | RuleFault | None:
    if capability.extra_check is None:
        return None
    expected = "a rule that returns a Decline or None"
    try:
        answer = capability.extra_check(call)
        if answer is None or (isinstance(answer, Decline) and not any(type_errors(answer, "Decline"))):
            return answer
        return _fault("extra_check", f"returned {shown(answer)}", expected)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _fault("extra_check", raised(error), expected, traced(error))


def scratch_fault(capability: Capability, call: CallSpec) -> RuleFault | None:
    """What is wrong with ``scratch`` for a call as the kernel sees it.

    Asked without lengths: ranks with different ones must decide alike, and one decision serves many.
    """
    if capability.scratch is no_scratch:
        return None
    expected = "a function that returns a Scratch of bytes"
    try:
        scratch: object = capability.scratch(dataclasses.replace(call, batch=1, rows=1, keys=1))
        if not isinstance(scratch, Scratch):
            return _fault("scratch", f"returned {shown(scratch)}", expected)
        wrong = [*type_errors(scratch, "Scratch")]
        if not wrong:
            parts = (*scratch.per_row, *scratch.fixed)
            wrong = [f"{name} of {size} bytes" for name, size in parts if size < 0]
        return _fault("scratch", "; ".join(wrong), expected) if wrong else None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _fault("scratch", raised(error), expected, traced(error))


def _fault(field: str, got: str, supported: str, traceback: str = "") -> RuleFault:
    hint = "It is a fault of the backend: `dsa-dispatch doctor` shows it."
    return RuleFault(Decline(DeclineCode.EXTRA_CHECK, field, got, supported, hint), traceback)


def rule_faults(capability: Capability, stage: Stage, device: str) -> tuple[RuleFault, ...]:
    """The rules that fail on the smallest call that the capability declares."""
    call = _smallest_call(capability, stage, device)
    found = (_extra_answer(capability, call), scratch_fault(capability, call))
    return tuple(entry for entry in found if isinstance(entry, RuleFault))


def _smallest_call(capability: Capability, stage: Stage, device: str) -> CallSpec:
    kv_heads = (capability.kv_heads.smallest() or 1) if stage.startswith("gqa") else 1
    heads = next(
        (count for count in range(kv_heads, 1 << 12, kv_heads) if capability.heads.runs(count)),
        capability.heads.smallest() or 1,
    )
    qk, v = capability.channels.smallest()
    return CallSpec(
        operation=OPERATION_OF[stage],
        device=device,
        dtype="bfloat16" if "bfloat16" in capability.dtypes else sorted(capability.dtypes)[0],
        width=capability.width.smallest() or 1,
        heads=heads,
        kv_heads=kv_heads,
        qk_channels=qk,
        v_channels=v,
        index_heads=heads,
        index_channels=qk,
        weights_dtype=sorted(capability.weights_dtypes)[0],
        use_relu=True in capability.relu,
        sparse_loss="sparse" in capability.losses,
        bounds=sorted(capability.bounds)[0],
        layout=sorted(capability.layouts)[0],
        context_parallel="none"
        if "none" in capability.context_parallel
        else sorted(capability.context_parallel)[0],
    )
