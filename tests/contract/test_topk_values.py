"""The selection against a pure Python oracle: bounds, sizes, ties, and the form of what is returned."""

from __future__ import annotations

import math

import pytest
import torch
from contract import formulas, make

from dsa_dispatch import run_fused_qk_topk
from dsa_dispatch.testing import assert_backend_ran


def check(q, k, weights, topk, starts=None, ends=None, use_relu=True, **kwargs):
    """Exactly the oracle's sets, valid slots first, then -1."""
    with assert_backend_ran("torch_dense", "indexer_topk"):
        indices, length = run_fused_qk_topk(
            None, q, k, weights, topk, starts, ends, use_relu=use_relu, **kwargs
        )
    rows, batch = q.shape[:2]
    mask = formulas.bounds_mask(starts, ends, rows, batch, k.shape[0])
    scores = formulas.index_scores(q, k, weights, use_relu)
    wanted = formulas.chosen_mask(scores, mask, topk)
    formulas.check_form(indices, length, batch, rows, topk)
    for item in range(batch):
        for row in range(rows):
            used = int(length[item, row])
            assert set(indices[item, row, :used].tolist()) == set(
                wanted[item, row].nonzero()[:, 0].tolist()
            ), (item, row)
    return indices, length


def inputs(rows, batch, keys, heads=2, channels=3, seed=0, dtype=torch.float64):
    return (
        make.normal(rows, batch, heads, channels, seed=seed, dtype=dtype),
        make.normal(keys, batch, channels, seed=seed + 1, dtype=dtype),
        make.normal(rows, batch, heads, seed=seed + 2, dtype=dtype),
    )


@pytest.mark.parametrize("use_relu", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("rows", "keys"), [(4, 9), (6, 6), (9, 4), (1, 1)])
def test_without_bounds_rows_are_causal_aligned_to_the_bottom_right(rows, keys, batch, use_relu):
    _, length = check(*inputs(rows, batch, keys), 3, use_relu=use_relu)
    seen = [min(3, max(0, keys - rows + row + 1)) for row in range(rows)]
    assert length.tolist() == [seen] * batch


@pytest.mark.parametrize("use_relu", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("per_item", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_bounds_are_half_open_clamped_and_may_be_empty(batch, per_item, dtype, use_relu):
    starts = torch.tensor([0, 2, -5, 4, 6, 3, 50], dtype=dtype)
    ends = torch.tensor([9, 5, 3, 4, 2, 99, 60], dtype=dtype)
    if per_item:
        shift = torch.arange(batch, dtype=dtype)[:, None]
        starts, ends = starts + shift, ends - shift
    check(*inputs(7, batch, 9), 4, starts, ends, use_relu)


def test_64_bit_bounds_are_clamped_before_any_cast():
    starts = torch.tensor([2**32 + 1, -(2**33), 0])
    ends = torch.tensor([2**32 + 4, 2**40, 2**32])
    _, length = check(*inputs(3, 1, 5), 3, starts, ends)
    assert length.tolist() == [[0, 3, 3]]


@pytest.mark.parametrize("topk", [5, 6, 40])
@pytest.mark.parametrize("batch", [1, 2])
def test_more_is_asked_than_there_are_keys(topk, batch):
    _, length = check(*inputs(5, batch, 5), topk)
    assert length.tolist() == [[1, 2, 3, 4, 5]] * batch


@pytest.mark.parametrize(("rows", "batch", "keys"), [(0, 2, 5), (4, 0, 5), (4, 2, 0)])
def test_sizes_of_zero_are_legal_and_counted(rows, batch, keys):
    _, length = check(*inputs(rows, batch, keys), 3)
    assert not length.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 2])
def test_ties_go_to_the_lower_key(dtype, batch):
    q, k, w = inputs(6, batch, 12)
    q, k, w = ((tensor > 0).to(dtype) for tensor in (q, k, w))  # every product and sum is exact
    check(q, k, w, 4)


def test_negative_zero_equals_positive_zero():
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([-0.0, 0.0, -0.0, -1.0], dtype=torch.float64).view(4, 1, 1)
    weights = torch.ones(1, 1, 1, dtype=torch.float64)
    indices, _ = check(q, k, weights, 2, use_relu=False)
    assert set(indices.flatten().tolist()) == {0, 1}


def test_a_score_of_minus_infinity_comes_last_and_is_still_chosen():
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([-math.inf, 1.0, -math.inf, -1e300], dtype=torch.float64).view(4, 1, 1)
    weights = torch.ones(1, 1, 1, dtype=torch.float64)
    for topk, wanted in ((2, {1, 3}), (3, {0, 1, 3}), (4, {0, 1, 2, 3})):
        indices, _ = check(q, k, weights, topk, use_relu=False)
        assert set(indices.flatten().tolist()) == wanted


def test_every_key_stored_twice_is_chosen_lower_twin_first():
    q, k, w = inputs(6, 2, 20, dtype=torch.float32)
    twins = torch.cat([k, k])
    last = torch.full((6,), 40)
    indices, length = run_fused_qk_topk(None, q, twins, w, 7, torch.zeros_like(last), last)
    for row, used in zip(indices.flatten(0, 1).tolist(), length.flatten().tolist(), strict=True):
        assert used == 7
        assert all(key - 20 in row for key in row if key >= 20)


def test_no_rejected_key_scores_above_a_chosen_one_by_more_than_the_declared_error():
    from dsa_backends.torch_dense.spec import SPEC

    q, k, w = inputs(8, 2, 60, heads=4, channels=16, dtype=torch.bfloat16)
    indices, length = run_fused_qk_topk(None, q, k, w, 9)
    scores = formulas.index_scores(q, k, w, True)
    magnitude = formulas.index_scores(q.abs(), k.abs(), w.abs(), True)
    mask = formulas.bounds_mask(None, None, 8, 2, 60)
    error = SPEC.stages["indexer_topk"].capability.score_error
    for item in range(2):
        for row in range(8):
            chosen = indices[item, row, : int(length[item, row])].long()
            rejected = mask[item, row].clone()
            rejected[chosen] = False
            slack = 2 * error * magnitude[item, row].max()
            assert scores[item, row][rejected].max() <= scores[item, row][chosen].min() + slack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weights_may_have_another_type_than_q(dtype):
    q, k, w = inputs(6, 1, 12, dtype=torch.float32)
    small = [(tensor > 0).float() for tensor in (q, k)]
    check(*small, (w > 0).to(dtype), 4)


def test_arguments_that_describe_the_layout_never_change_a_result():
    q, k, w = inputs(6, 1, 9)
    starts, ends = torch.zeros(6, dtype=torch.int32), torch.arange(4, 10, dtype=torch.int32)
    plain = run_fused_qk_topk(None, q, k, w, 4, starts, ends)
    described = run_fused_qk_topk(
        None, q, k, w, 4, starts, ends, block_size=2, use_local_indexer_varlen=True,
        single_packed_thd_sequence=True, local_packed_cp_rank=1, local_packed_cp_query_start=3,
        local_packed_cp_query_len=12, packed_seq_params=object(), cp_size=2,
    )  # fmt: skip
    assert torch.equal(plain.indices, described.indices)
    assert torch.equal(plain.length, described.length)


def test_the_result_is_named():
    result = run_fused_qk_topk(None, *inputs(3, 1, 5), 2)
    assert result._fields == ("indices", "length")
