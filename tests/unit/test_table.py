"""The decision table: what hits, what misses, how large it grows, and when it forgets."""

from __future__ import annotations

import pickle

import pytest
import torch
from unit.calls import REQUEST, arguments, attention, chosen, indexer, plan_attention, run_attention

import dsa_dispatch
from dsa_dispatch import Decline, DeclineCode, register_backend, stats, unregister_backend, use_backend
from dsa_dispatch._dispatch import table
from dsa_dispatch._dispatch.plan import plan_of
from dsa_dispatch._dispatch.table import Request, parse_request
from dsa_dispatch._operations.public import OPERATIONS
from dsa_dispatch._runtime import current
from dsa_dispatch._stages import OPERATION_GROUPS
from dsa_dispatch.errors import InvalidInputError, NoBackendError
from dsa_dispatch.testing import FakeBackend, isolated_registry

ATTENTION = "run_fused_absorbed_sparse_attention"


def misses():
    return stats().misses.get(ATTENTION, 0)


def test_calls_of_many_lengths_are_decided_once(registry):
    plans = {plan_attention(rows=rows, keys=keys, batch=batch).id for rows, keys, batch in lengths()}
    assert len(plans) == 1
    assert misses() == 1
    assert stats().decisions[ATTENTION] == len(list(lengths()))


