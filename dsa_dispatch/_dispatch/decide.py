"""The decision: a call, a policy and a registry give each stage its backend, or every reason why it has none."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from dsa_dispatch._backend import BackendSpec
from dsa_dispatch._call import CallSpec, DeviceInfo, StageOptions
from dsa_dispatch._decline import Decline, DeclineCode
from dsa_dispatch._dispatch import check
from dsa_dispatch._dispatch.decision import Candidate, Decision, StageDecision
from dsa_dispatch._dispatch.device import default_budget, device_info
from dsa_dispatch._dispatch.plan import Excluded, Plan, StagePlan, intern_plan
from dsa_dispatch._policy.policy import Policy
from dsa_dispatch._registry.availability import Availability, installation_declines, probe
from dsa_dispatch._registry.registry import Snapshot
from dsa_dispatch._runtime import Runtime, current
from dsa_dispatch._stages import BACKWARD_STAGES, GROUP_STAGES, Group, Stage
from dsa_dispatch.errors import NoBackendError

LOGGER = logging.getLogger("dsa_dispatch")
REFERENCE = "torch_dense"


def needed_stages(group: Group, call: CallSpec) -> tuple[Stage, ...]:
    """The stages a call will run: a backward only where some input needs a gradient."""
    return tuple(stage for stage in GROUP_STAGES[group] if stage not in BACKWARD_STAGES or call.needs_grad)


def decide(
    runtime: Runtime,
    call: CallSpec,
    policy: Policy,
    device: torch.device | None,
    info: DeviceInfo,
    stages: Sequence[Stage],
    excluded: Excluded = (),
) -> Decision:
    """Judge every backend for every stage. Imports only a winner, in order, and only once.

    ``excluded`` are backends that declined the very call at run time. Without a ``device`` nothing is imported.
    """
    decided = [_decide_stage(runtime, call, policy, device, info, stage, excluded) for stage in stages]
    return Decision(call, info, policy, tuple(decided))


def _decide_stage(
    runtime: Runtime,
    call: CallSpec,
    policy: Policy,
    device: torch.device | None,
    info: DeviceInfo,
    stage: Stage,
    excluded: Excluded,
) -> StageDecision:
    snapshot = runtime.snapshot
    auto = _auto_order(runtime, snapshot, stage, call)
    named = _named(snapshot, policy, stage)
    allowed = frozenset(named) if policy.strict(stage) else None
    candidates: list[Candidate] = []
    chosen = False
    auto_choice = None
    static = {name: static_declines(snapshot.backends[name].spec, stage, call, info) for name in auto}
    for name in auto:
        if not static[name]:
            auto_choice = name
            break
    for name in dict.fromkeys((*named, *auto)):
        spec = snapshot.backends[name].spec
        reasons = (*static[name], *(why for where, who, why in excluded if (where, who) == (stage, name)))
        if allowed is not None and name not in allowed:
            reasons = (_excluded(policy, stage), *reasons)
        provider = ""
        if not reasons and not chosen and device is not None:
            availability = probe(runtime, spec, stage, device)
            reasons, provider = availability.declines, availability.provider
        if reasons:
            candidates.append(Candidate(name, "declined", reasons))
            continue
        capability = spec.stages[stage].capability
        candidates.append(
            Candidate(
                name,
                "not needed" if chosen else "chosen",
                legalization=check.legalize(capability, stage, call),
                provider=provider,
                verified=capability.verified,
            )
        )
        chosen = True
    return StageDecision(
        stage, tuple(candidates), auto_choice, _mapping_hint(candidates, policy, stage, chosen)
    )


def static_declines(spec: BackendSpec, stage: Stage, call: CallSpec, info: DeviceInfo) -> tuple[Decline, ...]:
    """Every reason that needs no import: the stage itself, the installation, the capability."""
    provided = spec.stages.get(stage)
    if provided is None:
        return (Decline(DeclineCode.STAGE_NOT_PROVIDED, "stage", stage, ", ".join(spec.stages)),)
    return (
        *installation_declines(spec, stage),
        *check.declines(provided.capability, stage, call, info),
    )


def _named(snapshot: Snapshot, policy: Policy, stage: Stage) -> tuple[str, ...]:
    """What the user named, families expanded, in order."""
    if policy.only_reference(stage):
        return (REFERENCE,) if REFERENCE in snapshot.backends else ()
    return tuple(dict.fromkeys(member for name in policy.names(stage) for member in snapshot.members(name)))


def _auto_order(runtime: Runtime, snapshot: Snapshot, stage: Stage, call: CallSpec) -> tuple[str, ...]:
    """Declared rank, ties by name, then whatever permutation a policy plugin makes of it."""
    order = tuple(entry.spec.name for entry in snapshot.ranked())
    if not snapshot.plugin_names and not snapshot.plugins.get_plugins():
        return order
    try:
        proposed = snapshot.plugins.hook.dsa_dispatch_order(call=call, candidates=order)
    except Exception:
        # A policy plugin is somebody else's code; without it the declared order still stands.
        _report_once(runtime, "dsa_dispatch_order", "raised", "the declared order is used")
        return order
    if proposed is None:
        return order
    if sorted(proposed) != sorted(order):
        _report_once(
            runtime,
            "dsa_dispatch_order",
            f"returned {proposed!r}, not a permutation of {order!r}",
            "it is ignored",
        )
        return order
    return tuple(proposed)


def _report_once(runtime: Runtime, hook: str, fault: str, consequence: str) -> None:
    if (hook, fault) not in runtime.warned:
        with runtime.lock:
            runtime.warned |= {(hook, fault)}
        LOGGER.warning("plugin hook %s %s; %s", hook, fault, consequence, exc_info=fault == "raised")


def _excluded(policy: Policy, stage: Stage) -> Decline:
    names = ", ".join(policy.names(stage))
    rule = "dsa_kernel_backend=none" if policy.only_reference(stage) else "dsa_kernel_fallback=error"
    return Decline(
        DeclineCode.DISABLED, "policy", rule, REFERENCE if policy.only_reference(stage) else f"only {names}"
    )


def _mapping_hint(candidates: Sequence[Candidate], policy: Policy, stage: Stage, chosen: bool) -> str:
    """When the named backend lacks just this stage, the setting that would keep it for the others."""
    if chosen or not policy.strict(stage):
        return ""
    able = [
        entry.backend
        for entry in candidates
        if [decline.code for decline in entry.declines] == [DeclineCode.DISABLED]
    ]
    names = ",".join(policy.names(stage))
    if not able or policy.only_reference(stage):
        return ""
    return (
        f"To allow it for this stage only, write dsa_kernel_backend={{..., {stage!r}: {able[0]!r}}} "
        f"beside {names!r} for the others, or dsa_kernel_fallback='next'."
    )


def no_backend_message(decision: Decision) -> str:
    """What was asked, what was found per backend, what is possible."""
    missing = [entry for entry in decision.stages if entry.chosen is None]
    lines = [
        f"no backend may serve {', '.join(entry.stage for entry in missing)} of this call.",
        decision.to_text(),
    ]
    if not any(entry.candidates for entry in missing):
        lines.append("No backend is registered: `dsa-dispatch doctor` lists plugins that failed to load.")
    lines.append(
        "What to do: change the call as a hint above says, allow more backends (dsa_kernel_backend, "
        "dsa_kernel_fallback='next'), or install one (`dsa-dispatch list`)."
    )
    return "\n".join(lines)


def plan(runtime: Runtime, decision: Decision, device: torch.device, excluded: Excluded = ()) -> Plan:
    """Turn a decision into a plan; raise ``NoBackendError`` where a stage is not served, and warn where the user's
    choice was."""
    if not decision.served:
        for entry in decision.stages:
            _count_declines(runtime, entry)
        raise NoBackendError(no_backend_message(decision), decision)
    stages: dict[Stage, StagePlan] = {}
    for entry in decision.stages:
        chosen = entry.chosen
        assert chosen is not None
        assert chosen.legalization is not None
        spec = runtime.snapshot.backends[chosen.backend].spec
        availability: Availability = probe(runtime, spec, entry.stage, device)
        assert availability.function is not None
        stages[entry.stage] = StagePlan(
            entry.stage,
            chosen.backend,
            chosen.provider,
            availability.function,
            spec.stages[entry.stage].capability,
            chosen.legalization,
        )
        _count_declines(runtime, entry)
        _warn(runtime, decision, entry)
    policy = decision.policy
    budget = policy.memory_budget if policy.memory_budget is not None else default_budget(decision.device)
    options = StageOptions(deterministic=policy.deterministic, memory_budget=budget)
    return intern_plan(decision.call, stages, options, policy, device, excluded)


def replan(before: Plan, stage: StagePlan, declined: Decline) -> Plan:
    """``before`` with every stage resolved anew, without the backend that declined at run time.

    Raises ``NoBackendError`` when nobody is left.
    """
    runtime = current()
    excluded = (*before.excluded, (stage.stage, stage.backend, declined))
    device = before.device
    decision = decide(
        runtime, before.call, before.policy, device, device_info(device), tuple(before.stages), excluded
    )
    return plan(runtime, decision, device, excluded)


def _count_declines(runtime: Runtime, entry: StageDecision) -> None:
    for candidate in entry.declined():
        for decline in candidate.declines:
            runtime.count("decline", entry.stage, candidate.backend, decline.code.value)


def _warn(runtime: Runtime, decision: Decision, entry: StageDecision) -> None:
    """Say once, per stage, named backend and codes, when what the user named did not run.

    Under ``auto`` the same holds for a CUDA call that lands on the reference: the fault is a run that silently went
    slow.
    """
    chosen = entry.chosen
    assert chosen is not None
    names = decision.policy.names(entry.stage)
    if names and names != ("none",):
        wanted = _named(runtime.snapshot, decision.policy, entry.stage)
        if chosen.backend in wanted:
            return
        subject = f"dsa_kernel_backend={','.join(names)}"
    elif not names and decision.call.device == "cuda" and chosen.backend == REFERENCE:
        wanted = tuple(candidate.backend for candidate in entry.declined())
        subject = "dsa_kernel_backend=auto"
    else:
        return
    refused = [candidate for candidate in entry.declined() if candidate.backend in wanted]
    codes = sorted({decline.code.value for candidate in refused for decline in candidate.declines})
    once = ("moved on", entry.stage, ",".join(names), *codes)
    if once in runtime.warned:
        return
    with runtime.lock:
        runtime.warned |= {once}
    reasons = "; ".join(candidate.line() for candidate in refused) or "no other backend is registered"
    LOGGER.warning(
        "%s: %s runs on %s, not as named by %s. %s. (said once; dsa_kernel_fallback='error' raises instead)",
        decision.call.operation,
        entry.stage,
        chosen.backend,
        subject,
        reasons,
    )
