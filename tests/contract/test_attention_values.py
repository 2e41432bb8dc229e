"""Absorbed and grouped-query attention against the dense fp64 formula, for every form that ids and layouts take."""

from __future__ import annotations

import math

import pytest
import torch
from contract import formulas, make

from dsa_dispatch import run_fused_absorbed_sparse_attention, run_fused_gqa_sparse_attention
from dsa_dispatch.testing import assert_backend_ran

SCALE = 0.31
EXACT = {"rtol": 1e-11, "atol": 1e-11}  # fp64: only the order of sums differs


class Absorbed:
    stages = ("attention_forward", "attention_backward")

    def __init__(self, rows=5, batch=1, keys=7, dtype=torch.float64):
        self.inputs = [
            make.normal(rows, batch, 3, 6, seed=1, dtype=dtype, grad=True),
            make.normal(keys, batch, 1, 6, seed=2, dtype=dtype, grad=True),
        ]
        self.out_shape = (rows, batch, 3, 4)

    def run(self, indices, length=None, **kwargs):
        return run_fused_absorbed_sparse_attention(None, *self.inputs, indices, SCALE, 4, length, **kwargs)

    def formula(self, counts):
        return formulas.absorbed(*self.inputs, counts, SCALE, 4)


class Grouped:
    stages = ("gqa_forward", "gqa_backward")

    def __init__(self, rows=5, batch=1, keys=7, dtype=torch.float64):
        self.inputs = [
            make.normal(rows, batch, 4, 6, seed=1, dtype=dtype, grad=True),
            make.normal(keys, batch, 2, 6, seed=2, dtype=dtype, grad=True),
            make.normal(keys, batch, 2, 3, seed=3, dtype=dtype, grad=True),
        ]
        self.out_shape = (rows, batch, 4, 3)

    def run(self, indices, length=None, **kwargs):
        return run_fused_gqa_sparse_attention(None, *self.inputs, indices, SCALE, length, **kwargs)

    def formula(self, counts):
        return formulas.grouped(*self.inputs, counts, SCALE)


BOTH = pytest.mark.parametrize("attention", [Absorbed, Grouped])


def check(case, indices, length=None):
    """Output, lse and every gradient equal the formula's, and the reference ran both stages."""
    keys = case.inputs[1].shape[0]
    with assert_backend_ran("torch_dense", *case.stages):
        out, lse = case.run(indices, length, return_lse=True)
        dout = make.normal(*out.shape, seed=9, dtype=out.dtype)
        gradients = torch.autograd.grad(out, case.inputs, dout)
    wanted, wanted_lse = case.formula(formulas.naming_counts(indices, length, keys))
    wanted_gradients = torch.autograd.grad(wanted, case.inputs, dout.double(), allow_unused=True)
    torch.testing.assert_close(out, wanted, **EXACT)
    torch.testing.assert_close(lse, wanted_lse, **EXACT)
    for got, want in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(got, want, **EXACT)
    return out, lse, gradients


@BOTH
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_holes_and_duplicates_count_as_the_formula_says(attention, batch, dtype):
    check(attention(batch=batch), make.ids(batch, 5, 11, 7, dtype=dtype))


@BOTH
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_slot_at_or_past_the_length_is_no_key_and_the_length_is_clamped(attention, batch, dtype):
    length = torch.tensor([-3, 0, 2, 11, 900]).expand(batch, 5).to(dtype)
    check(attention(batch=batch), make.ids(batch, 5, 11, 7, seed=4), length)


@BOTH
@pytest.mark.parametrize("batch", [1, 2])
def test_an_id_outside_the_keys_is_no_key_before_any_cast(attention, batch):
    indices = make.ids(batch, 5, 6, 7, seed=5, dtype=torch.int64)
    indices[:, 0] = torch.tensor([2**32 + 3, 3, -(2**33), 2**31, 2**63 - 1, -(2**63)])
    indices[:, 1, :2] = torch.tensor([2**32, 2**32 - 1])
    check(attention(batch=batch), indices)


