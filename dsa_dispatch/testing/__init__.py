"""For tests of backends and of code that dispatches: fake backends, what ran, and a registry of one's own."""

from __future__ import annotations

from dsa_dispatch.testing.fakes import FakeBackend
from dsa_dispatch.testing.isolation import isolated_registry
from dsa_dispatch.testing.ran import assert_backend_ran

__all__ = ["FakeBackend", "assert_backend_ran", "isolated_registry"]
