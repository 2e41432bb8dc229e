"""A decision, as frozen data: per stage who was asked, who serves, and every reason why the others do not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

from dsa_dispatch._call import CallSpec, DeviceInfo
from dsa_dispatch._decline import Decline, DeclineCode
from dsa_dispatch._dispatch.check import (
    GROUPED_STAGES,
    INDEXED_STAGES,
    INDEXER_STAGES,
    Legalization,
    has_width,
)
from dsa_dispatch._dispatch.device import default_budget
from dsa_dispatch._policy.policy import Policy, Setting
from dsa_dispatch._stages import Stage

Status = Literal["chosen", "declined", "not needed"]

INSTALLATION: Final = frozenset({DeclineCode.NOT_INSTALLED, DeclineCode.VERSION})
"""Their hints are commands, the same at every stage: a text gives them once."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend, judged for one stage of one call."""

    backend: str
    status: Status
    declines: tuple[Decline, ...] = ()
    legalization: Legalization | None = None
    provider: str = ""
    verified: str = ""
    gradient_error: float = 0.0

    def line(self, *, commands: bool = True) -> str:
        """In one line. ``commands=False`` leaves out how to install what is missing."""
        if self.status == "declined":
            shown = [
                decline if commands or decline.code not in INSTALLATION else decline.without_hint()
                for decline in self.declines
            ]
            return f"{self.backend}: " + " | ".join(map(str, shown))
        name = f"{self.backend} ({self.provider})" if self.provider else self.backend
        steps = ", ".join(self.legalization.steps()) if self.legalization else ""
        error = f", gradient error up to {self.gradient_error:g} in bf16" if self.gradient_error else ""
        return f"{name}: {self.status}" + (f", after {steps}" if steps else "") + error


@dataclass(frozen=True, slots=True)
class StageDecision:
    """Who serves one stage; ``chosen`` is None when nobody may."""

    stage: Stage
    candidates: tuple[Candidate, ...]
    auto_choice: str | None
    """Who would be first under ``auto``, judged by declared data alone."""
    hint: str = ""
    policy_plugin: str = ""
    """Who ordered the backends; empty where their declared ranks did."""

    @property
    def chosen(self) -> Candidate | None:
        return next((entry for entry in self.candidates if entry.status == "chosen"), None)

    def declined(self) -> tuple[Candidate, ...]:
        return tuple(entry for entry in self.candidates if entry.status == "declined")


