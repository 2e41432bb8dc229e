"""How often Triton really compiles: once per kernel, whatever the lengths."""

from __future__ import annotations

import pytest
import torch

import dsa_dispatch as dsa
from dsa_dispatch.testing import assert_backend_ran

pytestmark = pytest.mark.usefixtures("triton_only")
LENGTHS = (1, 2, 15, 16, 17, 1000, 1024)


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels that were compiled, or read from Triton's cache on disk, one entry each time."""
    # Here, since Triton decides for good at its first import how it runs, and this file is also read without a GPU.
    from triton import knobs

    names = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **known: names.append(known["fn"].name)
    )
    return names


def attention(rows, keys, width, heads):
    query = torch.zeros(rows, 1, heads, 576, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    key = torch.zeros(keys, 1, 1, 576, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    ids = torch.zeros(1, rows, width, dtype=torch.int32, device="cuda")
    with assert_backend_ran("triton", "attention_forward", "attention_backward"):
        dsa.run_fused_absorbed_sparse_attention(None, query, key, ids, 0.1, 512).sum().backward()


def indexer(rows, keys, width, heads):
    q = torch.zeros(rows, 1, heads, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    k = torch.zeros(keys, 1, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    w = torch.zeros(rows, 1, heads, device="cuda", requires_grad=True)
    query = torch.zeros(rows, 1, heads, 576, dtype=torch.bfloat16, device="cuda")
    key = torch.zeros(keys, 1, 1, 576, dtype=torch.bfloat16, device="cuda")
    with assert_backend_ran("triton"):
        dsa.run_fused_qk_topk_with_loss(
            None, q, k, w, width, None, None, None, query, key, 0.1, 1.0
        ).loss.backward()


def lengths(operation):
    for length in LENGTHS:
        yield length, 40, 24
        yield 24, length, 24
        # The selection's own width is a constant of its kernel, for every power of two: asked for by a model once.
        if operation is attention:
            yield 24, 40, length
            yield length, length, length


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("operation", [attention, indexer])
def test_lengths_compile_nothing_again(operation, heads, deterministic, compiled):
    with dsa.use_backend(deterministic=deterministic):
        # Few rows and many, few slots and many: with and without splits of the slots.
        for rows, width in ((1, 24), (1, 1000), (2000, 1000)):
            operation(rows, 2000, width if operation is attention else 24, heads)
        operation(24, 40, 24, heads)
        warm = len(compiled)
        for sizes in lengths(operation):
            operation(*sizes, heads)
    assert compiled[warm:] == []


def test_the_hook_sees_a_compilation(compiled):
    from gpu.sanitized.planted import copy_kernel

    source, to = torch.zeros(2, 8, 32, device="cuda")
    for _ in range(2):
        copy_kernel[(8,)](source, to, CHANNELS=32)
    assert compiled == ["copy_kernel"]
