"""Runs the cases of the folders beside this file, each file in a process of its own.

Triton decides between its interpreter and its compiler when it is first imported, for good; whoever imported it first
in this process must not decide for these cases, nor they for anyone else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def pytest_generate_tests(metafunc):
    """A test that takes ``cases`` runs for every file of the folder that its module is named after."""
    if "cases" in metafunc.fixturenames:
        folder = metafunc.module.__file__.rpartition("test_")[2].removesuffix(".py")
        files = sorted((HERE / folder).glob("cases_*.py"))
        assert files, f"no cases in {HERE / folder}"
        metafunc.parametrize("cases", files, ids=[path.stem for path in files])


@pytest.fixture
def run_cases():
    def run(path):
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1" if path.parent.name == "interpreted" else "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), str(ROOT / "backends"), str(path.parent), os.environ.get("PYTHONPATH", "")]
            ),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            str(path),
        ]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        passed = re.search(r"(\d+) passed", done.stdout)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert passed is not None
        assert "skipped" not in done.stdout

    return run