def lengths():
    return ((rows, keys, batch) for rows in (0, 1, 7, 100) for keys in (0, 5, 300) for batch in (1, 3))


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_every_operation_decides_once_per_group_and_then_hits(registry, operation):
    positional, keywords = arguments(operation)
    for _ in range(3):
        OPERATIONS[operation](*positional, **keywords)
    groups = len(OPERATION_GROUPS[operation])
    assert stats().misses == {operation: groups}
    assert stats().decisions == {operation: 3 * groups}


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 3},
        {"channels": 7},
        {"width": 4},
        {"dtype": torch.bfloat16},
        {"grad": True},
        {"config": {"memory_budget": "1MiB"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_a_capability_can_test_is_a_decision_of_its_own(registry, change):
    plan_attention()
    config = change.pop("config", None)
    plan_attention(config, **change)
    assert misses() == 2


def test_the_dtype_of_ids_is_a_decision_of_its_own(registry):
    query, key, indices, *rest = attention()
    for ids in (indices, indices.long(), indices):
        dsa_dispatch.run_fused_absorbed_sparse_attention(None, query, key, ids, *rest)
    assert misses() == 2


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [
        (
            {"max_rows": 6},
            [("rows", 5, "small"), ("rows", 6, "small"), ("rows", 7, "wide"), ("rows", 900, "wide")],
        ),
        ({"max_rows": 6}, [("batch", 2, "small"), ("batch", 3, "wide")]),
        ({"max_keys": 9}, [("keys", 4, "small"), ("keys", 9, "small"), ("keys", 10, "wide")]),
        ({"max_elements": 72}, [("rows", 6, "small"), ("rows", 7, "wide")]),
        ({"max_elements": 72}, [("keys", 12, "small"), ("keys", 13, "wide")]),
    ],
)
def test_a_limit_splits_the_lengths_in_two(limit, sizes):
    small, wide = FakeBackend("small", rank=9, **limit), FakeBackend("wide")
    with isolated_registry(small.spec, wide.spec):
        for _ in range(2):
            for name, size, backend in sizes:
                assert chosen(**{name: size}) == backend
        assert misses() == len({backend for _, _, backend in sizes})


def test_an_element_limit_holds_for_each_stage_by_its_own_tensors():
    """A selection and a loss of one length, decided apart: neither borrows the other's elements."""
    small = FakeBackend("small", rank=9, max_elements=30)
    with isolated_registry(small.spec, FakeBackend("wide").spec):
        q, k, weights = indexer()
        dsa_dispatch.run_fused_qk_topk(None, q, k, weights, 2)
        assert stats().ran("indexer_topk") == {"small": 1}
        dsa_dispatch.run_fused_qk_topk(None, q, k, weights, 11)
        assert stats().ran("indexer_topk") == {"small": 1, "wide": 1}


def test_an_element_limit_holds_for_an_output_that_is_larger_than_every_input():
    """Grouped attention of two heads: 4 keys × 8 value channels are 32 elements, 3 rows × 2 heads × 8 are 48."""
    small = FakeBackend("small", rank=9, max_elements=40)
    key, value = torch.randn(4, 1, 1, 2), torch.randn(4, 1, 1, 8)
    ids = torch.zeros(1, 3, 2, dtype=torch.int32)
    with isolated_registry(small.spec, FakeBackend("wide").spec):
        for rows in (2, 3):
            query = torch.randn(rows, 1, 2, 2)
            dsa_dispatch.run_fused_gqa_sparse_attention(None, query, key, value, ids[:, :rows], 0.5)
        assert stats().ran("gqa_forward") == {"small": 1, "wide": 1}


def test_an_extra_check_makes_sizes_exact():
    def even(call):
        return (
            None
            if call.rows % 2 == 0
            else Decline(DeclineCode.EXTRA_CHECK, "rows", str(call.rows), "even numbers")
        )

    with isolated_registry(FakeBackend("even", rank=9, extra_check=even).spec, FakeBackend("any").spec):
        for _ in range(2):
            assert [chosen(rows=rows) for rows in (2, 3, 4, 5)] == ["even", "any", "even", "any"]
        assert misses() == 4


def test_the_table_is_bounded(registry, monkeypatch):
    monkeypatch.setattr(table, "TABLE_SIZE", 8)
    for heads in range(1, 30):
        plan_attention(heads=heads)
        assert 1 <= len(registry.plans) <= 8
    assert misses() == 29
    plan_attention(heads=29)
    assert misses() == 29


def test_registering_forgets_what_was_decided(registry):
    plan_attention()
    register_backend(FakeBackend("more", rank=9).spec)
    assert not registry.plans
    assert chosen() == "more"
    unregister_backend("more")
    assert chosen() == "torch_dense"
    assert misses() == 3


def test_a_decision_that_a_new_registry_overtook_is_not_kept():
    """The registry changes while a self-test runs: that decision serves its call and is forgotten."""
    late = FakeBackend("late", rank=9)

    def registers(*args, **kwargs):
        if "late" not in current().snapshot.backends:
            register_backend(late.spec)
        raise RuntimeError("so that the next one is asked")

    slow = FakeBackend("slow", rank=5, replace={"attention_forward": registers}, self_test=True)
    with isolated_registry(slow.spec, FakeBackend("fast").spec) as runtime:
        assert chosen() == "fast"
        assert not runtime.plans
        assert chosen() == "late"


def test_equal_decisions_share_a_plan_for_the_life_of_the_process(registry):
    first = plan_attention()
    registry.plans = {}
    assert plan_attention(rows=9) is first
    assert plan_of(first.token) is first
    assert (first.call.rows, first.call.keys, first.call.batch) == (1, 1, 1)


def test_a_call_that_nobody_serves_is_asked_anew():
    with isolated_registry():
        for _ in range(2):
            with pytest.raises(NoBackendError):
                run_attention()
        register_backend(FakeBackend("fake").spec)
        run_attention()


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("attention_foward", "Did you mean 'attention_forward'?"),
        ("typo", "Stages: indexer_topk, indexer_target"),
        ("run_fused_qk_topk_with_loss", "made of the stages indexer_topk, indexer_target, indexer_loss"),
    ],
)
def test_asking_what_ran_of_no_stage_is_an_error_and_not_nothing(word, text):
    with pytest.raises(InvalidInputError) as caught:
        dsa_dispatch.stats().ran(word)
    assert text in str(caught.value)


def test_statistics_are_frozen_and_reset(registry):
    with use_backend(query_chunk=1):
        run_attention()
    counted = stats()
    assert counted.runs == {("attention_forward", "torch_dense", ""): 1}
    assert counted.decisions == counted.misses == {ATTENTION: 1}
    for read_only in (counted, pickle.loads(pickle.dumps(counted))):
        assert read_only == counted
        with pytest.raises(TypeError):
            read_only.runs["x"] = 1
    dsa_dispatch.reset_stats()
    assert counted.ran("attention_forward") == {"torch_dense": 1}
    empty = stats()
    assert not any((empty.runs, empty.declines, empty.decisions, empty.misses))
    run_attention()
    with use_backend(query_chunk=1):
        run_attention()
    assert stats().decisions == {ATTENTION: 2}
    assert stats().misses == {ATTENTION: 1}, "the table is not forgotten with the counters"


def test_a_request_crosses_the_op_boundary_as_text():
    for request in (
        Request(
            "topk",
            "run_fused_qk_topk",
            2051,
            0,
            False,
            False,
            "ranges",
            "thd",
            "zigzag",
            "mask,key_positions",
        ),
        parse_request(REQUEST),
    ):
        assert parse_request(request.text()) == request
