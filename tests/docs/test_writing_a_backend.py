"""The guide for authors of backends: its examples run and print what it says, and what it names exists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from dsa_dispatch import Capability
from dsa_dispatch._stages import STAGES

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")


# Each block of Python, and what the guide says that it prints.
EXAMPLES = re.findall(r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_examples_print_what_the_guide_says(code, printed, capsys):
    torch.manual_seed(0)
    exec(compile(code, "writing-a-backend.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_every_block_of_python_is_run():
    assert len(EXAMPLES) == GUIDE.count("```python") > 0


def test_every_stage_and_every_field_of_a_capability_is_mentioned():
    names = [
        *STAGES,
        *(field.name for field in dataclasses.fields(Capability) if field.name != "verified"),
    ]
    assert [name for name in names if f"`{name}`" not in GUIDE] == []


def test_policy_and_observer_hooks_have_an_example_each():
    for hook in ("dsa_dispatch_order", "dsa_dispatch_on_decision"):
        assert any(f"def {hook}" in code for code, _ in EXAMPLES)
