"""What every test on a GPU shares: it is marked, and skipped only where there is no CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dsa_dispatch as dsa

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch.cuda.is_available() is False"))
            # Triton 3.9 announces a change of a default of its compiler, once per process.
            item.add_marker(pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"))


@pytest.fixture
def triton_only():
    """Every operation on the Triton backend, or an error."""
    with dsa.use_backend("triton", fallback="error"):
        yield
