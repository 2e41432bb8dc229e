"""Can a backend be used on this machine? Metadata first, the real import and a self-test only at first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from dsa_dispatch._backend import API_VERSION, BackendSpec
from dsa_dispatch._decline import Decline, DeclineCode
from dsa_dispatch._policy.values import shown
from dsa_dispatch._registry import selftest
from dsa_dispatch._registry.faults import raised, traced
from dsa_dispatch._registry.packages import package_declines
from dsa_dispatch._stages import Stage
from dsa_dispatch.errors import BackendDeclined, PluginError

if TYPE_CHECKING:
    from dsa_dispatch._runtime import Runtime


@dataclass(frozen=True, slots=True)
class Availability:
    """Outcome of the import and self-test of one stage on one device."""

    declines: tuple[Decline, ...] = ()
    function: Callable[..., Any] | None = None
    provider: str = ""
    traceback: str = ""
    skipped: str = ""
    """Why the self-test was left out; empty where it ran, or where the backend asks for none."""
    spec: BackendSpec | None = None
    """Whose outcome it is: a name may be given to another backend."""


def installation_declines(spec: BackendSpec, stage: Stage) -> tuple[Decline, ...]:
    """What metadata alone can tell: API version, missing packages, versions. Imports nothing."""
    if spec.api_version != API_VERSION:
        return (
            Decline(
                DeclineCode.API_MISMATCH,
                "api_version",
                str(spec.api_version),
                str(API_VERSION),
                f"Install a release of {spec.name} that is built for this version of dsa-dispatch.",
            ),
        )
    return package_declines((*spec.packages, *spec.stages[stage].capability.packages))


def probe(runtime: Runtime, spec: BackendSpec, stage: Stage, device: torch.device) -> Availability:
    """Import the stage's function and test it on ``device``, once; the outcome is kept until ``refresh()``."""
    key = (spec.name, stage, str(device))
    known = runtime.availability.get(key)
    if known is None or known.spec is not spec:
        with runtime.lock:
            known = runtime.availability.get(key)
            if known is None or known.spec is not spec:
                known = replace(_probe(spec, stage, device), spec=spec)
                runtime.availability = {**runtime.availability, key: known}
    return known


def _probe(spec: BackendSpec, stage: Stage, device: torch.device) -> Availability:
    # Availability only: whatever somebody else's import raises is a reason, never a crash. Kernels are not guarded so.
    asked = spec.stages[stage]
    reference = asked.function
    try:
        function = resolve_reference(reference)
        if not callable(function):
            raise PluginError(f"{reference} is a {type(function).__name__}, expected a function")
        provider = ""
        if asked.provider is not None:
            reference = asked.provider
            provider = _named_provider(reference)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _failed(DeclineCode.IMPORT_FAILED, reference, error)
    skipped = ""
    if spec.self_test:
        try:
            skipped = selftest.reason_left_out(function, asked.capability, stage, device)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return _failed(DeclineCode.SELF_TEST_FAILED, f"{spec.name} {stage} on {device}", error)
    return Availability(function=function, provider=provider, skipped=skipped)


def _named_provider(reference: str) -> str:
    """What the function that ``StageSpec.provider`` names says of itself."""
    answer: object = resolve_reference(reference)()
    if not isinstance(answer, str):
        raise PluginError(f"{reference} returned {shown(answer)}, expected a text that names what runs")
    return answer


def _failed(code: DeclineCode, field: str, error: BaseException) -> Availability:
    if isinstance(error, BackendDeclined):
        return Availability((error.decline,), traceback=traced(error))
    decline = Decline(
        code,
        field,
        raised(error).splitlines()[0],
        "an import and a self-test that pass",
        "`dsa-dispatch doctor` shows the traceback.",
    )
    return Availability((decline,), traceback=traced(error))


def resolve_reference(reference: str) -> Callable[..., Any]:
    """The function that ``"module:function"`` names. Raises ImportError or AttributeError."""
    module, _, name = reference.partition(":")
    value: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return value
