"""From layers of settings to one policy: context manager, explicit config, ``configure()``, environment, defaults."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch

from dsa_dispatch._policy.config import FIELD_NAMES, DSAConfig, parse_text
from dsa_dispatch._policy.environment import Values, environment_config, read_environment
from dsa_dispatch._policy.values import SPECIAL, BackendChoice, Fallback, QueryChunk, nearest
from dsa_dispatch._stages import STAGES, Stage
from dsa_dispatch.errors import UnknownBackendError

PolicyKey = tuple[str, str, str, Values, bool]

CONTEXT: Final[ContextVar[str]] = ContextVar("dsa_dispatch_policy", default="")
"""Text of the settings that the active ``use_backend`` blocks add up to, in this thread or task."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of a policy and who set it."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings in force for a call. ``named`` holds, per stage, what the user named: () is ``auto``."""

    named: tuple[tuple[Stage, tuple[str, ...]], ...]
    fallback: Fallback = "next"
    deterministic: bool = False
    memory_budget: int | None = None
    query_chunk: QueryChunk = "auto"
    debug_checks: bool = False
    settings: tuple[Setting, ...] = ()

    def names(self, stage: Stage) -> tuple[str, ...]:
        return dict(self.named)[stage]

    def only_reference(self, stage: Stage) -> bool:
        return self.names(stage) == ("none",)

    def strict(self, stage: Stage) -> bool:
        """Nothing but what is named may serve this stage."""
        names = self.names(stage)
        return bool(names) and (self.fallback == "error" or names == ("none",))

    def allows_fused(self) -> bool:
        return any(not self.only_reference(stage) for stage in STAGES)


def policy_key(explicit: str, configured: str) -> PolicyKey:
    """Everything a policy depends on, as a plain tuple: the cheap half of the hot path."""
    return (
        CONTEXT.get(),
        explicit,
        configured,
        read_environment(),
        torch.are_deterministic_algorithms_enabled(),
    )


@lru_cache(maxsize=1024)
def resolve_policy(key: PolicyKey) -> Policy:
    """The policy of a key. Pure. Raises ``ConfigError`` for an environment variable that cannot be parsed."""
    context, explicit, configured, environment, torch_deterministic = key
    layers = (
        ("use_backend", parse_text(context)),
        ("config", parse_text(explicit)),
        ("configure()", parse_text(configured)),
        ("environment", environment_config(environment)),
    )
    settings: list[Setting] = []

    def first(name: str, default: Any, default_source: str = "default") -> Any:
        for source, layer in layers:
            value = getattr(layer, name)
            if value is not None:
                settings.append(Setting(name, str(value), source))
                return value
        settings.append(Setting(name, str(default), default_source))
        return default

    named = tuple((stage, _stage_names(stage, layers, settings)) for stage in STAGES)
    return Policy(
        named=named,
        fallback=first("dsa_kernel_fallback", "next"),
        deterministic=first(
            "deterministic", torch_deterministic, "torch.are_deterministic_algorithms_enabled()"
        ),
        memory_budget=first("memory_budget", None, "min(1 GiB, device memory / 16)"),
        query_chunk=first("query_chunk", "auto"),
        debug_checks=first("debug_checks", False),
        settings=tuple(settings),
    )


def _stage_names(
    stage: Stage, layers: Iterable[tuple[str, DSAConfig]], settings: list[Setting]
) -> tuple[str, ...]:
    """The nearest layer that names this stage wins, so a mapping leaves the stages it does not name to the next
    layer."""
    for source, layer in layers:
        choice: BackendChoice = layer.dsa_kernel_backend or ()
        for key, names in choice:
            if key in ("*", stage):
                settings.append(Setting(f"dsa_kernel_backend[{stage}]", ", ".join(names), source))
                return () if names == ("auto",) else names
    settings.append(Setting(f"dsa_kernel_backend[{stage}]", "auto", "default"))
    return ()


def overlay(outer: DSAConfig, inner: DSAConfig) -> DSAConfig:
    """``inner`` over ``outer``: fields, and stages of the backend setting, that inner does not name are inherited."""
    values = {}
    for name in FIELD_NAMES:
        value = getattr(inner, name)
        values[name] = getattr(outer, name) if value is None else value
    if inner.dsa_kernel_backend is not None and outer.dsa_kernel_backend is not None:
        stages = dict(inner.dsa_kernel_backend)
        if "*" not in stages:
            inherited = dict(outer.dsa_kernel_backend)
            merged = {
                stage: stages.get(stage) or inherited.get(stage) or inherited.get("*") for stage in STAGES
            }
            values["dsa_kernel_backend"] = {stage: list(names) for stage, names in merged.items() if names}
    return DSAConfig(**values)


def check_names(config: DSAConfig, known: Iterable[str]) -> None:
    """Raise ``UnknownBackendError`` for a named backend that nobody registered."""
    choices = sorted({*known, *SPECIAL})
    for _, names in config.dsa_kernel_backend or ():
        for name in names:
            if name not in choices:
                raise UnknownBackendError(
                    f"dsa_kernel_backend: unknown backend {name!r}. Known: {', '.join(choices)}."
                    f"{nearest(name, choices)} A third-party backend must be installed in this environment or "
                    f"registered with register_backend(); `dsa-dispatch doctor` lists plugins that failed to load."
                )
