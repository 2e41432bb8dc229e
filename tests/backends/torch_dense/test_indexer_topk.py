"""What ``indexer_topk`` of torch_dense chooses, in which bits, and that keys out of range do not matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_backends.torch_dense import indexer_topk as module
from dsa_backends.torch_dense import scores as scoring
from dsa_backends.torch_dense.spec import SPEC
from dsa_dispatch._call import CallSpec, RowLayout, StageOptions

OPTIONS = StageOptions()
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def causal_bounds(layout):
    item = torch.arange(layout.batch).repeat_interleave(layout.rows)
    row = torch.arange(layout.rows).repeat(layout.batch)
    starts = item * layout.keys
    return starts.int(), (starts + (layout.keys - layout.rows + row + 1).clamp_min(0)).int()


def choose(q, k, w, starts, ends, layout, topk, use_relu=True, exact=None):
    return module.indexer_topk(
        q, k, w, starts, ends, rows=layout, topk=topk, use_relu=use_relu, options=OPTIONS, exact=exact
    )


def id_sets(indices, length):
    """Each row's ids as a set, after checking the prefix form: unique ids, then only -1."""
    sets = []
    for ids, count in zip(indices.tolist(), length.tolist(), strict=True):
        assert len(set(ids[:count])) == count
        assert all(index >= 0 for index in ids[:count])
        assert all(index == -1 for index in ids[count:])
        sets.append(set(ids[:count]))
    return sets


def best_by_hand(q, k, w, starts, ends, topk, use_relu):
    """The choice in Python integers, where nothing rounds."""
    chosen = []
    for t, (low, high) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        scores = {}
        for j in range(low, high):
            total = 0
            for h in range(q.shape[1]):
                dot = sum(int(a) * int(b) for a, b in zip(q[t, h].tolist(), k[j].tolist(), strict=True))
                total += int(w[t, h]) * (max(dot, 0) if use_relu else dot)
            scores[j] = total
        chosen.append(set(sorted(scores, key=lambda j: (-scores[j], j))[:topk]))
    return chosen


@st.composite
def integer_calls(draw):
    batch, rows, keys = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 12))
    heads, channels = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    largest = draw(st.sampled_from([0, 1, 3]))

    def integers(*shape, low=0):
        return torch.randint(low, largest + 1, shape, generator=generator)

    q, k = (
        integers(batch * rows, heads, channels, low=-largest),
        integers(batch * keys, channels, low=-largest),
    )
    w = integers(batch * rows, heads, low=-largest)
    item = torch.arange(batch).repeat_interleave(rows) * keys
    low = torch.randint(0, keys + 1, (batch * rows,), generator=generator)
    high = torch.maximum(low, torch.randint(0, keys + 1, (batch * rows,), generator=generator))
    layout = RowLayout(batch, rows, keys, bounds="ranges")
    starts, ends = (item + low).int(), (item + high).int()
    if draw(st.booleans()):
        layout = RowLayout(batch, rows, keys)
        starts, ends = causal_bounds(layout)
    return q, k, w, starts, ends, layout, draw(st.integers(1, 15)), draw(st.booleans())


@settings(max_examples=80, deadline=None)
@given(
    call=integer_calls(),
    dtype=st.sampled_from(FLOATS),
    exact=st.sampled_from([None, False, True]),
    data=st.data(),
)
def test_small_integers_give_the_choice_made_by_hand(call, dtype, exact, data):
    q, k, w, starts, ends, layout, topk, use_relu = call
    weights = w.to(data.draw(st.sampled_from(FLOATS)))
    gaps = [torch.stack([x.to(dtype), torch.full_like(x, torch.nan, dtype=dtype)], 1)[:, 0] for x in (q, k)]
    indices, length = choose(*gaps, weights, starts, ends, layout, topk, use_relu=use_relu, exact=exact)
    assert indices.dtype == length.dtype == torch.int32
    assert indices.shape == (q.shape[0], topk)
    assert indices.is_contiguous()
    assert torch.equal(length, (ends - starts).clamp(0, topk).int())
    assert id_sets(indices, length) == best_by_hand(q, k, w, starts, ends, topk, use_relu)


@pytest.mark.parametrize("exact", [None, True], ids=["products", "channel by channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_two_equal_keys_the_higher_is_never_chosen_without_the_lower(dtype, exact):
    generator = torch.Generator().manual_seed(1)
    half, rows = 901, 50  # past the tile of 768 keys, and not a multiple of anything
    k = torch.randn(half, 24, generator=generator, dtype=dtype).repeat(2, 1)
    q = torch.randn(rows, 3, 24, generator=generator, dtype=dtype)
    w = torch.randn(rows, 3, generator=generator, dtype=dtype)
    layout = RowLayout(1, rows, 2 * half, bounds="ranges")
    starts, ends = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), 2 * half, dtype=torch.int32)
    for topk in (1, 64, 333):
        for ids in id_sets(*choose(q, k, w, starts, ends, layout, topk, use_relu=False, exact=exact)):
            assert all(j < half or j - half in ids for j in ids)


