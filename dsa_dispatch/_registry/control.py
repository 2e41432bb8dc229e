"""Registering, listing and looking again."""

from __future__ import annotations

from dataclasses import dataclass

from dsa_dispatch._backend import BackendSpec
from dsa_dispatch._registry.availability import installation_declines
from dsa_dispatch._registry.packages import forget_packages
from dsa_dispatch._registry.registry import with_backend, without_backend
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