@BOTH
def test_an_id_outside_the_keys_is_no_key_in_int32(attention):
    indices = make.ids(1, 5, 6, 7, seed=5)
    indices[0, 0] = torch.tensor([7, 3, 2**31 - 1, -(2**31), -1, 8], dtype=torch.int32)
    check(attention(), indices)


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_id_that_would_lie_in_the_next_batch_item_is_no_key(attention, dtype):
    indices = make.ids(2, 5, 6, 7, seed=6, dtype=dtype)
    indices[0, :, 1], indices[1, :, 2] = 9, -4  # key 2 of item 1 and key 3 of item 0, were they only added up
    check(attention(batch=2), indices)


@BOTH
@pytest.mark.parametrize("batch", [1, 2])
def test_a_row_without_a_key_gives_zero_and_minus_infinity_and_no_gradient(attention, batch):
    indices = make.ids(batch, 5, 4, 7, seed=7)
    indices[:, 1], indices[:, 3] = -1, 7
    length = torch.full((batch, 5), 4)
    length[:, 4] = 0
    out, lse, gradients = check(attention(batch=batch), indices, length)
    for row in (1, 3, 4):
        assert not out[row].any()
        assert (lse[:, row] == -math.inf).all()
        assert not gradients[0][row].any()


@BOTH
@pytest.mark.parametrize(
    ("rows", "batch", "keys", "width"), [(0, 2, 7, 3), (5, 0, 7, 3), (5, 2, 0, 3), (5, 2, 7, 0)]
)
def test_sizes_of_zero_are_legal_and_counted(attention, rows, batch, keys, width):
    case = attention(rows, batch, keys)
    with assert_backend_ran("torch_dense", *case.stages):
        out, lse = case.run(make.ids(batch, rows, width, keys), return_lse=True)
        gradients = torch.autograd.grad(out.sum(), case.inputs)
    assert out.shape == case.out_shape
    assert not out.any()
    assert lse.shape == (batch, rows, out.shape[2])
    assert (lse == -math.inf).all()
    for gradient, tensor in zip(gradients, case.inputs, strict=True):
        assert gradient.shape == tensor.shape
        assert gradient.dtype == tensor.dtype
        assert not gradient.any()


@BOTH
def test_the_lse_is_the_natural_logarithm_of_the_scaled_scores(attention):
    case = attention(rows=1, keys=2)
    with torch.no_grad():
        case.inputs[0].zero_()  # every score is 0, so two keys give log 2: 0.693 and not 1.0 (base 2)
    _, lse = case.run(torch.tensor([[[0, 1]]], dtype=torch.int32), return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(2)), **EXACT)


@BOTH
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("query_chunk", ["off", 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_types_shapes_and_memory_layout_of_what_is_returned(attention, batch, dtype, query_chunk):
    case = attention(batch=batch, dtype=dtype)
    indices = make.ids(batch, 5, 4, 7)
    from dsa_dispatch import use_backend

    with use_backend("torch_dense", query_chunk=query_chunk):
        out, lse = case.run(indices, return_lse=True)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, case.out_shape, True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (lse.dtype, lse.shape, lse.is_contiguous()) == (wide, (batch, 5, out.shape[2]), True)
    assert out.requires_grad
    assert not lse.requires_grad
    for gradient, tensor in zip(torch.autograd.grad(out.sum(), case.inputs), case.inputs, strict=True):
        assert (gradient.dtype, gradient.shape) == (tensor.dtype, tensor.shape)


@BOTH
def test_without_return_lse_the_output_alone_is_returned(attention):
    case = attention()
    indices = make.ids(1, 5, 4, 7)
    alone = case.run(indices)
    out, _ = case.run(indices, return_lse=True)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, out)


def test_the_value_may_be_the_whole_key_or_one_channel_of_it():
    for v_channels in (1, 6):
        case = Absorbed()
        indices = make.ids(1, 5, 4, 7)
        got = run_fused_absorbed_sparse_attention(None, *case.inputs, indices, SCALE, v_channels)
        counts = formulas.naming_counts(indices, None, 7)
        wanted, _ = formulas.absorbed(*case.inputs, counts, SCALE, v_channels)
        torch.testing.assert_close(got, wanted, **EXACT)
