"""Importing the library costs little and loads no kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HEAVY = ("triton", "tilelang", "tvm", "cudnn", "flash_mla", "deep_gemm")


def in_fresh_process(source):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


# Whatever torch itself imports is not ours: it is taken away from what is there afterwards.
LOADED = """
import json, sys, time
begin = time.perf_counter()
import torch
with_torch = time.perf_counter()
before = set(sys.modules)
import dsa_dispatch
imported = time.perf_counter()
%s
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
    "torch_seconds": with_torch - begin,
    "seconds": imported - with_torch,
}))
"""
LISTED = "dsa_dispatch.list_backends(); dsa_dispatch.capability_matrix().to_markdown()"


@pytest.fixture(scope="module")
def imported():
    return in_fresh_process(LOADED % "")


def test_an_import_loads_no_kernel_and_no_plugin(imported):
    tops = {name.partition(".")[0] for name in imported["modules"]}
    assert "dsa_dispatch" in tops
    assert not tops & {*HEAVY, "dsa_backends"}


def test_an_import_creates_no_cuda_context(imported):
    assert imported["cuda"] is False


def test_an_import_is_quick_beside_that_of_torch(imported):
    # Both in one process, so that a slow machine slows both; typically a quarter.
    assert imported["seconds"] < imported["torch_seconds"]


def test_listing_loads_no_compiler_and_creates_no_cuda_context():
    listed = in_fresh_process(LOADED % LISTED)
    tops = {name.partition(".")[0] for name in listed["modules"]}
    assert "dsa_backends" in tops
    assert not tops & set(HEAVY)
    assert listed["cuda"] is False
