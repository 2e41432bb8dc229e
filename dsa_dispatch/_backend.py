"""What a backend hands over: a name and, per stage, a capability and where its function lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from dsa_dispatch._capability import Capability, Requirement
from dsa_dispatch._stages import STAGES, Stage
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
    packages: tuple[Requirement, ...] = ()
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
            module, separator, function = spec.function.partition(":")
            if not (module and separator and function):
                raise PluginError(
                    f"backend {self.name!r}, stage {stage}: function must read 'module:function', "
                    f"got {spec.function!r}"
                )
        object.__setattr__(self, "stages", MappingProxyType(dict(self.stages)))