@dataclass(frozen=True, slots=True)
class Decision:
    """What one call was, under which policy, and the outcome for each of its stages."""

    call: CallSpec
    device: DeviceInfo
    policy: Policy
    stages: tuple[StageDecision, ...]
    faults: tuple[str, ...] = ()
    """Policy plugins that were passed over, and why."""

    @property
    def served(self) -> bool:
        return all(stage.chosen is not None for stage in self.stages)

    def backends(self) -> dict[Stage, str | None]:
        """Stage to backend; None where nobody serves."""
        return {entry.stage: entry.chosen.backend if entry.chosen else None for entry in self.stages}

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        lines = [self._asked()]
        for entry in self.stages:
            chosen = entry.chosen
            lines.append(f"{entry.stage}: {chosen.backend if chosen else 'NO BACKEND'}")
            lines.extend(f"  - {candidate.line(commands=False)}" for candidate in entry.candidates)
            if entry.policy_plugin:
                lines.append(f"  (auto asks in the order of policy plugin {entry.policy_plugin})")
            if chosen and entry.auto_choice not in (None, chosen.backend):
                lines.append(f"  (auto would ask {entry.auto_choice} first)")
            if entry.hint:
                lines.append(f"  {entry.hint}")
        lines.extend(self.commands())
        lines.extend(self.faults)
        lines.append("policy:")
        lines.extend(
            f"  {setting.name} = {setting.value} (from {setting.source})" for setting in self._settings()
        )
        return "\n".join(lines)

    def to_markdown(self) -> str:
        rows = [
            f"**{self._asked()}**",
            "",
            "| stage | backend | outcome |",
            "|---|---|---|",
        ]
        for entry in self.stages:
            for candidate in entry.candidates:
                outcome = candidate.line(commands=False).partition(": ")[2].replace("|", "\\|")
                rows.append(f"| {entry.stage} | {candidate.backend} | {outcome} |")
        ordered = [
            f"{entry.stage}: auto asks in the order of policy plugin {entry.policy_plugin}."
            for entry in self.stages
            if entry.policy_plugin
        ]
        rows += [line for text in (*ordered, *self.commands(), *self.faults) for line in ("", text)]
        rows += ["", "| setting | value | from |", "|---|---|---|"]
        rows += [f"| {setting.name} | {setting.value} | {setting.source} |" for setting in self._settings()]
        return "\n".join(rows)

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def as_dict(self) -> dict[str, Any]:
        call = dataclasses.asdict(self.call)
        return {
            "call": {
                key: sorted(value) if isinstance(value, frozenset) else value for key, value in call.items()
            },
            "device": dataclasses.asdict(self.device),
            "stages": [
                {
                    "stage": entry.stage,
                    "backend": entry.chosen.backend if entry.chosen else None,
                    "provider": entry.chosen.provider if entry.chosen else None,
                    "auto_choice": entry.auto_choice,
                    "policy_plugin": entry.policy_plugin or None,
                    "candidates": [
                        {
                            "backend": candidate.backend,
                            "status": candidate.status,
                            "declines": [decline.to_json() for decline in candidate.declines],
                            "legalization": list(candidate.legalization.steps())
                            if candidate.legalization
                            else [],
                            "verified": candidate.verified,
                            "gradient_error": candidate.gradient_error,
                        }
                        for candidate in entry.candidates
                    ],
                }
                for entry in self.stages
            ],
            "faults": list(self.faults),
            "policy": [dataclasses.asdict(setting) for setting in self._settings()],
        }

    def commands(self) -> tuple[str, ...]:
        """How to install what a backend misses, once per backend, without a period, to be copied."""
        found = [
            f"To install {candidate.backend}: {decline.hint.removesuffix('.')}"
            for entry in self.stages
            for candidate in entry.candidates
            for decline in candidate.declines
            if decline.code in INSTALLATION and decline.hint
        ]
        return tuple(dict.fromkeys(found))

    def _asked(self) -> str:
        return describe_call(self.call, self.device, [entry.stage for entry in self.stages])

    def _settings(self) -> list[Setting]:
        stages = {f"dsa_kernel_backend[{entry.stage}]" for entry in self.stages}
        return [
            setting
            for setting in settings_on(self.device, self.policy)
            if not setting.name.startswith("dsa_kernel_backend[") or setting.name in stages
        ]


def settings_on(device: DeviceInfo, policy: Policy) -> tuple[Setting, ...]:
    """The settings in force, with the memory budget that the default comes to on this device."""
    return tuple(
        dataclasses.replace(setting, value=str(default_budget(device)))
        if setting.name == "memory_budget" and policy.memory_budget is None
        else setting
        for setting in policy.settings
    )


def describe_call(call: CallSpec, device: DeviceInfo, stages: Collection[Stage]) -> str:
    """One line: what was asked of ``stages``. Sizes that none of them looks at are only defaults of ``call``."""
    asked = frozenset(stages)
    parts = [f"batch {call.batch}", f"rows {call.rows}", f"keys {call.keys}"]
    if any(has_width(stage, call) for stage in asked):
        parts.append(f"width {call.width}")
    if asked & INDEXED_STAGES:
        key_heads = f", key heads {call.kv_heads}" if asked & GROUPED_STAGES else ""
        parts.append(f"heads {call.heads}{key_heads}, channels {call.qk_channels}/{call.v_channels}")
    elif "indexer_target" in asked:
        parts.append(f"heads {call.heads}, channels {call.qk_channels}")
    if asked & INDEXER_STAGES:
        parts.append(f"index heads {call.index_heads} × {call.index_channels}")
    parts += [call.dtype, device.name]
    if call.layout != "bshd" or call.context_parallel != "none":
        parts.append(f"{call.layout}, context parallel {call.context_parallel}")
    if call.needs_grad:
        parts.append(f"gradients of {', '.join(sorted(call.needs_grad))}")
    if call.deterministic:
        parts.append("deterministic")
    return f"{call.operation}: " + ", ".join(parts)
