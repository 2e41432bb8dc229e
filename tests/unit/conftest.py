"""Unit tests see the reference alone, whatever other backends are installed."""

from __future__ import annotations

import pytest

from dsa_backends.torch_dense.spec import SPEC
from dsa_dispatch.testing import isolated_registry


@pytest.fixture
def registry():
    with isolated_registry(SPEC) as runtime:
        yield runtime
