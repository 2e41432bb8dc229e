"""What ``docs/training.md`` shows must run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import dsa_dispatch as dsa
from dsa_dispatch.testing import isolated_registry

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
def test_python_examples_run_as_they_stand(code):
    torch.manual_seed(0)
    names = {"__name__": "example"}
    with isolated_registry(installed=True):
        exec(compile(code, "docs/training.md", "exec"), names)
        assert dsa.stats().ran("indexer_topk") == {"torch_dense": 2}
    gradients = [parameter.grad for parameter in names["layers"].parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
