"""The decision: a call, a policy and a registry give each stage its backend, or every reason why it has none."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from dsa_dispatch._backend import BackendSpec
from dsa_dispatch._call import CallSpec, DeviceInfo, RowLayout, StageOptions
from dsa_dispatch._decline import Decline, DeclineCode
from dsa_dispatch._dispatch import check
from dsa_dispatch._dispatch.decision import Candidate, Decision, StageDecision
from dsa_dispatch._dispatch.device import default_budget, device_info
from dsa_dispatch._dispatch.plan import Excluded, Plan, StagePlan, intern_plan
from dsa_dispatch._dispatch.plugins import Order, backend_order, observe
from dsa_dispatch._policy.policy import Policy
from dsa_dispatch._registry.availability import Availability, installation_declines, probe
from dsa_dispatch._registry.registry import Snapshot
from dsa_dispatch._runtime import Runtime, current
from dsa_dispatch._stages import BACKWARD_STAGES, GROUP_STAGES, STAGES, Group, Stage
from dsa_dispatch.errors import NoBackendError

LOGGER = logging.getLogger("dsa_dispatch")
REFERENCE = "torch_dense"


def needed_stages(group: Group, call: CallSpec) -> tuple[Stage, ...]:
    """The stages a call will run: a backward only where some input needs a gradient."""
    return tuple(stage for stage in GROUP_STAGES[group] if stage not in BACKWARD_STAGES or call.needs_grad)


def decide(
    runtime: Runtime,
    snapshot: Snapshot,
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
    order = backend_order(snapshot, call)
    judge = _Judge(runtime, snapshot, call, policy, device, info, order, excluded)
    return Decision(call, info, policy, tuple(judge.stage(stage) for stage in stages), order.faults)


@dataclass(frozen=True, slots=True)
class _Judge:
    """What every stage of one decision has in common."""

    runtime: Runtime
    snapshot: Snapshot
    call: CallSpec
    policy: Policy
    device: torch.device | None
    info: DeviceInfo
    order: Order
    excluded: Excluded

    def stage(self, stage: Stage) -> StageDecision:
        named = named_backends(self.snapshot, self.policy, stage)
        static = {name: self._declared(stage, name, named) for name in self.order.names}
        auto_choice = next((name for name in self.order.names if not static[name]), None)
        candidates: list[Candidate] = []
        chosen = False
        for name in dict.fromkeys((*named, *self.order.names)):
            spec = self.snapshot.backends[name].spec
            reasons = static[name] + tuple(
                why for where, who, why in self.excluded if (where, who) == (stage, name)
            )
            if self.policy.strict(stage) and name not in named:
                reasons = (_excluded(self.policy, stage), *reasons)
            provider = ""
            if not reasons and not chosen and self.device is not None:
                availability = probe(self.runtime, spec, stage, self.device)
                reasons, provider = availability.declines, availability.provider
            if reasons:
                candidates.append(Candidate(name, "declined", reasons))
                continue
            capability = spec.stages[stage].capability
            candidates.append(
                Candidate(
                    name,
                    "not needed" if chosen else "chosen",
                    legalization=check.legalize(capability, stage, self.call),
                    provider=provider,
                    verified=capability.verified,
                    gradient_error=capability.gradient_error,
                )
            )
            chosen = True
        hint = "" if chosen else _alternative(candidates, self.policy, stage)
        return StageDecision(stage, tuple(candidates), auto_choice, hint, self.order.policy_plugin)

    def _declared(self, stage: Stage, name: str, named: Sequence[str]) -> tuple[Decline, ...]:
        reasons = static_declines(self.snapshot.backends[name].spec, stage, self.call, self.info)
        if name in named and self.policy.strict(stage):
            return tuple(
                dataclasses.replace(why, hint=_mapping(self.snapshot, self.policy, stage, named))
                if why.code is DeclineCode.STAGE_NOT_PROVIDED
                else why
                for why in reasons
            )
        return reasons


def static_declines(spec: BackendSpec, stage: Stage, call: CallSpec, info: DeviceInfo) -> tuple[Decline, ...]:
    """Every reason that needs no import: the stage itself, the installation, the capability."""
    provided = spec.stages.get(stage)
    if provided is None:
        return (Decline(DeclineCode.STAGE_NOT_PROVIDED, "stage", stage, ", ".join(spec.stages)),)
    return (
        *installation_declines(spec, stage),
        *check.declines(provided.capability, stage, call, info),
    )


def named_backends(snapshot: Snapshot, policy: Policy, stage: Stage) -> tuple[str, ...]:
    """What the user named, families expanded, in order."""
    if policy.only_reference(stage):
        return (REFERENCE,) if REFERENCE in snapshot.backends else ()
    return tuple(dict.fromkeys(member for name in policy.names(stage) for member in snapshot.members(name)))


def _excluded(policy: Policy, stage: Stage) -> Decline:
    names = ", ".join(policy.names(stage))
    rule = "dsa_kernel_backend=none" if policy.only_reference(stage) else "dsa_kernel_fallback=error"
    return Decline(
        DeclineCode.DISABLED, "policy", rule, REFERENCE if policy.only_reference(stage) else f"only {names}"
    )


def _mapping(snapshot: Snapshot, policy: Policy, stage: Stage, named: Sequence[str]) -> str:
    """The setting that keeps what is named for the stages it has and leaves this one free, since only the stages that
    a mapping names are strict."""

    def provided(names: Iterable[str], wanted: Stage) -> bool:
        return any(wanted in snapshot.backends[name].spec.stages for name in names)

    if provided(named, stage):
        return ""
    kept: dict[str, str | list[str]] = {}
    for other in STAGES:
        names = policy.names(other)
        if policy.only_reference(other) or provided(named_backends(snapshot, policy, other), other):
            kept[other] = names[0] if len(names) == 1 else list(names)
    if not kept:
        return f"Take {stage} out of dsa_kernel_backend to leave it to the other backends."
    return f"Write dsa_kernel_backend={kept!r} to leave this stage to the other backends."


def _alternative(candidates: Sequence[Candidate], policy: Policy, stage: Stage) -> str:
    """Who could serve a stage that nobody may."""
    able = [
        entry.backend
        for entry in candidates
        if [decline.code for decline in entry.declines] == [DeclineCode.DISABLED]
    ]
    if not able or policy.only_reference(stage):
        return ""
    return (
        f"{', '.join(able)} could: name it for this stage (dsa_kernel_backend={{{stage!r}: {able[0]!r}, ...}}) or set "
        f"dsa_kernel_fallback='next'."
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


def plan(
    runtime: Runtime,
    snapshot: Snapshot,
    decision: Decision,
    device: torch.device,
    excluded: Excluded = (),
) -> Plan:
    """Turn a decision into a plan; raise ``NoBackendError`` where a stage is not served, and warn where the user's
    choice was."""
    stages = _resolved(runtime, snapshot, decision, device)
    return intern_plan(decision.call, stages, _options(decision), decision.policy, device, excluded)


def _resolved(
    runtime: Runtime, snapshot: Snapshot, decision: Decision, device: torch.device
) -> dict[Stage, StagePlan]:
    for fault in decision.faults:
        if runtime.first_time("policy plugin", fault.partition(" and was passed over")[0]):
            LOGGER.warning("%s (said once)", fault)
    for entry in decision.stages:
        _count_declines(runtime, entry)
    if not decision.served:
        raise NoBackendError(no_backend_message(decision), decision)
    stages: dict[Stage, StagePlan] = {}
    for entry in decision.stages:
        chosen = entry.chosen
        assert chosen is not None
        assert chosen.legalization is not None
        spec = snapshot.backends[chosen.backend].spec
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
        _warn(runtime, snapshot, decision, entry)
    return stages


def _options(decision: Decision) -> StageOptions:
    budget = decision.policy.memory_budget
    return StageOptions(
        deterministic=decision.policy.deterministic,
        memory_budget=default_budget(decision.device) if budget is None else budget,
    )


def replan(before: Plan, stage: StagePlan, declined: Decline, rows: RowLayout | None = None) -> Plan:
    """``before`` with one stage resolved anew, without the backend that declined it at run time.

    The other stages stay as they are: a forward may have run, and its backend may be gone since.
    ``rows`` is the layout of the declined call: a plan holds no lengths, and a backend's limits ask for them.
    Not interned: a decline may quote lengths, and interned plans stay for ever. Raises ``NoBackendError`` when nobody
    is left.
    """
    runtime = current()
    snapshot = runtime.snapshot
    excluded = (*before.excluded, (stage.stage, stage.backend, declined))
    device = before.device
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    call = dataclasses.replace(before.call, capturing=capturing)
    if rows is not None:
        call = dataclasses.replace(call, batch=rows.batch, rows=rows.rows, keys=rows.keys)
    decision = decide(
        runtime, snapshot, call, before.policy, device, device_info(device), (stage.stage,), excluded
    )
    observe(runtime, snapshot, decision)
    stages = {**before.stages, **_resolved(runtime, snapshot, decision, device)}
    return dataclasses.replace(before, stages=MappingProxyType(stages), excluded=excluded)


def _count_declines(runtime: Runtime, entry: StageDecision) -> None:
    for candidate in entry.declined():
        for decline in candidate.declines:
            runtime.count("decline", entry.stage, candidate.backend, decline.code.value)


def _warn(runtime: Runtime, snapshot: Snapshot, decision: Decision, entry: StageDecision) -> None:
    """Say once, per stage, named backend and codes, when what the user named did not run.

    Under ``auto`` the same holds for a CUDA call that lands on the reference: the fault is a run that silently went
    slow.
    """
    chosen = entry.chosen
    assert chosen is not None
    names = decision.policy.names(entry.stage)
    if names and names != ("none",):
        wanted = named_backends(snapshot, decision.policy, entry.stage)
        if chosen.backend in wanted:
            return
        complaint = (
            f"not as named by dsa_kernel_backend={','.join(names)} (dsa_kernel_fallback='error' would raise)"
        )
    elif not names and decision.call.device == "cuda" and chosen.backend == REFERENCE:
        wanted = tuple(candidate.backend for candidate in entry.declined())
        complaint = "the slow reference, since under dsa_kernel_backend=auto no other backend serves it"
    else:
        return
    refused = [candidate for candidate in entry.declined() if candidate.backend in wanted]
    codes = sorted({decline.code.value for candidate in refused for decline in candidate.declines})
    if not runtime.first_time("moved on", entry.stage, ",".join(names), *codes):
        return
    reasons = "; ".join(candidate.line() for candidate in refused) or "no other backend is registered"
    LOGGER.warning(
        "%s: %s runs on %s, %s. %s (said once)",
        decision.call.operation,
        entry.stage,
        chosen.backend,
        complaint,
        reasons,
    )
