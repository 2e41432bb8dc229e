"""The four attention stages of torch_dense against dense formulas that count how often a row names a key.

Absorbed attention is run as what it is: one key/value head whose value is a prefix of the key.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_backends.torch_dense.attention_backward import attention_backward
from dsa_backends.torch_dense.attention_forward import attention_forward
from dsa_backends.torch_dense.gqa import gqa_backward, gqa_forward
from dsa_dispatch._call import RowLayout, StageOptions

SCALE = 0.37
EXACT = {"rtol": 1e-11, "atol": 1e-11}  # fp64: only the order of sums differs


def naming_counts(indices, length, keys):
    """``[T, S]``: how often each row names each key in a slot that counts."""
    used = (indices >= 0) & (indices < keys) & (torch.arange(indices.shape[1]) < length[:, None])
    counts = torch.zeros(indices.shape[0], keys + 1, dtype=torch.float64)
    counts.scatter_add_(1, torch.where(used, indices, keys).long(), used.double())
    return counts[:, :keys]


def dense_attention(q, k, v, counts):
    """Softmax over all keys, weighted by their counts: ``q [T, H, D]``, ``k [S, Hkv, D]``, ``v [S, Hkv, Dv]``."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = SCALE * torch.einsum("thd,shd->ths", q, k)
    named = counts[:, None] > 0
    shift = scores.detach().masked_fill(~named, -math.inf).amax(-1, keepdim=True).clamp_min(-1e300)
    weights = counts[:, None] * torch.where(named, scores - shift, 0).exp()
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("ths,shv->thv", weights / total.clamp_min(1e-300), v)
    return out, (total.log() + shift)[..., 0]


class Absorbed:
    """The absorbed stages with the dense formula's arguments."""

    def __init__(self, keys=9, channels=6, v_channels=4, heads=3, dtype=torch.float64, seed=0, rows=5):
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(rows, heads, channels, generator=generator, dtype=torch.float64).to(dtype)
        self.keys = [torch.randn(keys, channels, generator=generator, dtype=torch.float64).to(dtype)]
        self.dout = torch.randn(rows, heads, v_channels, generator=generator, dtype=torch.float64).to(dtype)
        self.v_channels = v_channels

    def dense_views(self, q, keys):
        return q, keys[0][:, None], keys[0][:, None, : self.v_channels]

    def forward(self, rows, indices, length, options, layout):
        return attention_forward(
            self.q[rows], *self.keys, indices, length,
            scale=SCALE, v_channels=self.v_channels, rows=layout, options=options,
        )  # fmt: skip

    def backward(self, rows, indices, length, out, lse, grads, options, layout, need_dq=True):
        return attention_backward(
            self.q[rows], *self.keys, indices, length, out, lse, self.dout[rows],
            scale=SCALE, v_channels=self.v_channels, need_dq=need_dq, dkv=grads[0], rows=layout, options=options,
        )  # fmt: skip


class Grouped(Absorbed):
    """The grouped-query stages: two query heads to each of two key/value heads."""

    def __init__(self, keys=9, channels=6, v_channels=4, dtype=torch.float64, seed=0, rows=5):
        super().__init__(keys, channels, v_channels, 4, dtype, seed, rows)
        generator = torch.Generator().manual_seed(seed + 1)
        self.keys = [
            torch.randn(keys, 2, size, generator=generator, dtype=torch.float64).to(dtype)
            for size in (channels, v_channels)
        ]

    def dense_views(self, q, keys):
        return q, *keys

    def forward(self, rows, indices, length, options, layout):
        return gqa_forward(
            self.q[rows], *self.keys, indices, length, scale=SCALE, rows=layout, options=options
        )

    def backward(self, rows, indices, length, out, lse, grads, options, layout, need_dq=True):
        return gqa_backward(
            self.q[rows], *self.keys, indices, length, out, lse, self.dout[rows],
            scale=SCALE, need_dq=need_dq, dk=grads[0], dv=grads[1], rows=layout, options=options,
        )  # fmt: skip


KINDS = pytest.mark.parametrize("kind", [Absorbed, Grouped])
EVERY_ROW = slice(None)


def layout_of(case, count=None):
    return RowLayout(1, count or case.q.shape[0], case.keys[0].shape[0])


def accumulators(case):
    acc = torch.float64 if case.q.dtype == torch.float64 else torch.float32
    return [torch.zeros(key.shape, dtype=acc) for key in case.keys]


