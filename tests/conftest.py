"""What tests share: helper modules are imported from this folder, and examples are the same on every run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from dsa_dispatch.testing import isolated_registry

# Under --import-mode=importlib a test finds no sibling module by itself.
sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile(
    "same on every run",
    derandomize=True,
    deadline=None,  # one slow moment of a shared machine is no fault
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("same on every run")


@pytest.fixture
def registry():
    """The installed backends in a registry of the test's own: nothing it counts, sets or decides stays."""
    with isolated_registry(installed=True) as runtime:
        yield runtime
