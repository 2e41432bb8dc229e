"""Each fault of an installation has a message of its own; nothing is imported or written before first use."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import types

import pytest
import torch
from packaging.specifiers import SpecifierSet

from dsa_backends.tilelang_kernels import compiler
from dsa_backends.tilelang_kernels.spec import SPEC, TILELANG
from dsa_dispatch._call import CallSpec, DeviceInfo
from dsa_dispatch._decline import DeclineCode
from dsa_dispatch._dispatch.check import declines
from dsa_dispatch.errors import BackendDeclined


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "kernels"))
    compiler.forget()
    yield
    compiler.forget()


class FakeTileLang(types.ModuleType):
    """A library that takes every kernel, knows one switch, and counts what it compiled."""

    __version__ = "0.1.15"

    def __init__(self):
        super().__init__("tilelang")
        self.PassConfigKey = types.SimpleNamespace(TL_ENABLE_FAST_MATH="tl.enable_fast_math")
        self.compiled = []

    def compile(self, program, target, pass_configs):
        self.compiled.append((program, target, pass_configs))
        return f"kernel {len(self.compiled)}"


@pytest.fixture
def library(monkeypatch):
    fake = FakeTileLang()
    monkeypatch.setitem(sys.modules, "tilelang", fake)
    monkeypatch.setitem(sys.modules, "tilelang.language", types.ModuleType("tilelang.language"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(compiler, "build", lambda where, *static: (where, static))
    return fake


def decline_of(function):
    with pytest.raises(BackendDeclined) as raised:
        function()
    return raised.value.decline


def test_listing_and_deciding_import_no_tilelang(tmp_path):
    (tmp_path / "tilelang.py").write_text("raise RuntimeError('imported too early')")
    modules = [
        "spec",
        "scratch",
        "launch",
        "compiler",
        "attention_forward",
        "attention_backward",
        "indexer_topk",
    ]
    names = ", ".join(f"dsa_backends.tilelang_kernels.{name}" for name in (*modules, "indexer_loss"))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {names}; assert 'tilelang' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_folder_that_cannot_be_written_is_a_decline_that_names_the_variable(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "file" / "kernels"))
    decline = decline_of(compiler.tilelang)
    assert decline.code == DeclineCode.IMPORT_FAILED
    assert str(tmp_path) in decline.got
    assert compiler.CACHE_VARIABLE in decline.hint


def test_an_import_that_fails_is_a_decline_with_its_first_line(monkeypatch):
    def broken(name):
        raise OSError("libcuda.so.1: cannot open\nmore")

    monkeypatch.setattr(importlib, "import_module", broken)
    decline = decline_of(compiler.tilelang)
    assert decline.code == DeclineCode.IMPORT_FAILED
    assert decline.got == "OSError: libcuda.so.1: cannot open"
    assert "pip install" in decline.hint


@pytest.mark.parametrize(
    ("library_version", "foreign", "served"),
    [
        ("0.1.11", "0.1.11", True),
        ("0.1.11", "0.1.12", False),
        ("0.1.12", "0.1.15", False),
        ("0.1.13", "0.1.12", True),
    ],
)
def test_a_pair_whose_import_would_end_the_process_is_declined(
    library, monkeypatch, library_version, foreign, served
):
    versions = {"tilelang": library_version, "apache-tvm-ffi": foreign}
    monkeypatch.setattr(compiler, "version", versions.__getitem__)
    if served:
        assert compiler.tilelang() is library
    else:
        decline = decline_of(compiler.tilelang)
        assert decline.code == DeclineCode.VERSION
        assert "apache-tvm-ffi<0.1.12" in decline.hint


@pytest.mark.parametrize(
    ("version", "served"),
    [
        *(("0.1.6.post2", False), ("0.1.8", False), ("0.1.9", False), ("0.1.10", False), ("0.1.11", True)),
        *(("0.1.12", True), ("0.1.13", True), ("0.1.14", True), ("0.1.15", True), ("0.1.16", False)),
    ],
)
def test_versions_that_give_nan_or_were_not_tried_are_declined(version, served):
    assert (version in SpecifierSet(TILELANG.versions)) == served


def test_switches_that_a_release_does_not_know_are_left_out(library):
    assert compiler.pass_configs(library) == {"tl.enable_fast_math": True}


def test_a_kernel_is_compiled_once_for_its_constants_and_architecture(library, monkeypatch):
    device = torch.device("cuda", 0)
    first = compiler.kernel(device, "module:function", 64, "bfloat16")
    assert compiler.kernel(device, "module:function", 64, "bfloat16") == first
    assert compiler.kernel(device, "module:function", 0, "bfloat16") != first
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    compiler.kernel(device, "module:function", 64, "bfloat16")
    targets = [target for _, target, _ in library.compiled]
    assert targets == [
        {"kind": "cuda", "arch": "sm_90a"},
        {"kind": "cuda", "arch": "sm_90a"},
        {"kind": "cuda", "arch": "sm_80"},
    ]


def test_a_compilation_says_what_it_is_and_how_long_it_took(library, caplog):
    caplog.set_level(logging.INFO, logger="dsa_dispatch")
    compiler.kernel(torch.device("cuda", 0), "module:function", 64, "bfloat16")
    before, after = (record.getMessage() for record in caplog.records)
    assert "compiling function(64, bfloat16) for sm_90a" in before
    assert "took 0.0 s" in after


@pytest.mark.parametrize(
    ("stage", "capability", "shared", "codes"),
    [
        ("attention_forward", (9, 0), 232_448, []),
        ("attention_forward", (8, 9), 101_376, []),
        ("attention_forward", (7, 5), 65_536, [DeclineCode.COMPUTE_CAPABILITY, DeclineCode.LIMIT]),
        ("attention_forward", (8, 9), 65_536, [DeclineCode.LIMIT]),
        ("attention_backward", (9, 0), 232_448, []),
        ("attention_backward", (10, 0), 232_448, [DeclineCode.COMPUTE_CAPABILITY]),
        ("attention_backward", (8, 0), 166_912, [DeclineCode.COMPUTE_CAPABILITY, DeclineCode.LIMIT]),
    ],
)
def test_architectures_and_shared_memory_are_compared_with_the_device(stage, capability, shared, codes):
    call = CallSpec("run_fused_absorbed_sparse_attention", device="cuda", width=2048, heads=64)
    info = DeviceInfo("cuda", "gpu", capability, 1 << 37, shared)
    found = [decline.code for decline in declines(SPEC.stages[stage].capability, stage, call, info)]
    assert found == codes
