"""For tests of backends and of code that dispatches: the conformance suite, fake backends, what ran, and a registry of
one's own. Needs no pytest."""

from __future__ import annotations

from dsa_dispatch.testing.conformance import BackendConformance, ConformanceCheck, conformance_checks
from dsa_dispatch.testing.fakes import FakeBackend
from dsa_dispatch.testing.isolation import isolated_registry
from dsa_dispatch.testing.judge import ConformanceError
from dsa_dispatch.testing.ran import assert_backend_ran

__all__ = [
    "BackendConformance",
    "ConformanceCheck",
    "ConformanceError",
    "FakeBackend",
    "assert_backend_ran",
    "conformance_checks",
    "isolated_registry",
]
