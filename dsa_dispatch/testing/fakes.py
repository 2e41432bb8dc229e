"""Backends made of the reference kernels behind any declared capability: what legalization and dispatch are tested
with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from dsa_dispatch._backend import BackendSpec, StageSpec
from dsa_dispatch._capability import Capability, Requirement, no_scratch
from dsa_dispatch._decline import Decline
from dsa_dispatch._registry.availability import resolve_reference
from dsa_dispatch._stages import STAGES, Stage
from dsa_dispatch.errors import BackendDeclined

_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {}


def __getattr__(name: str) -> Callable[..., Any]:
    """The functions of fake backends, under the references that their specs hold."""
    try:
        return _FUNCTIONS[name]
    except KeyError:
        raise AttributeError(name) from None


class FakeBackend:
    """A backend whose stages run the ``torch_dense`` kernels and record the calls they get.

    ``stages``: names, or a mapping from a name to a ``Capability`` (names get ``capability``). ``replace`` swaps single
    stage functions for others. ``declines`` raises ``BackendDeclined`` with that reason at run time; ``raises`` any
    other exception. ``calls`` holds ``(stage, shapes of the tensor arguments)`` of every call of a kernel, self-tests
    included. Pass ``backend.spec`` to ``isolated_registry`` or ``register_backend``.
    """

    def __init__(
        self,
        name: str = "fake",
        stages: Iterable[Stage] | Mapping[Stage, Capability] = STAGES,
        *,
        capability: Capability | None = None,
        rank: int = 0,
        replace: Mapping[Stage, Callable[..., Any]] | None = None,
        declines: Decline | None = None,
        raises: BaseException | None = None,
        packages: tuple[Requirement, ...] = (),
        families: Iterable[str] = (),
        self_test: bool = False,
        **changes: Any,
    ) -> None:
        self.calls: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        self.declines = declines
        self.raises = raises
        shared = dataclasses.replace(capability or reference_capability(), **changes)
        capabilities = dict(stages) if isinstance(stages, Mapping) else dict.fromkeys(stages, shared)
        specs = {}
        for stage, declared in capabilities.items():
            function = (replace or {}).get(stage) or resolve_reference(_reference().stages[stage].function)
            attribute = f"{name}_{stage}_{id(self)}"
            _FUNCTIONS[attribute] = self._recorded(stage, function)
            specs[stage] = StageSpec(declared, f"{__name__}:{attribute}")
        self.spec = BackendSpec(
            name=name,
            stages=specs,
            rank=rank,
            packages=packages,
            families=frozenset(families),
            self_test=self_test,
            doc="A fake backend for tests.",
        )

    def stages_called(self) -> set[str]:
        return {stage for stage, _ in self.calls}

    def _recorded(self, stage: Stage, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            shapes = tuple(tuple(argument.shape) for argument in args if hasattr(argument, "shape"))
            self.calls.append((stage, shapes))
            if self.declines is not None:
                raise BackendDeclined(self.declines)
            if self.raises is not None:
                raise self.raises
            return function(*args, **kwargs)

        return run


def _reference() -> BackendSpec:
    from dsa_backends.torch_dense.spec import SPEC

    return SPEC


def reference_capability() -> Capability:
    """What the reference accepts, for a fake to narrow: ``dataclasses.replace(reference_capability(), heads=...)``."""
    return dataclasses.replace(_reference().stages["attention_forward"].capability, scratch=no_scratch)
