"""The conformance suite: every check of a backend by name, for pytest, for the command line, and for a script.

pytest is not imported here: ``BackendConformance`` uses its hooks by their names, so that the kit works without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from dsa_dispatch._backend import BackendSpec
from dsa_dispatch._capability import FLOATS, Capability
from dsa_dispatch._dispatch.device import device_info
from dsa_dispatch._policy.values import nearest
from dsa_dispatch._registry import selftest
from dsa_dispatch._registry.availability import installation_declines, resolve_reference
from dsa_dispatch._runtime import current
from dsa_dispatch._stages import STAGES, Stage
from dsa_dispatch.errors import BackendDeclined, ConfigError, DSADispatchError, UnknownBackendError
from dsa_dispatch.testing.accepted import accepted_calls
from dsa_dispatch.testing.calls import check_accepted, check_declined, check_some_accepted
from dsa_dispatch.testing.cases import declined_calls, sizes_served
from dsa_dispatch.testing.checks import softmax_checks
from dsa_dispatch.testing.extent import EXTENTS, Size
from dsa_dispatch.testing.judge import ConformanceError, DeclinedHere, NotHere
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
        """Run it. Whatever else the backend raises becomes a ``ConformanceError`` that names stage and check.

        Raises ``DeclinedHere``, a ``NotHere``, where the backend declines at run time what it declares.
        """
        __tracebackhide__ = True
        try:
            self.function()
        except BackendDeclined as declined:
            raise DeclinedHere(
                f"{self.backend} {self.stage} on {self.device}: {self.name}: declined: {declined.decline}"
            ) from None
        except (ConformanceError, NotHere) as error:
            # What the backend raised, if anything, stays the cause; the suite's own frames tell an author nothing.
            raise type(error)(f"{self.backend} {self.stage} on {self.device}: {error}") from error.__cause__
        except Exception as error:
            raise ConformanceError(
                f"{self.backend} {self.stage} on {self.device}: {self.name}: raised {type(error).__name__}: {error}"
            ) from error


def conformance_checks(
    backend: str, *, dtypes: Iterable[str] = (), size: Size = "full"
) -> tuple[ConformanceCheck, ...]:
    """Every check of a registered backend on every device of this machine, by stage; imports no kernel yet.

    ``dtypes`` restricts the checks that run a kernel to these types, where the machine cannot run the others rightly.
    ``size="small"`` runs every check on smaller cases, for a slow device such as an interpreter: see
    ``dsa_dispatch.testing.extent``. Raises ``UnknownBackendError`` when nobody registered that name, ``ConfigError``
    for an unknown type or size.
    """
    only = frozenset([dtypes] if isinstance(dtypes, str) else dtypes)
    if only - FLOATS or size not in EXTENTS:
        wrong = ", ".join(sorted(only - FLOATS)) or size
        raise ConfigError(
            f"conformance: got {wrong!r}, expected dtypes among {', '.join(sorted(FLOATS))} and a size among "
            f"{', '.join(EXTENTS)}"
        )
    known = current().snapshot.backends
    if backend not in known:
        failures = current().snapshot.failures
        lost = "".join(f" Plugin {failure.plugin!r} failed: {failure.error}." for failure in failures)
        raise UnknownBackendError(
            f"conformance: unknown backend {backend!r}; registered: {', '.join(sorted(known))}."
            f"{nearest(backend.replace('-', '_'), known)}{lost} A backend has the name of its BackendSpec, which need "
            f"not be its distribution's. Install its distribution in this environment; `dsa-dispatch doctor` shows "
            f"tracebacks."
        )
    return tuple(_checks_of(known[backend].spec, only, size))


def third_party_backends() -> tuple[str, ...]:
    """The registered backends that did not come with this library, the highest rank first."""
    return tuple(
        entry.spec.name
        for entry in current().snapshot.ranked()
        if not entry.origin.endswith(f" of {OWN_DISTRIBUTION}")
    )


def _checks_of(spec: BackendSpec, dtypes: frozenset[str], size: Size) -> Iterator[ConformanceCheck]:
    for stage in STAGES:
        if stage not in spec.stages:
            continue
        capability = spec.stages[stage].capability
        missing = installation_declines(spec, stage)
        if missing:
            yield _not_here(spec, stage, "any", "; ".join(str(decline) for decline in missing))
            continue
        if dtypes and not dtypes & capability.dtypes:
            yield _not_here(spec, stage, "any", f"declares none of {', '.join(sorted(dtypes))}")
            continue
        devices = [device for device in _devices() if _runs_on(capability, device)]
        if not devices:
            wanted = ", ".join(sorted(capability.devices or ())) or "another GPU"
            yield _not_here(spec, stage, "any", f"needs {wanted}, which this machine does not have")
        for device in devices:
            for name, function in _stage_checks(spec, stage, device, dtypes, size):
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


def _restricted(capability: Capability, dtypes: frozenset[str]) -> Capability:
    if not dtypes:
        return capability
    weights = capability.weights_dtypes & dtypes or capability.weights_dtypes
    return dataclasses.replace(capability, dtypes=capability.dtypes & dtypes, weights_dtypes=weights)


def _stage_checks(
    spec: BackendSpec, stage: Stage, device: torch.device, dtypes: frozenset[str], size: Size
) -> Iterator[tuple[str, Callable[[], None]]]:
    declared = spec.stages[stage].capability
    capability = _restricted(declared, dtypes)
    loaded: list[Callable[..., Any]] = []

    def function(*args: Any, **kwargs: Any) -> Any:
        if not loaded:
            loaded.append(resolve_reference(spec.stages[stage].function))
        return loaded[0](*args, **kwargs)

    extent = EXTENTS[size]
    sizes = sizes_served(capability, stage, device_info(device), extent)
    subject = Subject(spec.name, stage, capability, function, device, extent, of_sizes=sizes)
    yield from selection_checks(subject) if stage == "indexer_topk" else softmax_checks(subject)
    yield "self-test", partial(_self_test, function, capability, stage, device)
    accepted = tuple(accepted_calls(capability, stage, device.type, extent, sizes))
    yield f"accepts {accepted[0].label}", partial(check_some_accepted, spec, stage, accepted, device)
    for inside in accepted[1:]:
        yield f"accepts {inside.label}", partial(check_accepted, spec, stage, inside, device)
    for outside in declined_calls(declared, stage, device_info(device)):
        yield f"declines {outside.label}", partial(check_declined, spec, stage, outside)


def _self_test(
    function: Callable[..., Any], capability: Capability, stage: Stage, device: torch.device
) -> None:
    left_out = selftest.reason_left_out(function, capability, stage, device)
    if left_out:
        raise NotHere(f"the self-test before a first use is left out: {left_out}")


class BackendConformance:
    """A pytest mixin that checks a backend against the contract, one test per claim.

    In the tests of a plugin::

        from dsa_dispatch.testing import BackendConformance

        class TestConformance(BackendConformance):
            pass

    Without ``backend`` every backend that is installed here and did not come with this library is checked; a name
    checks that one. The checks follow from the declared data: accepting calls from every declared value, declining ones
    a step outside every boundary, and the claims of the contract in between. ``dtypes`` and ``size`` are those of
    ``conformance_checks``.
    """

    backend: ClassVar[str] = ""
    dtypes: ClassVar[tuple[str, ...]] = ()
    size: ClassVar[Size] = "full"

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "conformance_check" not in metafunc.fixturenames:
            return
        checks = self.checks()
        metafunc.parametrize("conformance_check", checks, ids=[str(check) for check in checks])

    @classmethod
    def checks(cls) -> tuple[ConformanceCheck, ...]:
        """What is checked. A backend that cannot be found is one failing check, not an error of collection; so is a
        plugin that failed beside one that was found, where ``backend`` names none."""
        found: tuple[ConformanceCheck, ...] = ()
        with contextlib.suppress(DSADispatchError):
            found = cls._found()
        if found and (cls.backend or not current().snapshot.failures):
            return found
        name = cls.backend or "plugin"
        return (ConformanceCheck(name, "any stage", "any", "is registered", cls._all_registered), *found)

    @classmethod
    def _found(cls) -> tuple[ConformanceCheck, ...]:
        names = (cls.backend,) if cls.backend else third_party_backends()
        return tuple(
            check for name in names for check in conformance_checks(name, dtypes=cls.dtypes, size=cls.size)
        )

    @classmethod
    def _all_registered(cls) -> None:
        found = cls._found()
        failures = "".join(
            f"\n{failure.plugin!r} of {failure.distribution} failed at {failure.step}: {failure.error}\n"
            f"{failure.traceback}"
            for failure in current().snapshot.failures
        )
        if found and not failures:
            return
        if found:
            raise ConformanceError(
                f"a plugin in this environment was not registered, so it is not checked. To check one backend alone, "
                f"set `backend` to its name.{failures}"
            )
        raise ConformanceError(
            f"no backend beside those of {OWN_DISTRIBUTION} is registered: install the plugin into this environment "
            f"(pip install -e .) and see that its entry point is in the group dsa_dispatch.backends.{failures}"
        )

    def test_conformance(self, conformance_check: ConformanceCheck) -> None:
        __tracebackhide__ = True
        conformance_check.run()
