"""Every kernel lowers to CUDA source for the architectures it is declared for, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
HOPPER_KERNELS = 11
PORTABLE_KERNELS = 3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("tilelang") is None, reason="needs tilelang (the extra of that name)"
    ),
]


@pytest.mark.parametrize(
    ("arch", "count"),
    [("sm_80", PORTABLE_KERNELS), ("sm_90a", HOPPER_KERNELS), ("sm_100a", PORTABLE_KERNELS)],
)
def test_kernels_lower_to_cuda_source(arch, count, tmp_path):
    environment = {
        **os.environ,
        "TILELANG_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "lower_kernels.py"), arch]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    lines = dict(line.split(" ", 1) for line in run.stdout.splitlines() if "wgmma=" in line)
    assert len(lines) == count
    for name, facts in lines.items():
        assert "scalar_gather=False" in facts, name
        assert ("wgmma=True" in facts) == (
            arch == "sm_90a" and name not in ("row_shift", "balance", "select_best")
        )
