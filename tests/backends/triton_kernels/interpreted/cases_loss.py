"""Teacher and indexer loss under the interpreter, sparse and dense, against autograd in fp64."""

from __future__ import annotations

import pytest
import torch
from oracle import relative, slots_of

from dsa_backends.triton_kernels.indexer_loss import indexer_loss
from dsa_backends.triton_kernels.indexer_target import indexer_target
from dsa_dispatch._call import RowLayout, StageOptions

# fp16 products of 64 channels round to about 5e-4; the gradient has three of them in a row.
TOLERANCE = {torch.float16: 3e-3, torch.float32: 1e-5}


def dense_slots(starts, ends, rows):
    """Column c of a row is key c of its own item, where that lies inside the row's range."""
    item = (torch.arange(len(starts)) + rows.first_row) // rows.rows
    ids = torch.arange(rows.keys) + (item * rows.keys)[:, None]
    inside = (ids >= starts[:, None]) & (ids < ends[:, None])
    return torch.where(inside, ids, -1).int(), torch.full((len(starts),), rows.keys, dtype=torch.int32)


def mass_of(query, key, indices, length, scale):
    mass = torch.zeros(indices.shape, dtype=torch.float64)
    for row, slots in enumerate(slots_of(indices, length, len(key))):
        if len(slots):
            picked = key.double()[indices[row, slots].long()]
            mass[row, slots] = torch.softmax(scale * query.double()[row] @ picked.T, -1).sum(0)
    return mass


def loss_of(q, k, w, indices, length, mass, relu):
    leaves = [t.double().requires_grad_() for t in (q, k, w)]
    q64, k64, w64 = leaves
    terms = []
    for row, slots in enumerate(slots_of(indices, length, len(k))):
        target = mass[row, slots].double()
        total = target.sum()
        if len(slots) == 0 or total == 0:
            terms.append((q64[row] * 0).sum())
            continue
        target = target / total.clamp_min(1e-10)
        s = q64[row] @ k64[indices[row, slots].long()].T
        score = w64[row] @ (s.relu() if relu else s)
        terms.append((target * (target.clamp_min(1e-10).log() - torch.log_softmax(score, -1))).sum())
    kl = torch.stack(terms)
    return kl.detach(), *torch.autograd.grad(kl.sum(), leaves)


