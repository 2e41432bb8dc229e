"""Accuracy of narrow types against fp64, as the contract promises it to every backend."""

from __future__ import annotations

import pytest
import torch
from contract import formulas, make

from dsa_dispatch import run_fused_absorbed_sparse_attention, run_fused_gqa_sparse_attention
from dsa_dispatch.testing import assert_backend_ran

OUT, GRADIENT, ROW, LSE = 4e-3, 6e-3, 3.0, 1e-4
"""Relative Frobenius of out and of gradients; no row worse than three times that; lse absolute (design, section 4)."""


def rows_of(tensor):
    return tensor.double().flatten(2).flatten(0, 1) if tensor.dim() == 4 else tensor.double().flatten(1)


def accurate(got, wanted, bound):
    assert formulas.relative(got, wanted) <= bound
    error = (rows_of(got) - rows_of(wanted)).norm(dim=1)
    size = rows_of(wanted).norm(dim=1)
    # A row that is nearly nothing is measured against the size of an average one.
    assert (error <= ROW * bound * size.clamp_min(float(size.mean()))).all()


def check(run, formula, inputs, stages):
    leaves = [tensor.requires_grad_() for tensor in inputs]
    with assert_backend_ran("torch_dense", *stages):
        out, lse = run(leaves)
        dout = make.normal(*out.shape, seed=9, dtype=out.dtype)
        gradients = torch.autograd.grad(out, leaves, dout)
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    wanted, wanted_lse = formula(exact)
    accurate(out.detach(), wanted.detach(), OUT)
    # At scores of thousands the spacing of fp32 itself passes 1e-4: four of its steps beside the promise.
    spacing = 4 * 2.0**-23 * float(wanted_lse.detach().abs().max())
    assert float((lse.detach() - wanted_lse.detach()).abs().max()) <= LSE + spacing
    for got, want in zip(gradients, torch.autograd.grad(wanted, exact, dout.double()), strict=True):
        accurate(got, want, GRADIENT)


NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
SCALES = pytest.mark.parametrize("size", [1.0, 30**0.5, 30.0])
"""Of the activations: scores as they are, 30 times, and 900 times as large, where a softmax picks one key."""


@NARROW
@SCALES
@pytest.mark.parametrize("batch", [1, 2])
def test_absorbed_attention(dtype, size, batch):
    inputs = [
        make.normal(24, batch, 8, 96, seed=1, dtype=dtype, scale=size),
        make.normal(80, batch, 1, 96, seed=2, dtype=dtype, scale=size),
    ]
    ids = make.ids(batch, 24, 48, 80)
    counts = formulas.naming_counts(ids, None, 80)
    scale = 96**-0.5
    check(
        lambda leaves: run_fused_absorbed_sparse_attention(None, *leaves, ids, scale, 64, return_lse=True),
        lambda leaves: formulas.absorbed(*leaves, counts, scale, 64),
        inputs,
        ("attention_forward", "attention_backward"),
    )


@NARROW
@SCALES
def test_grouped_attention(dtype, size):
    inputs = [
        make.normal(24, 2, 8, 64, seed=1, dtype=dtype, scale=size),
        make.normal(80, 2, 2, 64, seed=2, dtype=dtype, scale=size),
        make.normal(80, 2, 2, 48, seed=3, dtype=dtype, scale=size),
    ]
    ids = make.ids(2, 24, 48, 80)
    counts = formulas.naming_counts(ids, None, 80)
    scale = 64**-0.5
    check(
        lambda leaves: run_fused_gqa_sparse_attention(None, *leaves, ids, scale, return_lse=True),
        lambda leaves: formulas.grouped(*leaves, counts, scale),
        inputs,
        ("gqa_forward", "gqa_backward"),
    )


@NARROW
def test_the_gradient_of_one_key_that_4096_queries_read(dtype):
    """A sum of 4096 terms in the input's type would have lost its small terms long before the end."""
    inputs = [make.normal(4096, 1, 2, 16, seed=1, dtype=dtype), make.normal(2, 1, 1, 16, seed=2, dtype=dtype)]
    ids = torch.zeros(1, 4096, 2, dtype=torch.int32)
    ids[:, ::64, 1] = 1
    ids[:, 1::64, 1] = -1
    counts = torch.zeros(1, 4096, 2, dtype=torch.float64)
    counts.scatter_add_(2, ids.clamp_min(0).long(), (ids >= 0).double())
    leaves = [tensor.requires_grad_() for tensor in inputs]
    with assert_backend_ran("torch_dense", "attention_backward"):
        out = run_fused_absorbed_sparse_attention(None, *leaves, ids, 0.25, 12)
        # One sign, so that the sum grows to 4096 terms instead of cancelling.
        dout = make.normal(*out.shape, seed=9).abs().to(dtype)
        gradients = torch.autograd.grad(out, leaves, dout)
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    wanted, _ = formulas.absorbed(*exact, counts, 0.25, 12)
    wanted_gradients = torch.autograd.grad(wanted, exact, dout.double())
    assert formulas.relative(gradients[1], wanted_gradients[1]) <= GRADIENT
    assert formulas.relative(gradients[0], wanted_gradients[0]) <= GRADIENT