def run(case, indices, length, deterministic=False, chunk=None):
    """``out, lse, dq, key gradients``, in chunks of rows."""
    options, count = StageOptions(deterministic=deterministic), case.q.shape[0]
    grads, results = accumulators(case), []
    for first in range(0, count, chunk or count):
        part = slice(first, min(count, first + (chunk or count)))
        layout = layout_of(case).at(first)
        out, lse = case.forward(part, indices[part], length[part], options, layout)
        dq = case.backward(part, indices[part], length[part], out, lse, grads, options, layout)
        results.append((out, lse, dq))
    return *(torch.cat(parts) for parts in zip(*results, strict=True)), *grads


def run_dense(case, indices, length):
    q = case.q.double().requires_grad_()
    keys = [key.double().requires_grad_() for key in case.keys]
    out, lse = dense_attention(
        *case.dense_views(q, keys), naming_counts(indices, length, case.keys[0].shape[0])
    )
    grads = torch.autograd.grad(out, (q, *keys), case.dout.double())
    return out.detach(), lse.detach(), *grads


def with_gaps(tensor):
    """The same values, strided in the first dimension, with NaN between."""
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], 1)[:, 0]


def random_ids(rows, width, keys, seed=0):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, keys, (rows, width), generator=generator, dtype=torch.int32)
    return indices, torch.full((rows,), width, dtype=torch.int32)


@KINDS
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_ids_give_the_dense_result_and_its_gradients(kind, data):
    rows, width, keys = (
        data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 8))
    )  # fmt: skip
    case = kind(keys, channels=data.draw(st.integers(4, 6)), rows=rows, seed=data.draw(st.integers(0, 999)))
    case.q, case.dout, *case.keys = (with_gaps(x) for x in (case.q, case.dout, *case.keys))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    ids = torch.randint(-3, keys + 3, (rows, 2, width), generator=generator, dtype=torch.int32)
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = 2**31 - 1
    indices = ids[:, 1]
    length = torch.randint(0, width + 1, (rows,), generator=generator, dtype=torch.int32)
    expected = run_dense(case, indices, length)
    for deterministic in (False, True):
        for got, want in zip(run(case, indices, length, deterministic), expected, strict=True):
            torch.testing.assert_close(got, want, **EXACT)


@KINDS
def test_rows_without_a_key_are_zero_with_an_lse_of_minus_infinity(kind):
    case = kind(rows=4)
    indices = torch.tensor([[-1, 9], [3, 4], [-7, 1 << 30], [-1, -1]], dtype=torch.int32)
    length = torch.tensor([2, 0, 2, 1], dtype=torch.int32)
    out, lse, *grads = run(case, indices, length)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert all((grad == 0).all() for grad in grads)