def case(dtype, rows=5, keys=40, width=37, heads=4, index_heads=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    data = {
        "query": torch.randn(rows, heads, 80, generator=g).to(dtype),
        "key": torch.randn(keys, 80, generator=g).to(dtype),
        "q": (torch.randn(rows, index_heads, 64, generator=g) * 0.5).to(dtype),
        "k": (torch.randn(keys, 64, generator=g) * 0.5).to(dtype),
        "w": torch.randn(rows, index_heads, generator=g),
    }
    indices = torch.stack([torch.randperm(keys, generator=g)[:width] for _ in range(rows)]).int()
    indices[torch.rand(rows, width, generator=g) < 0.3] = -1
    indices[0, :5] = keys + 2
    indices[-1] = -1
    length = torch.full((rows,), width, dtype=torch.int32)
    length[1] = 9
    return data, indices, length


@pytest.mark.parametrize("given_lse", [True, False])
@pytest.mark.parametrize("heads", [1, 20])
def test_mass_is_the_softmax_summed_over_heads_and_zero_where_there_is_no_key(heads, given_lse):
    data, indices, length = case(torch.float32, heads=heads)
    want = mass_of(data["query"], data["key"], indices, length, 0.2)
    lse = None
    if given_lse:
        lse = torch.full((5, heads), -torch.inf)
        for row, slots in enumerate(slots_of(indices, length, 40)):
            if len(slots):
                lse[row] = torch.logsumexp(
                    0.2 * data["query"][row] @ data["key"][indices[row, slots].long()].T, -1
                )
    bounds = torch.zeros(5, dtype=torch.int32)
    got = indexer_target(
        data["query"], data["key"], indices=indices, length=length, starts=bounds, ends=bounds + 40, lse=lse,
        scale=0.2, rows=RowLayout(1, 5, 40), options=StageOptions(),
    )  # fmt: skip
    assert relative(got, want) < 1e-5
    assert (got[want == 0] == 0).all()


@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_dense_mass_covers_the_range_of_the_rows_own_item_for_any_budget(budget):
    data, _, _ = case(torch.float32, rows=6, keys=40)
    rows = RowLayout(2, 4, 20, first_row=1)  # rows 1 .. 6 of two items of 4
    starts = torch.tensor([0, 3, 5, 20, 20, 25], dtype=torch.int32)
    ends = torch.tensor([18, 19, 5, 38, 39, 40], dtype=torch.int32)
    ids, length = dense_slots(starts, ends, rows)
    got = indexer_target(
        data["query"], data["key"], indices=None, length=None, starts=starts, ends=ends, lse=None, scale=0.2,
        rows=rows, options=StageOptions(memory_budget=budget),
    )  # fmt: skip
    assert got.shape == (6, 20)
    assert relative(got, mass_of(data["query"], data["key"], ids, length, 0.2)) < 1e-5


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    ("index_heads", "dtype"), [(1, torch.float32), (20, torch.float16), (128, torch.float32)]
)
def test_sparse_loss_and_its_gradients_agree_with_autograd(index_heads, dtype, relu):
    data, indices, length = case(dtype, index_heads=index_heads)
    mass = mass_of(data["query"], data["key"], indices, length, 0.2).float()
    mass[2] = 0  # a teacher without mass: loss and gradients 0
    q, k, w = data["q"], data["k"], data["w"] * index_heads**-0.5
    want = loss_of(q, k, w, indices, length, mass, relu)
    bounds = torch.zeros(5, dtype=torch.int32)
    dk = torch.ones(k.shape)
    got = indexer_loss(
        q, k, w, indices=indices, length=length, starts=bounds, ends=bounds + 40, mass=mass, rows=RowLayout(1, 5, 40),
        use_relu=relu, need_dq=True, need_dw=True, dk=dk, options=StageOptions(),
    )  # fmt: skip
    for value, exact in zip((got.kl, got.dq, dk - 1, got.dw), want, strict=True):
        assert relative(value, exact) < TOLERANCE[dtype]
    assert got.kl[2] == 0
    assert got.dq[2].abs().max() == 0
    assert got.kl[-1] == 0


def test_dense_loss_agrees_and_deterministic_dk_has_the_same_bits_for_any_budget():
    data, _, _ = case(torch.float32, rows=6, keys=40)
    rows = RowLayout(2, 4, 20, first_row=1)
    starts = torch.tensor([0, 3, 5, 20, 20, 25], dtype=torch.int32)
    ends = torch.tensor([18, 19, 5, 38, 39, 40], dtype=torch.int32)
    ids, length = dense_slots(starts, ends, rows)
    mass = mass_of(data["query"], data["key"], ids, length, 0.2).float()
    want = loss_of(data["q"], data["k"], data["w"], ids, length, mass, True)
    results = []
    for budget in (1, 30_000, 1 << 30):
        dk = torch.zeros(data["k"].shape)
        got = indexer_loss(
            data["q"], data["k"], data["w"], indices=None, length=None, starts=starts, ends=ends, mass=mass, rows=rows,
            use_relu=True, need_dq=True, need_dw=True, dk=dk,
            options=StageOptions(deterministic=True, memory_budget=budget),
        )  # fmt: skip
        results.append(dk)
    for value, exact in zip((got.kl, got.dq, dk, got.dw), want, strict=True):
        assert relative(value, exact) < 1e-5
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_gradients_that_are_not_needed_are_none_and_change_nothing():
    data, indices, length = case(torch.float32)
    mass = mass_of(data["query"], data["key"], indices, length, 0.2).float()
    bounds = torch.zeros(5, dtype=torch.int32)
    results = [
        indexer_loss(
            data["q"], data["k"], data["w"], indices=indices, length=length, starts=bounds, ends=bounds + 40, mass=mass,
            rows=RowLayout(1, 5, 40), use_relu=True, need_dq=dq, need_dw=dw, dk=None, options=StageOptions(),
        )
        for dq, dw in ((True, True), (False, True), (True, False), (False, False))
    ]  # fmt: skip
    assert [(r.dq is None, r.dw is None) for r in results] == [
        (False, False),
        (True, False),
        (False, True),
        (True, True),
    ]
    assert torch.equal(results[0].dq, results[2].dq)
    assert torch.equal(results[0].dw, results[1].dw)
    assert all(torch.equal(results[0].kl, r.kl) for r in results)
