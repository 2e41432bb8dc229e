"""The conformance suite: every check of a backend by name, for pytest, for the command line, and for a script.

pytest is not imported here: ``BackendConformance`` uses its hooks by their names, so that the kit works without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dsa_dispatch._backend import BackendSpec
from dsa_dispatch._capability import Capability
from dsa_dispatch._dispatch.device import device_info
from dsa_dispatch._registry import selftest
from dsa_dispatch._registry.availability import installation_declines, resolve_reference
from dsa_dispatch._runtime import current
from dsa_dispatch._stages import STAGES, Stage
from dsa_dispatch.errors import DSADispatchError, UnknownBackendError
from dsa_dispatch.testing.calls import check_accepted, check_declined
from dsa_dispatch.testing.cases import accepted_calls, declined_calls
from dsa_dispatch.testing.checks import softmax_checks
from dsa_dispatch.testing.judge import ConformanceError, NotHere
from dsa_dispatch.testing.operands import Subject
from dsa_dispatch.testing.selection import selection_checks

OWN_DISTRIBUTION = "dsa-dispatch"


@dataclass(frozen=True, slots=True)
class ConformanceCheck:
    """One claim about one stage of a backend. ``run`` returns, or raises ``ConformanceError`` or ``NotHere``."""

    backend: str
    stage: str
    device: str
    name: str
    function: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.backend}-{self.stage}-{self.device}-{self.name}".replace(" ", "_")

    def run(self) -> None:
        """Run it. Whatever else the backend raises becomes a ``ConformanceError`` that names stage and check."""
        __tracebackhide__ = True
        try:
            self.function()
        except (ConformanceError, NotHere) as error:
            # What the backend raised, if anything, stays the cause; the suite's own frames tell an author nothing.
            raise type(error)(f"{self.backend} {self.stage} on {self.device}: {error}") from error.__cause__
        except Exception as error:
            raise ConformanceError(
                f"{self.backend} {self.stage} on {self.device}: {self.name}: raised {type(error).__name__}: {error}"
            ) from error


def conformance_checks(backend: str) -> tuple[ConformanceCheck, ...]:
    """Every check of a registered backend on every device of this machine, by stage; imports no kernel yet.

    Raises ``UnknownBackendError`` when nobody registered that name.
    """
    known = current().snapshot.backends
    if backend not in known:
        failures = current().snapshot.failures
        lost = "".join(f" Plugin {failure.plugin!r} failed: {failure.error}." for failure in failures)
        raise UnknownBackendError(
            f"conformance: unknown backend {backend!r}; registered: {', '.join(sorted(known))}.{lost} "
            f"Install its distribution in this environment; `dsa-dispatch doctor` shows tracebacks."
        )
    return tuple(_checks_of(known[backend].spec))


def third_party_backends() -> tuple[str, ...]:
    """The registered backends that did not come with this library, the highest rank first."""
    return tuple(
        entry.spec.name
        for entry in current().snapshot.ranked()
        if not entry.origin.endswith(f" of {OWN_DISTRIBUTION}")
    )


def _checks_of(spec: BackendSpec) -> Iterator[ConformanceCheck]:
    for stage in STAGES:
        if stage not in spec.stages:
            continue
        capability = spec.stages[stage].capability
        missing = installation_declines(spec, stage)
        if missing:
            yield _not_here(spec, stage, "any", "; ".join(str(decline) for decline in missing))
            continue
        devices = [device for device in _devices() if _runs_on(capability, device)]
        if not devices:
            wanted = ", ".join(sorted(capability.devices or ())) or "another GPU"
            yield _not_here(spec, stage, "any", f"needs {wanted}, which this machine does not have")
        for device in devices:
            for name, function in _stage_checks(spec, stage, device):
                yield ConformanceCheck(spec.name, stage, str(device), name, function)


def _not_here(spec: BackendSpec, stage: Stage, device: str, reason: str) -> ConformanceCheck:
    def skip() -> None:
        raise NotHere(reason)

    return ConformanceCheck(spec.name, stage, device, "can run here", skip)


def _devices() -> Iterator[torch.device]:
    yield torch.device("cpu")
    if torch.cuda.is_available():
        yield torch.device("cuda", torch.cuda.current_device())


def _runs_on(capability: Capability, device: torch.device) -> bool:
    if capability.devices is not None and device.type not in capability.devices:
        return False
    if device.type != "cuda" or capability.compute_capabilities is None:
        return True
    have = device_info(device).compute_capability
    return have is not None and any(low <= have < high for low, high in capability.compute_capabilities)


def _stage_checks(
    spec: BackendSpec, stage: Stage, device: torch.device
) -> Iterator[tuple[str, Callable[[], None]]]:
    capability = spec.stages[stage].capability
    loaded: list[Callable[..., Any]] = []

    def function(*args: Any, **kwargs: Any) -> Any:
        if not loaded:
            loaded.append(resolve_reference(spec.stages[stage].function))
        return loaded[0](*args, **kwargs)

    subject = Subject(spec.name, stage, capability, function, device)
    yield from selection_checks(subject) if stage == "indexer_topk" else softmax_checks(subject)
    yield "self-test", lambda: selftest.run(function, capability, stage, device)
    for accepted in accepted_calls(capability, stage, device.type):
        yield f"accepts {accepted.label}", lambda case=accepted: check_accepted(spec, stage, case, device)  # type: ignore[misc]
    for declined in declined_calls(capability, stage, device_info(device)):
        yield f"declines {declined.label}", lambda case=declined: check_declined(spec, stage, case)  # type: ignore[misc]


class BackendConformance:
    """A pytest mixin that checks a backend against the contract, one test per claim.

    In the tests of a plugin::

        from dsa_dispatch.testing import BackendConformance

        class TestConformance(BackendConformance):
            pass

    Without ``backend`` every backend that is installed here and did not come with this library is checked; a name
    checks that one. The checks follow from the declared data: accepting calls from every declared value, declining ones
    a step outside every boundary, and the claims of the contract in between.
    """

    backend: ClassVar[str] = ""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "conformance_check" not in metafunc.fixturenames:
            return
        checks = self.checks()
        metafunc.parametrize("conformance_check", checks, ids=[str(check) for check in checks])

    @classmethod
    def checks(cls) -> tuple[ConformanceCheck, ...]:
        """What is checked. A backend that cannot be found is one failing check, not an error of collection."""
        with contextlib.suppress(DSADispatchError):
            names = (cls.backend,) if cls.backend else third_party_backends()
            checks = tuple(check for name in names for check in conformance_checks(name))
            if checks:
                return checks
        return (ConformanceCheck(cls.backend or "plugin", "any stage", "any", "is registered", cls._missing),)

    @classmethod
    def _missing(cls) -> None:
        if cls.backend:
            conformance_checks(cls.backend)
        failures = "".join(
            f"\n{failure.plugin!r} of {failure.distribution} failed at {failure.step}:\n{failure.traceback}"
            for failure in current().snapshot.failures
        )
        raise ConformanceError(
            f"no backend beside those of {OWN_DISTRIBUTION} is registered: install the plugin into this environment "
            f"(pip install -e .) and see that its entry point is in the group dsa_dispatch.backends.{failures}"
        )

    def test_conformance(self, conformance_check: ConformanceCheck) -> None:
        __tracebackhide__ = True
        conformance_check.run()
