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
FILES = sorted(path.relative_to(HERE) for path in HERE.glob("*/cases_*.py"))


def test_there_are_cases_of_both_kinds():
    assert {path.parts[0] for path in FILES} == {"interpreted", "compiled"}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_cases_pass(path):
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1" if path.parts[0] == "interpreted" else "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "backends"), str(HERE / path.parts[0]), os.environ.get("PYTHONPATH", "")]
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
        str(HERE / path),
    ]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert passed is not None
    assert "skipped" not in run.stdout
