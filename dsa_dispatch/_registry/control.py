"""Registering, listing and looking again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsa_dispatch._backend import BackendSpec
from dsa_dispatch._registry.availability import installation_declines
from dsa_dispatch._registry.packages import forget_packages
from dsa_dispatch._registry.registry import plugin_title, with_backend, without_backend
from dsa_dispatch._runtime import current


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A registered backend, as far as metadata tells. ``missing`` are the reasons why none of its stages can run
    here, ``install`` how to mend that, without a period, to be copied."""

    name: str
    version: str
    rank: int
    stages: tuple[str, ...]
    origin: str
    doc: str
    missing: tuple[str, ...]
    install: tuple[str, ...] = ()

    @property
    def installed(self) -> bool:
        return not self.missing


@dataclass(frozen=True, slots=True)
class HookPlugin:
    """A plugin that has a part in decisions beside its backends, if it brings any."""

    role: Literal["policy", "observer"]
    plugin: str
    distribution: str

    def __str__(self) -> str:
        part = (
            "may reorder the backends that auto asks"
            if self.role == "policy"
            else "is told of every new decision"
        )
        return f"{self.role} plugin {self.plugin} of {self.distribution}: {part}"


def hook_plugins() -> tuple[HookPlugin, ...]:
    """Policy plugins in the order they are asked in, then observers in the order they are told in."""
    snapshot = current().snapshot
    roles: tuple[tuple[Literal["policy", "observer"], tuple[object, ...]], ...] = (
        ("policy", snapshot.order_plugins()),
        ("observer", snapshot.observers()),
    )
    return tuple(
        HookPlugin(role, plugin_title(plugin), snapshot.distribution_of(plugin))
        for role, plugins in roles
        for plugin in plugins
    )


def register_backend(spec: BackendSpec) -> None:
    """Add a backend to this process. Raises ``PluginError`` on ill-formed data or a name that is taken."""
    current().update(lambda snapshot: with_backend(snapshot, spec, "register_backend()"))


def unregister_backend(name: str) -> None:
    """Remove a backend from this process. Raises ``PluginError`` when there is none of that name."""
    current().update(lambda snapshot: without_backend(snapshot, name))


def list_backends() -> tuple[BackendInfo, ...]:
    """Every registered backend, the highest rank first. Reads metadata only: no import, no device."""
    infos = []
    for entry in current().snapshot.ranked():
        spec = entry.spec
        reasons = [installation_declines(spec, stage) for stage in spec.stages]
        declines = [decline for reason in reasons for decline in reason] if all(reasons) else []
        infos.append(
            BackendInfo(
                spec.name,
                spec.version,
                spec.rank,
                tuple(spec.stages),
                entry.origin,
                spec.doc,
                missing=tuple(dict.fromkeys(str(decline.without_hint()) for decline in declines)),
                install=tuple(
                    dict.fromkeys(decline.hint.removesuffix(".") for decline in declines if decline.hint)
                ),
            )
        )
    return tuple(infos)


def refresh() -> None:
    """Look again at the environment and the installed packages, and forget decisions, self-tests and given warnings.

    Raises ``ConfigError`` for an environment variable with our prefix that nothing reads.
    """
    forget_packages()
    current().refresh()
