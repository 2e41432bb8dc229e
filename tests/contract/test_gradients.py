"""Derivatives: right for every subset of inputs that needs one, absent for the rest, once only, any number of times."""

from __future__ import annotations

import itertools

import pytest
import torch
from contract import make

from dsa_dispatch import (
    run_fused_absorbed_sparse_attention,
    run_fused_dsa_attention,
    run_fused_gqa_sparse_attention,
    run_fused_qk_topk_with_loss,
)
from dsa_dispatch.testing import assert_backend_ran

ROWS, BATCH, KEYS = 3, 2, 4


def subsets(count):
    return [need for need in itertools.product([False, True], repeat=count) if any(need)]


def named(need, names):
    return "+".join(name for name, wanted in zip(names, need, strict=True) if wanted)


def by_subset(*names):
    return pytest.mark.parametrize("need", subsets(len(names)), ids=lambda need: named(need, names))


def gradcheck(function, tensors, need):
    """``function`` of the needed tensors alone; the others get no gradient.

    Every entry of the Jacobian where all are needed; a random projection of it, which costs a tenth, for the subsets.
    """
    tensors = [
        tensor.detach().clone().requires_grad_(wanted) for tensor, wanted in zip(tensors, need, strict=True)
    ]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    assert torch.autograd.gradcheck(
        lambda *_: function(*tensors), wanted, fast_mode=not all(need), check_undefined_grad=False
    )
    function(*tensors).sum().backward()
    for tensor in tensors:
        assert (tensor.grad is not None) == tensor.requires_grad


def attention_ids():
    indices = make.ids(BATCH, ROWS, 4, KEYS, seed=8)
    indices[0, 1] = -1
    return indices, torch.tensor([[4, 2, 3], [0, 4, 1]])


@by_subset("query", "key")
def test_absorbed_attention(need):
    indices, length = attention_ids()
    tensors = make.normal(ROWS, BATCH, 2, 3, seed=1), make.normal(KEYS, BATCH, 1, 3, seed=2)
    with assert_backend_ran("torch_dense", "attention_forward", "attention_backward"):
        gradcheck(
            lambda query, key: run_fused_absorbed_sparse_attention(None, query, key, indices, 0.6, 2, length),
            tensors,
            need,
        )


@by_subset("query", "key", "value")
def test_grouped_attention(need):
    indices, length = attention_ids()
    tensors = (
        make.normal(ROWS, BATCH, 4, 3, seed=1),
        make.normal(KEYS, BATCH, 2, 3, seed=2),
        make.normal(KEYS, BATCH, 2, 2, seed=3),
    )
    with assert_backend_ran("torch_dense", "gqa_forward", "gqa_backward"):
        gradcheck(
            lambda *qkv: run_fused_gqa_sparse_attention(None, *qkv, indices, 0.6, length), tensors, need
        )


def teacher():
    return make.normal(ROWS, BATCH, 2, 3, seed=11), make.normal(KEYS, BATCH, 1, 3, seed=12)


def gradcheck_loss(need, **kwargs):
    starts, ends = kwargs.pop("bounds", (None, None))

    def loss(q, k, w):
        return run_fused_qk_topk_with_loss(
            None, q, k, w, 3, starts, ends, None, *teacher(), 0.6, 0.7, **kwargs
        ).loss

    with assert_backend_ran("torch_dense", "indexer_topk", "indexer_target", "indexer_loss"):
        gradcheck(loss, make.apart(ROWS, BATCH, 2, KEYS, 2), need)


