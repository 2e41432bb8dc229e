"""What ``make gpu`` makes of what its tools say; the tools themselves need a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("make_gpu", ROOT / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(kind, kernel):
    return (
        f"========= {kind} of size 16 bytes\n=========     at {kernel}+0x1f0 in kernels.py:25\n"
        f"=========     by thread (0,0,0) in block (5,0,0)\n"
    )


WRITE, READ = "Invalid __global__ write", "Uninitialized __global__ memory read"
CLEAN = "every stage ran\n========= ERROR SUMMARY: 0 errors\n"
PLANTED = {"write": report(WRITE, "one_row_too_many_kernel"), "read": report(READ, "copy_kernel")}


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Answers as compute-sanitizer would; ``said`` changes what it says of a tool or of a planted fault."""
    (tmp_path / "compute-sanitizer").write_text("#!/bin/sh\n")
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    class Host:
        def __init__(self):
            self.out, self.status = tmp_path, 0
            self.said = {**PLANTED, "memcheck": CLEAN, "initcheck": CLEAN}

        def python(self, *command, **_):
            return self.status, "a traceback"

        def run(self, *command, log, **_):
            what = command[-1] if command[-1] in PLANTED else command[command.index("--tool") + 1]
            return 0, self.said[what]

    return Host()


def test_a_clean_run_that_found_what_was_planted_passes(gpu, host):
    assert gpu.sanitize(host) == {
        name: {"planted": "found", "ours": 0, "elsewhere": 0} for name in ("memcheck", "initcheck")
    }


@pytest.mark.parametrize(("fault", "tool"), [("write", "memcheck"), ("read", "initcheck")])
def test_a_tool_that_misses_what_was_planted_proves_nothing(gpu, host, fault, tool):
    host.said = {**host.said, fault: CLEAN}
    with pytest.raises(gpu.Failed, match=f"{tool} did not find the planted fault"):
        gpu.sanitize(host)


@pytest.mark.parametrize(("tool", "kind"), [("memcheck", WRITE), ("initcheck", READ)])
def test_a_report_of_one_of_our_kernels_fails(gpu, host, tool, kind):
    host.said = {**host.said, tool: report(kind, "key_gradient_kernel") + CLEAN}
    with pytest.raises(gpu.Failed, match=r"1 reports: .* at key_gradient_kernel"):
        gpu.sanitize(host)


def test_what_pytorch_leaves_unwritten_is_counted_and_no_fault_of_ours_but_its_bad_writes_are(gpu, host):
    sort = "void at_cuda_detail::cub::DeviceRadixSortKernel<int>(int)"
    host.said = {**host.said, "initcheck": report(READ, sort) * 3 + CLEAN}
    assert gpu.sanitize(host)["initcheck"]["elsewhere"] == 3
    host.said = {**host.said, "memcheck": report(WRITE, sort) + CLEAN}
    with pytest.raises(gpu.Failed, match="memcheck: 1 reports"):
        gpu.sanitize(host)


def test_a_run_that_did_not_reach_its_end_fails(gpu, host):
    host.said = {**host.said, "memcheck": "========= ERROR SUMMARY: 0 errors\n"}
    with pytest.raises(gpu.Failed, match=r"odd_shapes\.py ended with 0 under memcheck"):
        gpu.sanitize(host)
    host.status = 1
    with pytest.raises(gpu.Failed, match=r"odd_shapes\.py fails by itself:\na traceback"):
        gpu.sanitize(host)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ('tests="4" failures="0" errors="0" skipped="4"', "every test was skipped"),
        ("", "pytest ended with 0"),
    ],
)
def test_tests_that_did_not_run_did_not_pass(gpu, tmp_path, counts, message):
    (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite {counts}></testsuite></testsuites>")
    with pytest.raises(gpu.Failed, match=message):
        gpu._tests_passed(0, tmp_path / "tests.xml")


def test_a_wheel_of_other_sources_is_refused(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    with pytest.raises(
        SystemExit, match=r"old\.whl is not of this checkout: dsa_dispatch/.* differs\. Build it anew"
    ):
        gpu.install(Path("old.whl"), tmp_path)
