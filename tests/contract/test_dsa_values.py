"""``run_fused_dsa_attention`` is its parts: selection, attention over it, projection, loss."""

from __future__ import annotations

import pytest
import torch
from contract import formulas, make

from dsa_backends.torch_dense.attention_forward import attention_forward
from dsa_backends.torch_dense.indexer_target import indexer_target
from dsa_dispatch import run_fused_dsa_attention, use_backend
from dsa_dispatch.testing import FakeBackend, assert_backend_ran, isolated_registry

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # fp64: only the order of sums differs
STAGES = ("indexer_topk", "attention_forward", "attention_backward")
LOSS_STAGES = ("indexer_target", "indexer_loss")


def arguments(rows=5, batch=2, keys=8, dtype=torch.float64, grad=True):
    return {
        "query": make.normal(rows, batch, 3, 6, seed=1, dtype=dtype, grad=grad),
        "key": make.normal(keys, batch, 1, 6, seed=2, dtype=dtype, grad=grad),
        "up_v_weight": make.normal(3, 2, 4, seed=3, dtype=dtype, grad=grad),
        "q_indexer": make.normal(rows, batch, 2, 3, seed=4, dtype=dtype, grad=grad),
        "k_indexer": make.normal(keys, batch, 3, seed=5, dtype=dtype, grad=grad),
        "indexer_weights": make.normal(rows, batch, 2, seed=6, dtype=dtype, grad=grad),
    }


def run(given, topk=3, **kwargs):
    return run_fused_dsa_attention(config=None, **given, indexer_topk=topk, softmax_scale=0.4, **kwargs)


def formula(given, topk, starts, ends, valid, coefficient, per_token, use_relu, sparse):
    query, key, up, q, k, w = given.values()
    rows, batch, keys = query.shape[0], query.shape[1], key.shape[0]
    mask = formulas.bounds_mask(starts, ends, rows, batch, keys)
    chosen = formulas.chosen_mask(formulas.index_scores(q, k, w, use_relu).detach(), mask, topk)
    latent, _ = formulas.absorbed(query, key, chosen.double(), 0.4, 4)
    out = torch.einsum("sbhc,hdc->sbhd", latent, up).flatten(2)
    loss = formulas.loss(
        q, k, w, query, key, chosen if sparse else mask, valid, 0.4, coefficient, per_token, use_relu
    )
    return out, loss


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("use_relu", [True, False])
@pytest.mark.parametrize("bounded", [True, False])
def test_output_loss_and_gradients_are_those_of_the_formula(bounded, use_relu, per_token, sparse):
    given = arguments()
    starts = torch.tensor([0, 3, 4, 2, 0]) if bounded else None
    ends = torch.tensor([5, 6, 4, 20, 1]) if bounded else None
    valid = torch.tensor([[True, True, True, False, True]]) if bounded else None
    with assert_backend_ran("torch_dense", *STAGES, *LOSS_STAGES):
        out, loss = run(
            given, varlen_starts=starts, varlen_ends=ends, query_valid_rows=valid, loss_coeff=0.3,
            calculate_per_token_loss=per_token, use_relu=use_relu, sparse_loss=sparse,
        )  # fmt: skip
        dout = make.normal(*out.shape, seed=7)
        gradients = torch.autograd.grad((out * dout).sum() + 2 * loss, list(given.values()))
    wanted, wanted_loss = formula(given, 3, starts, ends, valid, 0.3, per_token, use_relu, sparse)
    torch.testing.assert_close(out, wanted, **EXACT)
    torch.testing.assert_close(loss, wanted_loss, **EXACT)
    wanted_gradients = torch.autograd.grad((wanted * dout).sum() + 2 * wanted_loss, list(given.values()))
    for got, want in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("chunk", [None, 2])
def test_the_sparse_teacher_gets_the_lse_of_the_attention_and_no_other_one(chunk, sparse):
    """Row by row of the flattened call; over the selection, so the dense teacher must not have it."""
    seen = {"attention_forward": [], "indexer_target": []}

    def forward(*tensors, **options):
        out, lse = attention_forward(*tensors, **options)
        seen["attention_forward"].append(lse)
        return out, lse

    def target(*tensors, lse, **options):
        seen["indexer_target"].append(lse)
        return indexer_target(*tensors, lse=lse, **options)

    fake = FakeBackend(replace={"attention_forward": forward, "indexer_target": target})
    with isolated_registry(fake.spec), use_backend(query_chunk=chunk):
        fake.calls.clear()
        for found in seen.values():
            found.clear()
        run(arguments(), loss_coeff=0.3, sparse_loss=sparse)
    if sparse:
        wanted = torch.cat(seen["attention_forward"])
        torch.testing.assert_close(torch.cat(seen["indexer_target"]), wanted, rtol=0, atol=0)
        assert len(seen["indexer_target"]) == (1 if chunk is None else 5)
    else:
        assert set(seen["indexer_target"]) == {None}


def test_without_a_coefficient_there_is_no_loss_and_no_stage_of_it():
    given = arguments()
    with assert_backend_ran("torch_dense", *STAGES):
        out, loss = run(given)
        out.sum().backward()
    from dsa_dispatch import stats

    assert loss == 0
    assert (loss.shape, loss.dtype) == ((), torch.float64)
    assert given["q_indexer"].grad is None
    assert given["query"].grad is not None
    with (
        pytest.raises(AssertionError, match="indexer_loss"),
        assert_backend_ran("torch_dense", "indexer_loss"),
    ):
        run(given)
    assert stats().ran("indexer_topk")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_and_shapes_of_what_is_returned(dtype):
    out, loss = run(arguments(dtype=dtype), loss_coeff=0.5)
    assert (out.dtype, out.shape) == (dtype, (5, 2, 6))
    assert (loss.dtype, loss.shape) == (torch.float32, ())


def test_plain_causal_bounds_are_the_same_as_none():
    given = arguments(rows=6, keys=6)
    starts, ends = torch.zeros(6, dtype=torch.int64), torch.arange(1, 7)
    bounded, bounded_loss = run(given, varlen_starts=starts, varlen_ends=ends, loss_coeff=0.5)
    named, named_loss = run(
        given, varlen_starts=starts, varlen_ends=ends, varlen_is_plain_causal=True, loss_coeff=0.5
    )
    plain, plain_loss = run(given, loss_coeff=0.5)
    assert torch.equal(bounded, plain)
    assert torch.equal(named, plain)
    torch.testing.assert_close(bounded_loss, plain_loss, **EXACT)
    assert torch.equal(named_loss, plain_loss)


@pytest.mark.parametrize(("rows", "batch", "keys"), [(0, 2, 5), (4, 0, 5), (4, 2, 0)])
def test_sizes_of_zero_are_legal(rows, batch, keys):
    given = arguments(rows, batch, keys)
    out, loss = run(given, loss_coeff=0.5)
    assert out.shape == (rows, batch, 6)
    assert not out.any()
    assert loss == 0
    for gradient in torch.autograd.grad(out.sum() + loss, list(given.values())):
        assert not gradient.any()
