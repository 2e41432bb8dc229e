"""Teacher and loss of torch_dense against formulas over all keys, with one-hot matrices in place of gathers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_backends.torch_dense.attention_forward import attention_forward
from dsa_backends.torch_dense.indexer_loss import indexer_loss
from dsa_backends.torch_dense.indexer_target import indexer_target
from dsa_dispatch._call import RowLayout, StageOptions

SCALE = 0.37
EXACT = {"rtol": 1e-11, "atol": 1e-11}  # fp64: only the order of sums differs
OPTIONS = StageOptions()


def make(layout, heads=3, channels=4, qk=5, teacher_heads=2, seed=0):
    """``q, k, w, query, key`` in fp64."""
    generator = torch.Generator().manual_seed(seed)
    rows, keys = layout.batch * layout.rows, layout.batch * layout.keys
    shapes = (rows, heads, channels), (keys, channels), (rows, heads), (rows, teacher_heads, qk), (keys, qk)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def columns_of_slots(indices, length, keys):
    """One-hot ``[T, C, S]``: the key of each slot, all zero where the slot is no key."""
    used = (indices >= 0) & (indices < keys) & (torch.arange(indices.shape[1]) < length[:, None])
    one_hot = torch.nn.functional.one_hot(torch.where(used, indices, 0).long(), keys).double()
    return one_hot * used[..., None]


def columns_of_ranges(layout, starts, ends):
    rows, keys = starts.shape[0], layout.batch * layout.keys
    item = (layout.first_row + torch.arange(rows)) // layout.rows * layout.keys
    indices = item[:, None] + torch.arange(layout.keys)
    one_hot = torch.nn.functional.one_hot(indices, keys).double()
    return one_hot * ((indices >= starts[:, None]) & (indices < ends[:, None]))[..., None]


def softmax_over(scores, present):
    weights = torch.where(present, scores.masked_fill(~present, 0).exp(), 0)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)


def dense_mass(query, key, columns):
    scores = SCALE * torch.einsum("thd,sd,tcs->thc", query, key, columns)
    return softmax_over(scores, columns.sum(-1)[:, None].bool().expand_as(scores)).sum(1)


def dense_kl(q, k, w, columns, mass, use_relu):
    dots = torch.einsum("thd,sd,tcs->thc", q, k, columns)
    scores = torch.einsum("th,thc->tc", w, dots.relu() if use_relu else dots)
    present = columns.sum(-1).bool()
    target = mass / mass.sum(-1, keepdim=True).clamp_min(1e-10)
    log_p = torch.where(present, softmax_over(scores, present), 1).log()
    return (target * (target.clamp_min(1e-10).log() - log_p)).sum(-1)


@st.composite
def cases(draw):
    """A layout, ranges, slots (None for the dense form) and the columns that they make."""
    layout = RowLayout(
        draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 6)), bounds="ranges"
    )
    total, keys = layout.batch * layout.rows, layout.batch * layout.keys
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    item = torch.arange(layout.batch).repeat_interleave(layout.rows) * layout.keys
    low = torch.randint(0, layout.keys + 1, (total,), generator=generator)
    high = torch.maximum(low, torch.randint(0, layout.keys + 1, (total,), generator=generator))
    starts, ends = (item + low).int(), (item + high).int()
    if draw(st.booleans()):
        return layout, starts, ends, None, None, columns_of_ranges(layout, starts, ends)
    width = draw(st.integers(1, 7))
    indices = torch.randint(-2, keys + 2, (total, width), generator=generator, dtype=torch.int32)
    length = torch.randint(0, width + 1, (total,), generator=generator, dtype=torch.int32)
    return layout, starts, ends, indices, length, columns_of_slots(indices, length, keys)


def target_of(case, query, key, lse=None, options=OPTIONS):
    layout, starts, ends, indices, length, _ = case
    return indexer_target(
        query, key, indices=indices, length=length, starts=starts, ends=ends,
        lse=lse, scale=SCALE, rows=layout, options=options,
    )  # fmt: skip


def loss_of(case, q, k, w, mass, *, use_relu=True, need_dq=True, need_dw=True, dk=None, options=OPTIONS):
    layout, starts, ends, indices, length, _ = case
    return indexer_loss(
        q, k, w, indices=indices, length=length, starts=starts, ends=ends, mass=mass, rows=layout,
        use_relu=use_relu, need_dq=need_dq, need_dw=need_dw, dk=dk, options=options,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(case=cases(), deterministic=st.booleans())
def test_the_mass_is_the_softmax_summed_over_heads(case, deterministic):
    *_, query, key = make(case[0])
    options = StageOptions(deterministic=deterministic)
    want = dense_mass(query, key, case[5])
    got = target_of(case, query, key, options=options)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, **EXACT)
    present = case[5].sum(-1).bool()
    scores = SCALE * torch.einsum("thd,sd,tcs->thc", query, key, case[5])
    lse = scores.masked_fill(~present[:, None], -math.inf).logsumexp(-1)
    torch.testing.assert_close(target_of(case, query, key, lse, options), want, **EXACT)


@settings(max_examples=60, deadline=None)
@given(case=cases(), use_relu=st.booleans(), deterministic=st.booleans())
def test_loss_and_gradients_are_those_of_the_dense_formula(case, use_relu, deterministic):
    q, k, w, query, key = make(case[0])
    mass = dense_mass(query, key, case[5])
    dk = torch.full_like(k, 2.0)
    options = StageOptions(deterministic=deterministic)
    gaps = [torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0] for x in (q, k, w, mass)]
    kl, dq, dw = loss_of(case, *gaps, use_relu=use_relu, dk=dk, options=options)
    inputs = [tensor.requires_grad_() for tensor in (q, k, w)]
    want = dense_kl(*inputs, case[5], mass, use_relu)
    want_dq, want_dk, want_dw = torch.autograd.grad(want.sum(), inputs)
    for got, expected in ((kl, want), (dq, want_dq), (dk - 2, want_dk), (dw, want_dw)):
        torch.testing.assert_close(got, expected.detach(), **EXACT)


def two_forms(rows=6, keys=8):
    layout = RowLayout(1, rows, keys, bounds="ranges")
    starts = torch.tensor([0, 0, 3, 5, 2, 0], dtype=torch.int32)
    ends = torch.tensor([8, 5, 8, 5, 4, 1], dtype=torch.int32)
    slots = torch.arange(keys, dtype=torch.int32) + starts[:, None]
    dense = (layout, starts, ends, None, None, columns_of_ranges(layout, starts, ends))
    sparse = (layout, starts, ends, slots, ends - starts, columns_of_slots(slots, ends - starts, keys))
    return [pytest.param(dense, id="dense"), pytest.param(sparse, id="sparse")]


@pytest.mark.parametrize("case", two_forms())
def test_a_row_without_mass_and_a_row_without_keys_have_loss_and_gradients_zero(case):
    q, k, w, query, key = make(case[0])
    mass = dense_mass(query, key, case[5])
    mass[0] = 0
    kl, dq, dw = loss_of(case, q, k, w, mass, dk=torch.zeros_like(k))
    for tensor in (kl, dq, dw):
        assert (tensor[[0, 3]] == 0).all()
        assert tensor.isfinite().all()
    assert (kl[[1, 2, 4]] > 0).all()


@pytest.mark.parametrize("case", two_forms())
def test_the_derivative_of_the_relu_at_zero_is_zero(case):
    q, k, w, query, key = make(case[0])
    q.zero_()
    dk = torch.zeros_like(k)
    _, dq, dw = loss_of(case, q, k, w, dense_mass(query, key, case[5]), dk=dk)
    assert all((gradient == 0).all() for gradient in (dq, dk, dw))
    _, dq, _ = loss_of(case, q, k, w, dense_mass(query, key, case[5]), use_relu=False)
    assert (dq[1] != 0).all()


@pytest.mark.parametrize("case", two_forms())
def test_a_key_that_a_row_does_not_see_and_an_infinite_row_leave_the_others_alone(case):
    q, k, w, query, key = make(case[0])
    mass = dense_mass(query, key, case[5])
    dk = torch.zeros_like(k)
    clean = loss_of(case, q, k, w, mass, dk=dk)
    clean_mass = target_of(case, query, key)
    k[5], key[5] = torch.nan, torch.nan  # seen by rows 0 and 2 only
    q[5], query[5] = torch.inf, torch.inf  # sees key 0 only
    spoiled_dk = torch.zeros_like(k)
    spoiled = loss_of(case, q, k, w, mass, dk=spoiled_dk)
    rows = [1, 3, 4]
    torch.testing.assert_close(target_of(case, query, key)[rows], clean_mass[rows], **EXACT)
    for got, want in zip(spoiled, clean, strict=True):
        torch.testing.assert_close(got[rows], want[rows], **EXACT)
    assert spoiled_dk[3].isnan().any()  # by row 0, which sees the NaN and key 3
    layout, starts, _, slots, length, columns = case
    ends = torch.tensor([0, 5, 3, 5, 4, 1], dtype=torch.int32)  # now no row sees key 5
    blind = (layout, starts, ends, slots, None if length is None else ends - starts, columns)
    spoiled_dk.zero_()
    loss_of(blind, q, k, w, mass, dk=spoiled_dk)
    assert spoiled_dk[1:].isfinite().all()


@pytest.mark.parametrize("case", two_forms())
def test_an_unneeded_gradient_is_none_and_the_others_do_not_change(case):
    q, k, w, query, key = make(case[0])
    mass = dense_mass(query, key, case[5])
    dk = torch.zeros_like(k)
    whole = loss_of(case, q, k, w, mass, dk=dk)
    none = loss_of(case, q, k, w, mass, need_dq=False, need_dw=False)
    assert none.dq is None
    assert none.dw is None
    assert torch.equal(none.kl, whole.kl)
    assert torch.equal(loss_of(case, q, k, w, mass, need_dw=False).dq, whole.dq)
    assert torch.equal(loss_of(case, q, k, w, mass, need_dq=False).dw, whole.dw)
    alone = torch.zeros_like(k)
    loss_of(case, q, k, w, mass, need_dq=False, need_dw=False, dk=alone)
    assert torch.equal(alone, dk)


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_chunks_that_cross_batch_items_change_no_more_than_rounding(form):
    layout = RowLayout(3, 5, 7)
    row = torch.arange(5).repeat(3)
    starts = (torch.arange(3).repeat_interleave(5) * 7).int()
    ends = (starts + 3 + row).int()
    indices = length = None
    if form == "sparse":
        indices, length = starts[:, None] + torch.arange(7, dtype=torch.int32), ends - starts
    case = (layout, starts, ends, indices, length, columns_of_ranges(layout, starts, ends))
    q, k, w, query, key = make(layout)
    mass = target_of(case, query, key)
    dk = torch.zeros_like(k)
    whole = loss_of(case, q, k, w, mass, dk=dk)
    parts, part_dk = [], torch.zeros_like(k)
    for first in range(0, 15, 4):
        part = slice(first, first + 4)
        of_part = tuple(None if x is None else x[part] for x in (starts, ends, indices, length, case[5]))
        piece = (layout.at(first), *of_part)
        torch.testing.assert_close(target_of(piece, query[part], key), mass[part], **EXACT)
        parts.append(loss_of(piece, q[part], k, w[part], mass[part], dk=part_dk))
    for got, want in zip(zip(*parts, strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(got), want, **EXACT)
    torch.testing.assert_close(part_dk, dk, **EXACT)


@pytest.mark.parametrize("case", two_forms())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_inputs_are_summed_in_fp32(case, dtype):
    """Products of bf16 inputs are exact in fp32, so only fp32 sums err: far below a bf16 ulp of 4e-3."""
    inputs = [tensor.to(dtype) for tensor in make(case[0])]
    q, k, w, query, key = inputs
    before = [tensor.clone() for tensor in inputs]
    mass = target_of(case, query, key)
    exact_mass = dense_mass(query.double(), key.double(), case[5])
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), exact_mass, rtol=1e-5, atol=1e-5)
    dk = torch.zeros(k.shape)
    kl, dq, dw = loss_of(case, q, k, w.float(), mass, dk=dk)
    exact_dk = torch.zeros(k.shape, dtype=torch.float64)
    exact = loss_of(case, q.double(), k.double(), w.double(), exact_mass, dk=exact_dk)
    for got, want in zip((kl, dq, dw, dk), (*exact, exact_dk), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(old, new) for old, new in zip(before, inputs, strict=True))


def test_the_lse_of_the_attention_serves_the_teacher():
    case = two_forms()[1].values[0]
    layout, _, _, indices, length, _ = case
    *_, query, key = make(layout)
    _, lse = attention_forward(
        query, key, indices, length, scale=SCALE, v_channels=3, rows=layout, options=OPTIONS
    )
    torch.testing.assert_close(target_of(case, query, key, lse), target_of(case, query, key), **EXACT)
