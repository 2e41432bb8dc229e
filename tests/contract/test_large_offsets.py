"""Offsets past 2**31 elements, through strided views that touch little memory."""

from __future__ import annotations

import pytest
import torch
from contract import make

from dsa_dispatch import (
    run_fused_absorbed_sparse_attention,
    run_fused_gqa_sparse_attention,
    run_fused_qk_topk,
)
from dsa_dispatch.testing import assert_backend_ran

ROWS = 2049
STRIDE = 2**20
"""2049 rows of this stride reach element 2**31; only the pages of the rows themselves come into memory."""


def far_apart(values):
    """``values [rows, ...]`` with rows ``STRIDE`` elements apart."""
    inner = values[0].numel()
    assert inner <= STRIDE
    storage = torch.empty((values.shape[0] - 1) * STRIDE + inner, dtype=values.dtype)
    view = storage.as_strided(values.shape, (STRIDE, *values[0].contiguous().stride()))
    view.copy_(values)
    assert view.storage_offset() + (values.shape[0] - 1) * view.stride(0) >= 2**31
    return view


def ids(width=3):
    indices = make.ids(1, ROWS, width, ROWS, dtype=torch.int64)
    indices[:, -1, 0] = ROWS - 1  # the last row reads the last key, both past 2**31
    return indices


@pytest.fixture(scope="module")
def keys():
    return make.normal(ROWS, 1, 1, 4, seed=2, dtype=torch.bfloat16)


@pytest.mark.parametrize("what", ["query", "key"])
def test_absorbed_attention(keys, what):
    query = make.normal(ROWS, 1, 2, 4, seed=1, dtype=torch.bfloat16)
    indices = ids()
    results = []
    for far in (False, True):
        tensors = [
            far_apart(tensor) if far and name == what else tensor.clone()
            for name, tensor in (("query", query), ("key", keys))
        ]
        leaves = [tensor.requires_grad_() for tensor in tensors]
        with assert_backend_ran("torch_dense", "attention_forward", "attention_backward"):
            out = run_fused_absorbed_sparse_attention(None, *leaves, indices, 0.5, 4)
            results.append((out.detach(), *torch.autograd.grad(out.sum(), leaves)))
    for near, far in zip(*results, strict=True):
        assert torch.equal(near, far)


def test_grouped_attention(keys):
    query = make.normal(ROWS, 1, 2, 4, seed=1, dtype=torch.bfloat16)
    value = make.normal(ROWS, 1, 1, 3, seed=3, dtype=torch.bfloat16)
    near = run_fused_gqa_sparse_attention(None, query, keys, value, ids(), 0.5)
    with assert_backend_ran("torch_dense", "gqa_forward"):
        far = run_fused_gqa_sparse_attention(None, query, keys, far_apart(value), ids(), 0.5)
    assert torch.equal(near, far)


@pytest.mark.parametrize("what", ["q", "k"])
def test_selection(what):
    q, k = (
        make.normal(ROWS, 1, 1, 4, dtype=torch.bfloat16),
        make.normal(ROWS, 1, 4, seed=1, dtype=torch.bfloat16),
    )
    w = make.normal(ROWS, 1, 1, seed=2, dtype=torch.bfloat16)
    near = run_fused_qk_topk(None, q, k, w, 3)
    tensors = {"q": q, "k": k}
    tensors[what] = far_apart(tensors[what])
    with assert_backend_ran("torch_dense", "indexer_topk"):
        far = run_fused_qk_topk(None, tensors["q"], tensors["k"], w, 3)
    assert torch.equal(near.indices, far.indices)
