"""The indexer's loss and its gradients against the dense fp64 formula."""

from __future__ import annotations

import itertools

import pytest
import torch
from contract import formulas, make

from dsa_dispatch import run_fused_qk_topk, run_fused_qk_topk_with_loss
from dsa_dispatch.testing import assert_backend_ran

SCALE = 0.4
COEFFICIENT = 0.7
EXACT = {"rtol": 1e-10, "atol": 1e-12}  # fp64: only the order of sums differs


def indexer(rows, batch, keys, seed=0, dtype=torch.float64):
    return [
        make.normal(rows, batch, 2, 3, seed=seed, dtype=dtype, grad=True),
        make.normal(keys, batch, 3, seed=seed + 1, dtype=dtype, grad=True),
        make.normal(rows, batch, 2, seed=seed + 2, dtype=dtype, grad=True),
    ]


def teacher_inputs(rows, batch, keys, seed=20, dtype=torch.float64):
    return (
        make.normal(rows, batch, 3, 5, seed=seed, dtype=dtype),
        make.normal(keys, batch, 1, 5, seed=seed + 1, dtype=dtype),
    )


def check(
    rows, batch, keys, topk, starts=None, ends=None, valid=None, per_token=False, use_relu=True, sparse=True
):
    inputs = indexer(rows, batch, keys)
    query, key = teacher_inputs(rows, batch, keys)
    with assert_backend_ran("torch_dense", "indexer_topk", "indexer_target", "indexer_loss"):
        got = run_fused_qk_topk_with_loss(
            None, *inputs, topk, starts, ends, None, query, key, SCALE, COEFFICIENT, query_valid_rows=valid,
            calculate_per_token_loss=per_token, use_relu=use_relu, sparse_loss=sparse,
        )  # fmt: skip
    gradients = torch.autograd.grad(got.loss, inputs)
    mask = formulas.bounds_mask(starts, ends, rows, batch, keys)
    scores = formulas.index_scores(*inputs, use_relu).detach()
    support = formulas.chosen_mask(scores, mask, topk) if sparse else mask
    wanted = formulas.loss(*inputs, query, key, support, valid, SCALE, COEFFICIENT, per_token, use_relu)
    torch.testing.assert_close(got.loss.detach(), wanted.detach(), **EXACT)
    for gradient, want in zip(gradients, torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(gradient, want, **EXACT)
    plain = run_fused_qk_topk(None, *inputs, topk, starts, ends, use_relu=use_relu)
    assert torch.equal(got.indices, plain.indices)
    assert torch.equal(got.length, plain.length)
    return got, gradients


FORMS = pytest.mark.parametrize(
    ("sparse", "per_token", "use_relu"), list(itertools.product([True, False], repeat=3))
)


@FORMS
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("rows", "keys"), [(4, 9), (6, 6), (7, 4)])
def test_causal_rows(rows, keys, batch, sparse, per_token, use_relu):
    check(rows, batch, keys, 3, per_token=per_token, use_relu=use_relu, sparse=sparse)


@FORMS
@pytest.mark.parametrize("batch", [1, 2])
def test_bounds_with_empty_rows_and_rows_left_out(batch, sparse, per_token, use_relu):
    starts = torch.tensor([0, 2, 5, 1, -4])
    ends = torch.tensor([8, 6, 5, 99, 3])
    valid = torch.tensor([True, False, True, True, True])
    _, gradients = check(5, batch, 8, 3, starts, ends, valid, per_token, use_relu, sparse)
    assert not gradients[0][1].any()
    assert not gradients[0][2].any()


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(
    "valid",
    [
        torch.tensor([True, True, False, True]),
        torch.tensor([[True, False, False, True]]),
        torch.tensor([[True, False, False, True], [False, True, True, True]]),
        torch.zeros(4, dtype=torch.bool),
    ],
)
def test_rows_may_be_left_out_for_all_items_or_each(valid, sparse):
    got, _ = check(4, 2, 6, 3, valid=valid, sparse=sparse)
    assert bool(got.loss == 0) == (not valid.any())


@pytest.mark.parametrize("sparse", [True, False])
def test_bounds_may_differ_per_item(sparse):
    starts = torch.tensor([[0, 1, 2], [3, 0, 4]], dtype=torch.int32)
    ends = torch.tensor([[4, 4, 2], [6, 6, 5]], dtype=torch.int32)
    check(3, 2, 6, 2, starts, ends, sparse=sparse)


@pytest.mark.parametrize("sparse", [True, False])
def test_more_keys_are_asked_than_there_are(sparse):
    check(4, 2, 3, 8, sparse=sparse)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(("rows", "batch", "keys"), [(0, 2, 5), (4, 0, 5), (4, 2, 0)])
def test_sizes_of_zero_give_a_loss_of_zero(rows, batch, keys, sparse):
    got, gradients = check(rows, batch, keys, 3, sparse=sparse)
    assert got.loss == 0
    assert got.loss.shape == ()
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(
    ("dtype", "weights_dtype", "teacher_dtype", "tolerance"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16, 2e-2),  # a bf16 gradient is rounded to 2**-9
        (torch.float16, torch.float16, torch.bfloat16, 2e-2),
        (torch.float32, torch.float64, torch.float32, 1e-5),
        (torch.float64, torch.float32, torch.bfloat16, 1e-6),
    ],
)
def test_the_loss_is_wide_and_gradients_have_the_type_of_their_input(
    dtype, weights_dtype, teacher_dtype, tolerance, sparse
):
    q, k, _ = indexer(6, 1, 9, dtype=dtype)
    weights = make.normal(6, 1, 2, seed=2, dtype=weights_dtype, grad=True)
    query, key = teacher_inputs(6, 1, 9, dtype=teacher_dtype)
    got = run_fused_qk_topk_with_loss(
        None, q, k, weights, 9, None, None, None, query, key, SCALE, COEFFICIENT, sparse_loss=sparse
    )
    assert got.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, weights)]
    mask = formulas.bounds_mask(None, None, 6, 1, 9)
    wanted = formulas.loss(*exact, query, key, mask, None, SCALE, COEFFICIENT, False, True)
    assert formulas.relative(got.loss.detach(), wanted.detach()) < 1e-5
    gradients = torch.autograd.grad(got.loss, (q, k, weights))
    for gradient, want, tensor in zip(
        gradients, torch.autograd.grad(wanted, exact), (q, k, weights), strict=True
    ):
        assert (gradient.dtype, gradient.shape) == (tensor.dtype, tensor.shape)
        assert formulas.relative(gradient, want) < tolerance


def test_a_teacher_that_needs_gradients_gets_none():
    inputs = indexer(4, 1, 6)
    query, key = (tensor.requires_grad_() for tensor in teacher_inputs(4, 1, 6))
    got = run_fused_qk_topk_with_loss(None, *inputs, 3, None, None, None, query, key, SCALE, COEFFICIENT)
    got.loss.backward()
    assert query.grad is None
    assert key.grad is None
    assert all(tensor.grad is not None for tensor in inputs)


def test_a_coefficient_of_zero_gives_zero():
    inputs = indexer(4, 1, 6)
    got = run_fused_qk_topk_with_loss(
        None, *inputs, 3, None, None, None, *teacher_inputs(4, 1, 6), SCALE, 0.0
    )
    got.loss.backward()
    assert got.loss == 0
    assert not any(tensor.grad.any() for tensor in inputs)
