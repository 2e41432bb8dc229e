"""What is no key contributes nothing, even where its memory holds NaN; NaN that a row may choose stays with it."""

from __future__ import annotations

import math

import pytest
import torch
from contract import formulas, make

from dsa_dispatch import (
    run_fused_absorbed_sparse_attention,
    run_fused_gqa_sparse_attention,
    run_fused_qk_topk,
    run_fused_qk_topk_with_loss,
    use_backend,
)
from dsa_dispatch.errors import InvalidInputError
from dsa_dispatch.testing import assert_backend_ran

EXACT = {"rtol": 1e-11, "atol": 1e-11}  # fp64: only the order of sums differs
POISON = [math.nan, math.inf, -math.inf]


def ids_without(batch, rows, width, keys, poisoned, seed=0):
    """Ids that never name a poisoned key: those slots are holes, ids out of range, or past the length."""
    ids = make.ids(batch, rows, width, keys, seed=seed, dtype=torch.int64)
    for key in poisoned:
        ids[ids == key] = -1
    ids[:, :, -2] = keys
    ids[:, :, -1] = poisoned[0]
    return ids, torch.full((batch, rows), width - 1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_poisoned_keys_that_no_id_names_contribute_nothing_to_absorbed_attention(batch, poison, dtype):
    query = make.normal(5, batch, 2, 6, grad=True)
    clean = make.normal(8, batch, 1, 6, seed=1)
    # Key 0 stands where a clamped id would read, the last one where an id of -1 would.
    ids, length = ids_without(batch, 5, 7, 8, [0, 3, 7])
    key = clean.clone()
    key[[0, 3, 7]] = poison
    key.requires_grad_()
    with assert_backend_ran("torch_dense", "attention_forward", "attention_backward"):
        out, lse = run_fused_absorbed_sparse_attention(
            None, query, key, ids.to(dtype), 0.4, 4, length, return_lse=True
        )
        gradients = torch.autograd.grad(out.sum(), (query, key))
    clean.requires_grad_()
    wanted, wanted_lse = formulas.absorbed(query, clean, formulas.naming_counts(ids, length, 8), 0.4, 4)
    torch.testing.assert_close(out, wanted, **EXACT)
    torch.testing.assert_close(lse, wanted_lse, **EXACT)
    for got, want in zip(gradients, torch.autograd.grad(wanted.sum(), (query, clean)), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("poison", POISON)
def test_poisoned_keys_that_no_id_names_contribute_nothing_to_grouped_attention(batch, poison):
    query = make.normal(5, batch, 4, 6, grad=True)
    clean = make.normal(8, batch, 2, 6, seed=1), make.normal(8, batch, 2, 3, seed=2)
    ids, length = ids_without(batch, 5, 7, 8, [0, 3, 7])
    key, value = (tensor.clone() for tensor in clean)
    for tensor in (key, value):
        tensor[[0, 3, 7]] = poison
        tensor.requires_grad_()
    out = run_fused_gqa_sparse_attention(None, query, key, value, ids, 0.4, length)
    gradients = torch.autograd.grad(out.sum(), (query, key, value))
    leaves = (query, *(tensor.requires_grad_() for tensor in clean))
    wanted, _ = formulas.grouped(*leaves, formulas.naming_counts(ids, length, 8), 0.4)
    torch.testing.assert_close(out, wanted, **EXACT)
    for got, want in zip(gradients, torch.autograd.grad(wanted.sum(), leaves), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


def test_a_poisoned_row_stays_with_its_row():
    query = make.normal(5, 1, 2, 6)
    key = make.normal(8, 1, 1, 6, seed=1)
    ids = make.ids(1, 5, 4, 8)
    wanted = run_fused_absorbed_sparse_attention(None, query, key, ids, 0.4, 4)
    query[2] = math.nan
    got = run_fused_absorbed_sparse_attention(None, query, key, ids, 0.4, 4)
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], wanted[others])
    assert got[2].isnan().all()


def indexer(rows=6, batch=2, keys=30):
    return (
        make.normal(rows, batch, 2, 4),
        make.normal(keys, batch, 4, seed=1),
        make.normal(rows, batch, 2, seed=2),
    )


@pytest.mark.parametrize("poison", POISON)
def test_poisoned_keys_outside_a_rows_range_change_no_selection(poison):
    q, k, w = indexer()
    starts, ends = torch.full((6,), 5), torch.arange(14, 20)
    wanted = run_fused_qk_topk(None, q, k, w, 4, starts, ends)
    k[:5], k[20:] = poison, poison
    got = run_fused_qk_topk(None, q, k, w, 4, starts, ends)
    assert torch.equal(got.indices, wanted.indices)
    assert torch.equal(got.length, wanted.length)
    with use_backend("torch_dense", debug_checks=True):
        assert torch.equal(run_fused_qk_topk(None, q, k, w, 4, starts, ends).indices, wanted.indices)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("poison", POISON)
def test_poisoned_keys_outside_every_range_change_no_loss(poison, sparse):
    q, k, w = indexer()
    query, key = make.normal(6, 2, 2, 5, seed=3), make.normal(30, 2, 1, 5, seed=4)
    starts, ends = torch.full((6,), 5), torch.arange(14, 20)

    def run():
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, w)]
        loss = run_fused_qk_topk_with_loss(
            None, *leaves, 4, starts, ends, None, query, key, 0.5, 1.0, sparse_loss=sparse
        ).loss
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    wanted = run()
    for tensor in (k, key):
        tensor[:5], tensor[20:] = poison, poison
    for got, want in zip(run(), wanted, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("sparse", [True, False])
def test_a_row_left_out_may_hold_nan(sparse):
    q, k, w = indexer()
    query, key = make.normal(6, 2, 2, 5, seed=3), make.normal(30, 2, 1, 5, seed=4)
    valid = torch.tensor([True, True, True, True, False, True])

    def run():
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, w)]
        loss = run_fused_qk_topk_with_loss(
            None,
            *leaves,
            4,
            None,
            None,
            None,
            query,
            key,
            0.5,
            1.0,
            query_valid_rows=valid,
            sparse_loss=sparse,
        ).loss
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    wanted = run()
    q[4], w[4], query[4] = math.nan, math.nan, math.nan
    for got, want in zip(run(), wanted, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("where", ["q", "k", "weights"])
@pytest.mark.parametrize("topk", [4, 40])
def test_nan_scores_keep_the_form_and_leave_other_rows_alone(where, topk):
    q, k, w = indexer()
    wanted = run_fused_qk_topk(None, q, k, w, topk)
    if where == "q":
        q[3] = math.nan
    elif where == "weights":
        w[3] = math.nan
    else:
        k[27] = math.nan  # seen by rows 3, 4 and 5
    got = run_fused_qk_topk(None, q, k, w, topk)
    formulas.check_form(got.indices, got.length, 2, 6, topk)
    assert torch.equal(got.length, wanted.length)
    mask = formulas.bounds_mask(None, None, 6, 2, 30)
    for item in range(2):
        for row in range(6):
            used = got.indices[item, row, : int(got.length[item, row])].long()
            assert mask[item, row][used].all()
    touched = [3, 4, 5] if where == "k" else [3]
    others = [row for row in range(6) if row not in touched]
    assert torch.equal(got.indices[:, others], wanted.indices[:, others])


@pytest.mark.parametrize("query_chunk", [2, "off"])
@pytest.mark.parametrize("use_relu", [True, False])
def test_debug_checks_name_the_row_of_a_nan_score(use_relu, query_chunk):
    q, k, w = indexer()
    with use_backend("torch_dense", debug_checks=True, query_chunk=query_chunk):
        run_fused_qk_topk(None, q, k, w, 4, use_relu=use_relu)
        k[28, 1] = math.nan
        with pytest.raises(
            InvalidInputError, match=r"NaN indexer score in row 4 of batch item 1 \(debug_checks\)"
        ):
            run_fused_qk_topk(None, q, k, w, 4, use_relu=use_relu)


def test_debug_checks_see_an_overflow_to_infinity_minus_infinity():
    q, k, w = (tensor.float() for tensor in indexer(batch=1))
    q[2] = torch.tensor(3e38)
    k[4] = torch.tensor(3e38)
    w[2] = torch.tensor([1.0, -1.0])[None]
    with (
        use_backend("torch_dense", debug_checks=True),
        pytest.raises(InvalidInputError, match="row 2 of batch item 0"),
    ):
        run_fused_qk_topk(None, q, k, w, 4)