@by_subset("q", "k", "weights")
@pytest.mark.parametrize("use_relu", [True, False], ids=["relu", "linear"])
@pytest.mark.parametrize("per_token", [True, False], ids=["per_token", "mean"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_loss(sparse, per_token, use_relu, need):
    gradcheck_loss(need, sparse_loss=sparse, calculate_per_token_loss=per_token, use_relu=use_relu)


@by_subset("q", "k", "weights")
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_loss_with_bounds_and_rows_left_out(sparse, need):
    bounds = torch.tensor([0, 1, 2]), torch.tensor([[4, 3, 2], [2, 4, 4]])
    starts = bounds[0].expand(BATCH, ROWS)
    valid = torch.tensor([[True, True, True], [False, True, True]])
    gradcheck_loss(need, sparse_loss=sparse, bounds=(starts, bounds[1]), query_valid_rows=valid)


def dsa(query, key, up, q, k, w, coefficient=0.7):
    return run_fused_dsa_attention(
        config=None, query=query, key=key, up_v_weight=up, q_indexer=q, k_indexer=k, indexer_weights=w,
        indexer_topk=3, softmax_scale=0.6, loss_coeff=coefficient,
    )  # fmt: skip


@by_subset("query", "key", "up_v_weight")
@pytest.mark.parametrize("coefficient", [0.0, 0.7])
def test_output_of_dsa_attention(coefficient, need):
    indexer = make.apart(ROWS, BATCH, 2, KEYS, 2)
    tensors = (*teacher(), make.normal(2, 2, 2, seed=13))
    stages = ("attention_forward", "attention_backward") if any(need[:2]) else ("attention_forward",)
    with assert_backend_ran("torch_dense", *stages):
        gradcheck(lambda *main: dsa(*main, *indexer, coefficient)[0], tensors, need)


@by_subset("q_indexer", "k_indexer", "indexer_weights")
def test_loss_of_dsa_attention(need):
    main = (*teacher(), make.normal(2, 2, 2, seed=13))
    with assert_backend_ran("torch_dense", "indexer_loss"):
        gradcheck(lambda *indexer: dsa(*main, *indexer)[1], make.apart(ROWS, BATCH, 2, KEYS, 2), need)


def scalars():
    """Each operation as a scalar of leaf tensors that all need a gradient."""
    indices, length = attention_ids()
    indexer = make.apart(ROWS, BATCH, 2, KEYS, 2)
    grouped = make.normal(KEYS, BATCH, 2, 3, seed=2), make.normal(KEYS, BATCH, 2, 2, seed=3)
    return {
        "absorbed": (
            lambda q, k: run_fused_absorbed_sparse_attention(None, q, k, indices, 0.6, 2, length).sum(),
            teacher(),
        ),
        "gqa": (
            lambda q, k, v: run_fused_gqa_sparse_attention(None, q, k, v, indices, 0.6, length).sum(),
            (make.normal(ROWS, BATCH, 4, 3, seed=1), *grouped),
        ),
        "loss": (
            lambda q, k, w: (
                run_fused_qk_topk_with_loss(None, q, k, w, 3, None, None, None, *teacher(), 0.6, 0.7).loss
            ),
            indexer,
        ),
        "dsa": (
            lambda *all_of_them: sum(part.sum() for part in dsa(*all_of_them)),
            (*teacher(), make.normal(2, 2, 2, seed=13), *indexer),
        ),
    }


NAMES = ["absorbed", "gqa", "loss", "dsa"]


def leaves(name):
    function, tensors = scalars()[name]
    return function, [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("name", NAMES)
def test_a_second_derivative_raises(name):
    function, tensors = leaves(name)
    value = function(*tensors)
    gradients = torch.autograd.grad(value, tensors, create_graph=True)
    if name == "dsa":
        # The gradient of up_v_weight holds the latent output, so its derivative is a first one of the attention.
        gradients = gradients[:2] + gradients[3:]
    for gradient in gradients:
        penalty = (gradient**2).sum()
        with pytest.raises(RuntimeError, match="once differentiable: a second derivative"):
            penalty.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="once differentiable: a second derivative"):
            torch.autograd.grad(value + penalty, tensors, retain_graph=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_kept_gives_the_same_gradients_twice(name):
    function, tensors = leaves(name)
    value = function(*tensors)
    first = torch.autograd.grad(value, tensors, retain_graph=True)
    second = torch.autograd.grad(value, tensors)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_an_upstream_gradient_scales_what_comes_back(name):
    function, tensors = leaves(name)
    plain = torch.autograd.grad(function(*tensors), tensors)
    scaled = torch.autograd.grad(-3.0 * function(*tensors), tensors)
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(other, -3.0 * one, rtol=1e-12, atol=1e-14)  # fp64 rounding of one factor


@pytest.mark.parametrize("name", ["absorbed", "gqa"])
def test_an_expanded_gradient_is_read_as_what_it_stands_for(name):
    indices, length = attention_ids()
    _, tensors = leaves(name)
    if name == "absorbed":
        out = run_fused_absorbed_sparse_attention(None, *tensors, indices, 0.6, 2, length)
    else:
        out = run_fused_gqa_sparse_attention(None, *tensors, indices, 0.6, length)
    expanded = torch.ones((), dtype=out.dtype).expand(out.shape)
    transposed = torch.ones(out.shape[::-1], dtype=out.dtype).permute(3, 2, 1, 0)
    dense = torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)
    for dout in (expanded, transposed):
        for got, want in zip(torch.autograd.grad(out, tensors, dout, retain_graph=True), dense, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_under_no_grad_and_inference_mode_nothing_is_recorded(name):
    function, tensors = leaves(name)
    wanted = function(*tensors)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            value = function(*tensors)
        assert not value.requires_grad
        assert torch.equal(value, wanted.detach())