@pytest.mark.parametrize("exact", [None, True], ids=["products", "channel by channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_choice_does_not_depend_on_chunk_or_batch_or_bounds_or_the_rows_beside(dtype, exact):
    generator = torch.Generator().manual_seed(2)
    rows, keys, topk = 70, 810, 40
    q = torch.randn(2 * rows, 2, 16, generator=generator).to(dtype)
    k = torch.randn(2 * keys, 16, generator=generator).to(dtype)
    w = torch.randn(2 * rows, 2, generator=generator)
    layout = RowLayout(2, rows, keys)
    starts, ends = causal_bounds(layout)
    whole, _ = choose(q, k, w, starts, ends, layout, topk, exact=exact)
    ranges = RowLayout(2, rows, keys, bounds="ranges")
    assert torch.equal(choose(q, k, w, starts, ends, ranges, topk, exact=exact)[0], whole)
    for size in (1, 33, 97):
        parts = [
            choose(q[part], k, w[part], starts[part], ends[part], layout.at(part.start), topk, exact=exact)[0]
            for part in (slice(t, t + size) for t in range(0, 2 * rows, size))
        ]
        assert torch.equal(torch.cat(parts), whole)
    alone = choose(
        q[rows:], k[keys:], w[rows:], starts[:rows], ends[:rows], RowLayout(1, rows, keys), topk, exact=exact
    )
    assert torch.equal(torch.where(alone[0] < 0, -1, alone[0] + keys), whole[rows:])


@pytest.mark.parametrize("forced", [False, True], ids=["as probed", "channel by channel"])
@pytest.mark.parametrize("acc", [torch.float32, torch.float64])
def test_a_score_has_the_same_bits_wherever_its_key_and_row_stand(acc, forced):
    channels = 40
    exact = forced or not scoring.product_is_position_free(acc, channels, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(60, 2, channels, generator=generator, dtype=acc)
    k = torch.randn(1000, channels, generator=generator, dtype=acc)
    w = torch.randn(60, 2, generator=generator, dtype=acc)
    row_order, key_order = (torch.randperm(n, generator=generator) for n in (60, 1000))
    plan = module.buffer_plan(keys=1000, topk=8, heads=2, channels=channels, dtype=acc, device_type="cpu")
    workspace = plan.allocate(60, torch.device("cpu"))
    tables = []
    for rows, keys in ((torch.arange(60), torch.arange(1000)), (row_order, key_order)):
        table = torch.empty(60, 1000, dtype=acc)
        scoring.score_tiles(
            workspace, table, q[rows], k[keys], w[rows], windows=None, use_relu=True, exact=exact
        )
        tables.append(table)
    assert torch.equal(tables[0][row_order][:, key_order], tables[1])


def test_the_probe_rejects_a_product_whose_bits_depend_on_the_place(monkeypatch):
    true_product = torch.mm

    def crooked(left, right, *, out):
        true_product(left, right, out=out)
        out[-1, -1] = torch.nextafter(out[-1, -1], torch.tensor(torch.inf, dtype=out.dtype))
        return out

    scoring._same_bits_everywhere.cache_clear()
    monkeypatch.setattr(torch, "mm", crooked)
    assert not scoring.product_is_position_free(torch.float32, 5, torch.device("cpu"))
    monkeypatch.undo()
    scoring._same_bits_everywhere.cache_clear()


def test_where_the_probe_fails_the_channels_are_summed_one_by_one(monkeypatch):
    seen = []
    multiply = scoring.multiply_tile

    def record(query, keys, out, spare, exact):
        seen.append(exact)
        multiply(query, keys, out, spare, exact)

    monkeypatch.setattr(scoring, "multiply_tile", record)
    monkeypatch.setattr(module, "product_is_position_free", lambda *args: False)
    layout = RowLayout(1, 4, 9)
    choose(torch.randn(4, 2, 3), torch.randn(9, 3), torch.randn(4, 2), *causal_bounds(layout), layout, 2)
    assert seen
    assert all(seen)


def test_a_score_of_minus_infinity_comes_after_every_finite_one_and_before_none():
    k = torch.tensor([[-torch.inf], [1.0], [-torch.inf], [-3e38], [2.0], [5.0]])
    q, w = torch.ones(3, 1, 1), torch.ones(3, 1)
    layout = RowLayout(1, 3, 6, bounds="ranges")
    starts, ends = torch.zeros(3, dtype=torch.int32), torch.tensor([5, 5, 2], dtype=torch.int32)
    for topk, expected in ((3, [{1, 3, 4}, {1, 3, 4}, {0, 1}]), (4, [{0, 1, 3, 4}, {0, 1, 3, 4}, {0, 1}])):
        assert id_sets(*choose(q, k, w, starts, ends, layout, topk, use_relu=False)) == expected


def test_minus_zero_equals_plus_zero():
    k = torch.tensor([[0.0], [1.0], [0.0], [1.0]])
    layout = RowLayout(1, 2, 4, bounds="ranges")
    starts, ends = torch.zeros(2, dtype=torch.int32), torch.full((2,), 4, dtype=torch.int32)
    q, w = torch.tensor([[[-1.0]], [[0.0]]]), torch.tensor([[1.0], [-1.0]])
    # Without a ReLU row 0 scores -0, -1, -0, -1 and row 1 -0 throughout; with one, all scores are +0 or -0.
    assert id_sets(*choose(q, k, w, starts, ends, layout, 3, use_relu=False)) == [{0, 1, 2}, {0, 1, 2}]
    assert id_sets(*choose(q, k, -w, starts, ends, layout, 3)) == [{0, 1, 2}, {0, 1, 2}]


def test_nan_scores_leave_ids_unique_and_in_range_and_other_rows_untouched():
    generator = torch.Generator().manual_seed(4)
    q, k, w = (torch.randn(*shape, generator=generator) for shape in ((6, 2, 4), (30, 4), (6, 2)))
    layout = RowLayout(1, 6, 30)
    starts, ends = causal_bounds(layout)
    clean, length = choose(q, k, w, starts, ends, layout, 5)
    q[2] = torch.nan
    spoiled, spoiled_length = choose(q, k, w, starts, ends, layout, 5)
    assert torch.equal(length, spoiled_length)
    assert all(0 <= j < ends[2] for j in id_sets(spoiled, spoiled_length)[2])
    others = [0, 1, 3, 4, 5]
    assert torch.equal(spoiled[others], clean[others])


def test_a_nan_score_of_either_sign_ranks_first():
    k = torch.tensor([[3.0], [torch.nan], [torch.inf], [-torch.nan], [9.0]])
    layout = RowLayout(1, 1, 5, bounds="ranges")
    starts, ends = torch.tensor([0], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    for sign in (1.0, -1.0):
        w = torch.tensor([[sign]])
        [ids] = id_sets(*choose(torch.ones(1, 1, 1), k, w, starts, ends, layout, 2, use_relu=False))
        assert ids == {1, 3}


def test_keys_outside_the_range_may_hold_nan():
    generator = torch.Generator().manual_seed(5)
    q, k, w = (torch.randn(*shape, generator=generator) for shape in ((8, 2, 4), (40, 4), (8, 2)))
    layout = RowLayout(1, 8, 40, bounds="ranges")
    starts = torch.tensor([0, 0, 5, 5, 20, 20, 25, 30], dtype=torch.int32)
    ends = torch.tensor([20, 3, 20, 5, 40, 33, 40, 30], dtype=torch.int32)
    clean = choose(q, k, w, starts, ends, layout, 4)
    for rows, poison in ((slice(0, 4), slice(20, 40)), (slice(4, 8), slice(0, 20))):
        spoiled = k.clone()
        spoiled[poison] = torch.nan
        indices, _ = choose(q, spoiled, w, starts, ends, layout, 4)
        assert torch.equal(indices[rows], clean[0][rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rejected_key_beats_a_chosen_one_by_more_than_the_declared_error(dtype):
    generator = torch.Generator().manual_seed(6)
    rows, keys, topk = 20, 300, 50
    q = torch.randn(rows, 8, 64, generator=generator).to(dtype)
    k = torch.randn(keys, 64, generator=generator).to(dtype)
    w = torch.randn(rows, 8, generator=generator)
    layout = RowLayout(1, rows, keys)
    indices, _ = choose(q, k, w, *causal_bounds(layout), layout, topk)
    products = torch.einsum("thd,jd->thj", q.double(), k.double())
    exact = torch.einsum("th,thj->tj", w.double(), products.relu())
    size = torch.einsum("th,thd,jd->tj", w.double().abs(), q.double().abs(), k.double().abs())
    error = SPEC.stages["indexer_topk"].capability.score_error * size
    visible = torch.arange(keys) <= keys - rows + torch.arange(rows)[:, None]
    chosen = torch.zeros(rows, keys, dtype=torch.bool).scatter_(1, indices.long(), True)
    worst_chosen = (exact + error).masked_fill(~chosen, torch.inf).amin(1)
    best_rejected = (exact - error).masked_fill(chosen | ~visible, -torch.inf).amax(1)
    assert (best_rejected <= worst_chosen).all()


def test_131072_keys_fit_a_budget_of_one_gibibyte_with_hundreds_of_rows():
    call = CallSpec("run_fused_qk_topk", rows=4096, keys=131072, width=2048, index_heads=64)
    scratch = SPEC.stages["indexer_topk"].capability.scratch(call)
    assert (1 << 30) // scratch.row_bytes >= 256
    assert scratch.fixed_bytes < 16 << 20


def test_inputs_stay_as_they_are():
    layout = RowLayout(1, 5, 20)
    inputs = [torch.randn(5, 2, 3), torch.randn(20, 3), torch.randn(5, 2), *causal_bounds(layout)]
    before = [tensor.clone() for tensor in inputs]
    choose(*inputs, layout, 4)
    assert all(torch.equal(old, new) for old, new in zip(before, inputs, strict=True))