@KINDS
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_no_slot_names_may_hold_nan_and_what_it_names_gets_nothing_from_infinite_rows(
    kind, deterministic
):
    case = kind(keys=9, rows=4)
    indices = torch.tensor([[1, -1, 3, 0], [2, 9, 2, 5], [-1, 4, 4, 0], [-1, -1, 6, 7]], dtype=torch.int32)
    length = torch.tensor([3, 3, 3, 3], dtype=torch.int32)  # keys 0 and 5 stand only where no slot counts
    expected = run(case, indices, length, deterministic)
    for key in case.keys:
        key[[0, 5, 8]] = torch.nan
    for got, want in zip(run(case, indices, length, deterministic), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    case.q[3], case.dout[3] = torch.inf, torch.inf
    out, lse, dq, *grads = run(case, indices, length, deterministic)
    for got, want in zip((out, lse, dq), expected, strict=False):
        torch.testing.assert_close(got[:3], want[:3], rtol=0, atol=0)
    for got, want in zip(grads, expected[3:], strict=True):
        others = [0, 1, 2, 3, 4, 5, 8]
        torch.testing.assert_close(got[others], want[others], rtol=0, atol=0)


@KINDS
def test_an_unneeded_gradient_is_none_and_the_others_do_not_change(kind):
    case = kind()
    indices, length = random_ids(5, 7, 9)
    options, layout = StageOptions(), layout_of(case)
    out, lse, dq, *grads = run(case, indices, length)
    arguments = (EVERY_ROW, indices, length, out, lse)
    none = [None] * len(grads)
    assert case.backward(*arguments, none, options, layout, need_dq=False) is None
    assert torch.equal(case.backward(*arguments, none, options, layout), dq)
    for wanted in range(len(grads)):
        alone = accumulators(case)
        some = [alone[i] if i == wanted else None for i in range(len(grads))]
        assert case.backward(*arguments, some, options, layout, need_dq=False) is None
        assert torch.equal(alone[wanted], grads[wanted])


@KINDS
def test_key_gradients_are_added_to_what_is_there(kind):
    case = kind()
    indices, length = random_ids(5, 7, 9)
    out, lse, _, *grads = run(case, indices, length)
    filled = [torch.full_like(grad, 3.0) for grad in grads]
    case.backward(EVERY_ROW, indices, length, out, lse, filled, StageOptions(), layout_of(case))
    for got, want in zip(filled, grads, strict=True):
        torch.testing.assert_close(got, want + 3.0, **EXACT)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_bits_do_not_depend_on_chunk_or_rows_beside_or_batch(kind, dtype):
    case = kind(keys=60, channels=40, v_channels=24, rows=23, dtype=dtype)
    indices, length = random_ids(23, 33, 60)
    length[::3] = 19
    whole = run(case, indices, length, deterministic=True)
    for chunk in (1, 4, 22):
        for got, want in zip(run(case, indices, length, True, chunk), whole, strict=True):
            assert torch.equal(got, want)
    second = kind(keys=60, channels=40, v_channels=24, rows=23, dtype=dtype, seed=5)
    second.q, second.dout = torch.cat([second.q, case.q]), torch.cat([second.dout, case.dout])
    second.keys = [torch.cat(pair) for pair in zip(second.keys, case.keys, strict=True)]
    together = run(
        second, torch.cat([indices, indices + 60]), torch.cat([length, length]), deterministic=True
    )
    for got, want in zip(together, whole, strict=True):
        assert torch.equal(got[-want.shape[0] :], want)


@KINDS
def test_without_determinism_chunks_change_no_more_than_rounding(kind):
    case = kind(keys=300, channels=48, v_channels=32, rows=40, dtype=torch.float32)
    indices, length = random_ids(40, 70, 300)
    whole = run(case, indices, length)
    for got, want in zip(run(case, indices, length, chunk=7), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * float(want.abs().max()))


@KINDS
@pytest.mark.parametrize("magnitude", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_stay_within_the_contract(kind, dtype, magnitude):
    """bf16: out 4e-3, gradients 6e-3 (relative Frobenius), lse 1e-4; rounding to bf16 alone is about 2e-3."""
    if dtype == torch.float16 and magnitude > 1:
        magnitude = 4.0  # gradients beyond 65504 do not exist in fp16
    case = kind(keys=64, channels=72, v_channels=64, rows=30, dtype=dtype)
    case.q.mul_(magnitude / 8)
    for key in case.keys:
        key.mul_(magnitude)
    indices, length = random_ids(30, 48, 64)
    length[:4] = torch.tensor([0, 1, 2, 47])
    out, lse, *grads = run(case, indices, length)
    want_out, want_lse, *want_grads = run_dense(case, indices, length)
    assert out.dtype == grads[0].dtype == dtype
    assert lse.dtype == grads[1].dtype == torch.float32
    out_bound, grad_bound = (4e-3, 6e-3) if dtype != torch.float32 else (2e-5, 2e-4)
    # fp32 rounds a score to 2**-24 of its size, which large activations make large.
    has_key = length > 0
    error = (lse - want_lse)[has_key].abs()
    assert float(error.max()) < max(1e-4, 2**-20 * float(want_lse[has_key].abs().max()))
    assert relative_error(out, want_out) < out_bound
    for got, want in zip(grads, want_grads, strict=True):
        assert relative_error(got, want) < grad_bound


def relative_error(got, want):
    return float((got.double() - want).norm() / want.norm())


@KINDS
def test_many_rows_on_one_key_sum_in_full_precision(kind):
    """4096 contributions to one key: summed in bf16 they would stop growing after 256."""
    case = kind(keys=3, rows=4096, dtype=torch.bfloat16)
    indices = torch.tensor([[1, 2]], dtype=torch.int32).repeat(4096, 1)
    length = torch.full((4096,), 2, dtype=torch.int32)
    *_, got = run(case, indices, length)
    *_, want = run_dense(case, indices, length)
    assert relative_error(got, want) < 6e-3


@KINDS
def test_inputs_stay_as_they_are(kind):
    case = kind()
    indices, length = random_ids(5, 7, 9)
    inputs = [case.q, *case.keys, case.dout, indices, length]
    before = [tensor.clone() for tensor in inputs]
    run(case, indices, length)
    assert all(torch.equal(old, new) for old, new in zip(before, inputs, strict=True))
