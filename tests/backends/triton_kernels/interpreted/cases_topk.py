"""Indexer scores and selection under the interpreter."""

from __future__ import annotations

import pytest
import torch

from dsa_backends.triton_kernels.indexer_topk import indexer_topk, launch_topk, select_from_scores
from dsa_dispatch._call import RowLayout, StageOptions


def best(scores, starts, ends, topk):
    """The rule written down: stable descending sort inside the range, so that ties keep the lower id."""
    rows = []
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        inside = (scores[row, start:end] + 0.0).double()
        order = torch.sort(inside, descending=True, stable=True).indices[:topk] + start
        rows.append(sorted(order.tolist()))
    return rows


def check(indices, length, want, topk):
    for row, ids in enumerate(want):
        assert int(length[row]) == len(ids)
        assert sorted(indices[row, : len(ids)].tolist()) == ids
        assert (indices[row, len(ids) :] == -1).all()
    assert indices.shape[1] == topk


def ranges(rows, columns):
    return torch.zeros(rows, dtype=torch.int32), torch.full((rows,), columns, dtype=torch.int32)


SPECIAL = {
    "values that differ only in low bits": lambda g: (
        1.0 + torch.randint(0, 2055000, (2, 1000), generator=g) * 1.1920929e-7
    ),
    "all equal": lambda g: torch.full((2, 1000), 3.0),
    "zeros and few positives": lambda g: torch.where(torch.rand(2, 1000, generator=g) < 0.02, 1.0, 0.0),
    "negative zeros equal positive zeros": lambda g: torch.where(
        torch.rand(2, 1000, generator=g) < 0.5, -0.0, 0.0
    ),
    "minus infinity is selectable": lambda g: torch.where(
        torch.rand(2, 1000, generator=g) < 0.9, -torch.inf, 1.0
    ),
    "few distinct integers": lambda g: torch.randint(-3, 4, (2, 1000), generator=g).float(),
    "normal": lambda g: torch.randn(2, 1000, generator=g),
    "denormals and huge values": lambda g: (
        torch.randn(2, 1000, generator=g) * 10.0 ** torch.randint(-44, 38, (2, 1000), generator=g)
    ),
}


@pytest.mark.parametrize("columns", [256, 1024])
@pytest.mark.parametrize("name", SPECIAL)
def test_selection_is_exact_with_ties_to_the_lower_id_in_one_block_and_across_blocks(name, columns):
    scores = SPECIAL[name](torch.Generator().manual_seed(0)).float()
    starts, ends = ranges(2, 1000)
    starts[1], ends[1] = 137, 911
    for topk in (1, 333) if columns == 1024 else (100,):
        indices, length = select_from_scores(scores, starts, ends, topk, columns=columns)
        check(indices, length, best(scores, starts, ends, topk), topk)


def test_a_range_may_be_empty_or_smaller_than_topk():
    scores = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 299, 10, 300], dtype=torch.int32)
    ends = torch.tensor([0, 300, 60, 300], dtype=torch.int32)
    for columns in (128, 512):
        indices, length = select_from_scores(scores, starts, ends, 64, columns=columns)
        check(indices, length, best(scores, starts, ends, 64), 64)


def test_nan_scores_leave_ids_unique_in_range_and_other_rows_untouched():
    scores = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    clean = scores.clone()
    scores[0, ::3] = torch.nan
    starts, ends = ranges(2, 300)
    indices, length = select_from_scores(scores, starts, ends, 50, columns=128)
    assert length.tolist() == [50, 50]
    assert len(set(indices[0].tolist())) == 50
    assert ((indices >= 0) & (indices < 300)).all()
    want, _ = select_from_scores(clean, starts, ends, 50, columns=128)
    assert torch.equal(indices[1], want[1])


def index_case(rows, keys, heads, dim, dtype, seed=0):
    """Small integers: every product and sum is exact, so scores equal the formula's and ties are real ties."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(-2, 3, (rows, heads, dim), generator=g).to(dtype)
    k = torch.randint(-2, 3, (keys, dim), generator=g).to(dtype)
    w = torch.randint(-2, 3, (rows, heads), generator=g).float()
    return q, k, w


def scores_of(q, k, w, relu):
    s = torch.einsum("thd,jd->thj", q.double(), k.double())
    return torch.einsum("th,thj->tj", w.double(), s.relu() if relu else s)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    ("heads", "dim", "dtype"),
    [(1, 64, torch.float16), (20, 128, torch.float16), (128, 64, torch.float16), (4, 64, torch.float32)],
)
def test_topk_of_exact_scores_equals_the_rule(heads, dim, dtype, relu):
    q, k, w = index_case(7, 150, heads, dim, dtype)
    ends = torch.arange(144, 151, dtype=torch.int32)
    starts = torch.zeros_like(ends)
    starts[3] = ends[3] = 9
    indices, length = indexer_topk(
        q,
        k,
        w,
        starts,
        ends,
        rows=RowLayout(1, 7, 150, bounds="ranges"),
        topk=40,
        use_relu=relu,
        options=StageOptions(),
    )
    check(indices, length, best(scores_of(q, k, w, relu), starts, ends, 40), 40)


@pytest.mark.parametrize("budget", [1, 20_000, 1 << 30])
def test_batch_items_see_their_own_keys_only_and_no_budget_changes_the_answer(budget):
    batch, rows, keys = 3, 5, 70
    q, k, w = index_case(batch * rows, batch * keys, 4, 64, torch.float16)
    item = torch.arange(batch * rows) // rows
    starts = (item * keys).int()
    ends = (item * keys + keys - rows + torch.arange(batch * rows) % rows + 1).int()
    layout = RowLayout(batch, rows, keys)
    want = best(scores_of(q, k, w, True), starts, ends, 20)
    # rows 2 .. 13 only: a slice that begins and ends inside an item
    part = slice(2, 13)
    indices, length = launch_topk(
        q[part],
        k,
        w[part],
        starts[part],
        ends[part],
        rows=layout.at(2),
        topk=20,
        use_relu=True,
        budget=budget,
        columns=32,
    )
    check(indices, length, want[part], 20)


def test_every_key_stored_twice_is_never_chosen_at_its_higher_place_alone():
    # Integers: the interpreter's matrix product sums random numbers in another order at another place.
    q, half, w = index_case(4, 60, 8, 64, torch.float16)
    k = torch.cat([half, half])
    starts, ends = ranges(4, 120)
    indices, _ = indexer_topk(
        q,
        k,
        w,
        starts,
        ends,
        rows=RowLayout(1, 4, 120, bounds="ranges"),
        topk=31,
        use_relu=True,
        options=StageOptions(),
    )
    for row in indices.tolist():
        chosen = set(row)
        assert all(other - 60 in chosen for other in row if other >= 60)
