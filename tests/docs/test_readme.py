"""What the README shows must run as it stands, and what it says of names must be true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import dsa_dispatch as dsa
from dsa_backends.flash_mla.spec import SPEC
from dsa_dispatch._dispatch.check import declines
from dsa_dispatch._policy.environment import VARIABLES
from dsa_dispatch._stages import OPERATION_GROUPS
from dsa_dispatch.testing import isolated_registry

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
def test_python_examples_run_as_they_stand(code, capsys):
    torch.manual_seed(0)
    with isolated_registry(installed=True):
        exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "attention_backward: torch_dense" in printed
    assert "{'torch_dense': 1}" in printed


def test_example_is_about_fifteen_lines():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15


def test_every_operation_and_variable_is_mentioned():
    for name in OPERATION_GROUPS:
        assert f"`{name}`" in README
        assert hasattr(dsa, name)
    for name in set(VARIABLES) - {"DSA_KERNEL_PROFILE"}:
        assert name in README


def test_decline_example_is_what_the_library_says():
    device = dsa.DeviceInfo("cuda", "NVIDIA H200", (9, 0), 1 << 37, 232448)
    call = dsa.CallSpec("run_fused_absorbed_sparse_attention", "cuda", dtype="float32", heads=64, width=2048)
    (decline,) = declines(SPEC.stages["attention_forward"].capability, "attention_forward", call, device)
    assert f"\n{decline}\n" in README
