"""What a backend hands over: a name and, per stage, a capability and where its function lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final

from dsa_dispatch._capability import Capability, Package
from dsa_dispatch._capability_values import value_errors, version_errors
from dsa_dispatch._stages import STAGES, Stage
from dsa_dispatch._typed import type_errors
from dsa_dispatch.errors import PluginError

API_VERSION: Final = 1
"""Version of the stage signatures. A backend built for another one is declined with API_MISMATCH."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage of a backend. ``function`` is ``"package.module:function"`` and is imported at first use only."""

    capability: Capability
    function: str
    provider: str | None = None
    """``"package.module:function"`` of a function that names what really runs, e.g. ``"sgl_kernel 0.4.5, lse base
    2"``."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A named provider of one or more stages. Plain data, so listing backends imports no kernel.

    ``rank`` orders backends where no measured profile does: higher first. ``packages`` are needed by every stage.
    Raises ``PluginError`` when a field is not what it must be.
    """

    name: str
    stages: Mapping[Stage, StageSpec]
    rank: int = 0
    version: str = ""
    api_version: int = API_VERSION
    packages: tuple[Package, ...] = ()
    doc: str = ""
    self_test: bool = True
    families: frozenset[str] = field(default_factory=frozenset)
    """Other policy names that also allow this backend: ``cudnn`` allows ``flashmla``."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise PluginError(f"a backend name must be an identifier, got {self.name!r}")
        if not isinstance(self.stages, Mapping) or not self.stages:
            raise PluginError(
                f"backend {self.name!r} provides no stage; give a mapping from a stage name to a StageSpec"
            )
        for stage, spec in self.stages.items():
            if stage not in STAGES:
                raise PluginError(
                    f"backend {self.name!r} names an unknown stage {stage!r}; known: {', '.join(STAGES)}"
                )
            if not isinstance(spec, StageSpec) or not isinstance(spec.capability, Capability):
                raise PluginError(
                    f"backend {self.name!r}, stage {stage}: expected StageSpec(Capability(...), 'module:function'), "
                    f"got {type(spec).__name__}"
                )
        self._reject_ill_typed()
        for stage, spec in self.stages.items():
            for label, reference in (("function", spec.function), ("provider", spec.provider)):
                if reference is not None and not all(reference.partition(":")):
                    raise PluginError(
                        f"backend {self.name!r}, stage {stage}: {label} must read 'module:function', "
                        f"got {reference!r}"
                    )
        object.__setattr__(self, "stages", MappingProxyType(dict(self.stages)))

    def _reject_ill_typed(self) -> None:
        name = f"backend {self.name!r}"
        errors = list(type_errors(self, name))
        for stage, spec in self.stages.items():
            errors += type_errors(spec, f"{name}, stage {stage}")
        if not errors:
            for stage, spec in self.stages.items():
                errors += value_errors(spec.capability, f"{name}, stage {stage}")
            errors += [text for package in self.packages for text in version_errors(package, name)]
        if errors:
            raise PluginError("; ".join(errors))

    def __hash__(self) -> int:
        # A mapping has none.
        return hash((self.name, self.version, frozenset(self.stages.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping cannot be pickled, and specs travel to worker processes.
        values = [getattr(self, entry.name) for entry in fields(self)]
        return type(self), tuple(dict(value) if isinstance(value, Mapping) else value for value in values)
