"""Every kernel lowers to CUDA source for the architectures it is declared for, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsa_backends.tilelang_kernels.catalogue import kernels
from dsa_backends.tilelang_kernels.spec import SHARED_HOPPER, SPEC

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
NO_PRODUCT = ("row_shift", "balance", "select_best")
STAGE_OF = {"index_scores": "indexer_topk", "select_best": "indexer_topk", "index_loss": "indexer_loss"}
SHARED_OF = {(8, 0): 166_912, (9, 0): 232_448, (10, 0): 232_448, (12, 0): 101_376}
"""Bytes that a block can have, by compute capability."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("tilelang") is None, reason="needs tilelang (the extra of that name)"
    ),
]


def needs_no_more_than_declared(gpu, name, shared):
    function = name.partition("(")[0]
    if function.endswith("forward"):
        if gpu == (9, 0):
            return shared <= SHARED_HOPPER <= SHARED_OF[gpu]
        if name.startswith("portable_forward(32"):
            # Taken only where the architecture has it.
            return shared <= SHARED_OF[gpu]
    stage = STAGE_OF.get(function, "attention_forward" if "forward" in function else "attention_backward")
    return shared <= SPEC.stages[stage].capability.shared_memory


@pytest.mark.parametrize("gpu", list(SHARED_OF))
def test_kernels_lower_to_cuda_source_and_need_no_more_shared_memory_than_declared(gpu, tmp_path):
    environment = {
        **os.environ,
        "TILELANG_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "lower_kernels.py"), f"{gpu[0]}.{gpu[1]}"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(kernels(gpu))
    for line in lines:
        name = line["kernel"]
        assert not line["scalar_gather"], name
        assert line["wgmma"] == (gpu == (9, 0) and not name.startswith(NO_PRODUCT)), name
        assert needs_no_more_than_declared(gpu, name, line["shared"]), line
