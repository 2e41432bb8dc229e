"""Shapes and values that broke published kernels, small, under the interpreter; in full size they are in tests/gpu."""

from __future__ import annotations

import pytest
import torch
from oracle import attention, attention_gradients, relative

import dsa_dispatch as dsa
from dsa_backends.triton_kernels.attention_backward import attention_backward
from dsa_backends.triton_kernels.attention_forward import attention_forward
from dsa_backends.triton_kernels.indexer_loss import indexer_loss
from dsa_backends.triton_kernels.indexer_target import indexer_target
from dsa_backends.triton_kernels.indexer_topk import indexer_topk
from dsa_dispatch._call import RowLayout, StageOptions
from dsa_dispatch.testing import assert_backend_ran, isolated_registry

FP32 = 1e-5
"""Sums of a few hundred products in fp32, in another order than the formula's."""


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both_ways(q, kv, indices, length, scale, dv, deterministic=False):
    """``out, lse, dq, dkv`` of the kernels, for a gradient of normal numbers."""
    options = StageOptions(deterministic=deterministic)
    layout = RowLayout(1, len(q), len(kv), bounds="ranges")
    out, lse = attention_forward(
        q, kv, indices, length, scale=scale, v_channels=dv, rows=layout, options=options
    )
    dout = draw(*out.shape, seed=9, dtype=q.dtype)
    dkv = torch.zeros(kv.shape)
    dq = attention_backward(
        q, kv, indices, length, out, lse, dout, scale=scale, v_channels=dv, need_dq=True, dkv=dkv, rows=layout,
        options=options,
    )  # fmt: skip
    return out, lse, dq, dkv, dout


