"""A plan: the resolved stages of a call, interned for the life of the process under a small integer."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import torch

from dsa_dispatch._call import CallSpec, StageOptions
from dsa_dispatch._capability import Capability
from dsa_dispatch._decline import Decline
from dsa_dispatch._dispatch.check import Legalization
from dsa_dispatch._dispatch.recording import NO_PLAN, Explained
from dsa_dispatch._policy.policy import Policy
from dsa_dispatch._policy.values import QueryChunk
from dsa_dispatch._stages import Stage

Excluded = tuple[tuple[Stage, str, Decline], ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage, ready to run."""

    stage: Stage
    backend: str
    provider: str
    function: Callable[..., Any]
    capability: Capability
    legalization: Legalization


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call runs. It names no tensor and no length, so calls of many lengths share one."""

    id: int
    token: torch.Tensor
    """``id`` as a 0-d CPU tensor: what the ops pass from forward to backward."""
    call: CallSpec
    stages: Mapping[Stage, StagePlan]
    options: StageOptions
    policy: Policy
    device: torch.device
    excluded: Excluded = ()
    """Backends that declined at run time, so that a further replan does not ask them again."""

    counted: tuple[str, str] = field(init=False, compare=False, repr=False)
    """The counter of its decisions, made once since it is on the path of every call."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counted", ("decision", self.call.operation))

    @property
    def query_chunk(self) -> QueryChunk:
        return self.policy.query_chunk

    def stage(self, stage: Stage) -> StagePlan:
        try:
            return self.stages[stage]
        except KeyError:
            raise RuntimeError(
                f"{self.call.operation}: the forward planned no {stage}, since no input needed a gradient then"
            ) from None


# Plans stay for the life of the process, since a graph may hold an id for as long as it likes. Equal plans share one id
# and none holds a length, so their number is that of the distinct shapes and policies of a run.
_PLANS: Final[list[Plan]] = []
_IDS: Final[dict[Hashable, Plan]] = {}
_LOCK: Final = threading.Lock()


def intern_plan(
    call: CallSpec,
    stages: Mapping[Stage, StagePlan],
    options: StageOptions,
    policy: Policy,
    device: torch.device,
    excluded: Excluded = (),
) -> Plan:
    """The plan with this content; lengths of ``call`` are dropped."""
    call = dataclasses.replace(call, batch=1, rows=1, keys=1, capturing=False)
    content = (call, tuple(stages.items()), options, policy, device, excluded)
    with _LOCK:
        plan = _IDS.get(content)
        if plan is None:
            number = len(_PLANS)
            token = torch.tensor(number, device="cpu")
            plan = Plan(
                number, token, call, MappingProxyType(dict(stages)), options, policy, device, excluded
            )
            _PLANS.append(plan)
            _IDS[content] = plan
    return plan


def plan_of(token: torch.Tensor) -> Plan:
    """The plan an op was handed. Ends the operation while ``explain`` records."""
    number = int(token)
    if number == NO_PLAN:
        raise Explained
    return _PLANS[number]


def plan_by_id(number: int) -> Plan:
    """The plan whose ``id`` this is."""
    return _PLANS[number]
