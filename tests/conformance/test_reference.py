"""The reference passes the whole suite, all seven stages, through the very mixin that plugins use."""

from __future__ import annotations

import subprocess
import sys

from dsa_dispatch._stages import STAGES
from dsa_dispatch.testing import BackendConformance, conformance_checks, isolated_registry


class TestTorchDense(BackendConformance):
    backend = "torch_dense"


def test_every_stage_of_the_reference_is_checked():
    with isolated_registry(installed=True):
        assert {check.stage for check in conformance_checks("torch_dense")} == set(STAGES)


def test_the_kit_needs_no_pytest():
    code = "import sys, dsa_dispatch.testing; print('pytest' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