def agree(q, kv, indices, length, scale, dv, limit=FP32, cancelled=False, **options):
    out, lse, dq, dkv, dout = both_ways(q, kv, indices, length, scale, dv, **options)
    want_out, want_lse = attention(q, kv, indices, length, scale, dv)
    want_dq, want_dkv = attention_gradients(q, kv, indices, length, dout, scale, dv)
    finite = want_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    # Scores of hundreds carry the rounding of their size.
    room = 1e-4 + 2.0**-22 * float(want_lse[finite].abs().max())
    assert float((lse.double() - want_lse)[finite].abs().max()) < room
    pairs = [(out, want_out), (dkv, want_dkv)]
    if not cancelled:
        pairs.append((dq, want_dq))
    for got, want in pairs:
        assert relative(got, want) < limit
    assert dq.isfinite().all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_slots_than_keys_with_holes_between(deterministic):
    make = torch.Generator().manual_seed(1)
    indices = torch.randint(
        -3, 15, (5, 70), generator=make
    ).int()  # 12 keys: some ids are below and above them
    length = torch.tensor([70, 69, 1, 0, 33], dtype=torch.int32)
    agree(draw(5, 3, 32), draw(12, 32, seed=1), indices, length, 0.2, 16, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_key_chosen_by_every_row(deterministic):
    rows = 40
    indices = torch.full((rows, 20), -1, dtype=torch.int32)
    indices[:, 0] = 5
    indices[:, 17] = torch.arange(rows) % 40
    length = torch.full((rows,), 20, dtype=torch.int32)
    agree(draw(rows, 2, 32), draw(40, 32, seed=1), indices, length, 0.2, 16, deterministic=deterministic)


@pytest.mark.parametrize("gains", [(30.0, 1.0), (1.0, 30.0), (30.0, 30.0)])
def test_activations_thirty_times_as_large(gains):
    indices = torch.stack(
        [torch.randperm(40, generator=torch.Generator().manual_seed(i))[:24] for i in range(4)]
    )
    length = torch.full((4,), 24, dtype=torch.int32)
    q, kv = draw(4, 3, 80) * gains[0], draw(40, 80, seed=1) * gains[1]
    # A softmax of scores of some thousands turns their rounding, 2**-24 of their size, into its own relative error.
    limit = FP32 + 2.0**-22 * float((q.double().flatten(0, 1) @ kv.double().T).abs().max()) * 80**-0.5
    # Where one key takes the whole softmax, dq is what is left of terms that cancel: it has no relative precision.
    agree(q, kv, indices.int(), length, 80**-0.5, 64, limit=limit, cancelled=gains == (30.0, 30.0))


def test_an_id_of_two_to_the_32_and_three_is_no_key_and_not_key_three():
    query, key = draw(4, 1, 3, 80), draw(20, 1, 1, 80, seed=1)
    ids = torch.randint(0, 20, (1, 4, 9), generator=torch.Generator().manual_seed(2))
    ids[0, 0, 4], ids[0, 1, :] = 2**32 + 3, 2**32 + 3
    ids[0, 2, 5], ids[0, 3, 0] = -(2**32) + 3, 2**31
    plain = torch.where((ids < 0) | (ids >= 20), -1, ids).int()
    with isolated_registry(installed=True), dsa.use_backend("triton", fallback="error"):
        results = []
        for indices in (ids, plain):
            leaves = query.clone().requires_grad_(), key.clone().requires_grad_()
            with assert_backend_ran("triton", "attention_forward", "attention_backward"):
                out, lse = dsa.run_fused_absorbed_sparse_attention(
                    None, *leaves, indices, 0.2, 64, return_lse=True
                )
                results.append((out, lse, *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert results[0][1][0, 1].isneginf().all()


STRIDE = 2**28
ROWS = 10


@pytest.fixture(scope="module")
def far():
    """Memory in which row 8 begins 2**31 elements behind row 0; what lies between is never touched."""
    return torch.empty((ROWS - 1) * STRIDE + 256, dtype=torch.float16)


def far_rows(buffer, *shape, seed):
    flat = buffer.as_strided((ROWS, shape[-1] if len(shape) == 1 else shape[0] * shape[1]), (STRIDE, 1))
    rows = flat if len(shape) == 1 else flat.unflatten(1, shape)
    return rows.copy_(draw(ROWS, *shape, seed=seed, dtype=torch.float16))


# fp16 keeps 11 bits, through three products.
FP16 = 6e-3


def test_keys_whose_row_times_stride_passes_two_to_the_31st(far):
    kv = far_rows(far, 32, seed=1)
    indices = torch.tensor([[9, 5, 8], [8, 9, -1]], dtype=torch.int32)
    length = torch.full((2,), 3, dtype=torch.int32)
    agree(draw(2, 2, 32, dtype=torch.float16), kv, indices, length, 0.2, 16, limit=FP16)


def test_queries_whose_row_times_stride_passes_two_to_the_31st(far):
    q = far_rows(far, 2, 32, seed=2)
    kv = draw(20, 32, dtype=torch.float16)
    indices = torch.randint(0, 20, (ROWS, 6), generator=torch.Generator().manual_seed(1)).int()
    agree(q, kv, indices, torch.full((ROWS,), 6, dtype=torch.int32), 0.2, 16, limit=FP16)


def indexer_results(q, k, w, query, key):
    starts = torch.zeros(len(q), dtype=torch.int32)
    layout = RowLayout(1, len(q), len(k), bounds="ranges")
    bounds = {"starts": starts, "ends": starts + len(k), "rows": layout, "options": StageOptions()}
    ids, length = indexer_topk(q, k, w, topk=7, use_relu=True, **bounds)
    slots = {"indices": ids, "length": length}
    mass = indexer_target(query, key, lse=None, scale=0.2, **slots, **bounds)
    dk = torch.zeros(k.shape)
    terms = indexer_loss(
        q, k, w, mass=mass, use_relu=True, need_dq=True, need_dw=True, dk=dk, **slots, **bounds
    )
    return ids, length, mass, *terms, dk


@pytest.mark.parametrize("what", ["q", "k", "query", "key"])
def test_indexer_operands_whose_row_times_stride_passes_two_to_the_31st(far, what):
    shapes = {"q": (3, 64), "k": (64,), "query": (2, 32), "key": (32,)}
    near = {name: draw(ROWS, *shape, seed=3, dtype=torch.float16) for name, shape in shapes.items()}
    w = draw(ROWS, 3, seed=1)
    spread = {**near, what: far_rows(far, *shapes[what], seed=3)}
    got, want = (indexer_results(w=w, **operands) for operands in (spread, near))
    # The same kernels on the same numbers; dk is added up by atomics, in one order under the interpreter.
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert want[-1][9].abs().max() > 0


@pytest.mark.parametrize("heads", [1, 4, 8, 24, 48, 96, 128])
def test_every_head_count_of_the_indexer_selects_and_learns(heads):
    q = torch.randint(-2, 3, (3, heads, 64), generator=torch.Generator().manual_seed(1)).half()
    k = torch.randint(-2, 3, (50, 64), generator=torch.Generator().manual_seed(2)).half()
    w = torch.randint(-2, 3, (3, heads), generator=torch.Generator().manual_seed(3)).float()
    starts = torch.zeros(3, dtype=torch.int32)
    bounds = {"starts": starts, "ends": starts + 50, "rows": RowLayout(1, 3, 50, bounds="ranges"),
              "options": StageOptions()}  # fmt: skip
    ids, length = indexer_topk(q, k, w, topk=17, use_relu=True, **bounds)
    # Small integers: exact in fp16 and fp32, so that the formula has the same ties.
    scores = torch.einsum("th,thj->tj", w, torch.einsum("thd,jd->thj", q.float(), k.float()).relu())
    want = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :17].sort(1).values
    assert torch.equal(ids.sort(1).values.long(), want)
    mass = torch.rand(3, 17, generator=torch.Generator().manual_seed(4))
    dk = torch.zeros(50, 64)
    small = w * 0.01
    terms = indexer_loss(
        q,
        k,
        small,
        mass=mass,
        indices=ids,
        length=length,
        use_relu=True,
        need_dq=True,
        need_dw=True,
        dk=dk,
        **bounds,
    )
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, small)]
    scores = torch.einsum(
        "th,thj->tj", leaves[2], torch.einsum("thd,tjd->thj", leaves[0], leaves[1][ids.long()]).relu()
    )
    target = (mass / mass.sum(1, keepdim=True)).double()
    loss = (target * (target.log() - torch.log_softmax(scores, 1))).sum()
    # fp16 operands of the gradient's products.
    for got, exact in zip((terms.dq, dk, terms.dw), torch.autograd.grad(loss, leaves), strict=True):
        assert relative(got, exact) < 3e-3
    assert float(terms.kl.sum()) == pytest.approx(float(loss.detach()), rel=1e-4)
