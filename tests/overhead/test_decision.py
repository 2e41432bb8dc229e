"""What dispatch costs. The budgets hold for the decision itself; the op boundary and autograd are printed beside it.

Run alone: ``pytest tests/overhead -s``.
"""

from __future__ import annotations

import sys

import pytest
import torch
from overhead.measure import microseconds
from unit.calls import REQUEST, attention

import dsa_dispatch
from dsa_dispatch import stats, use_backend
from dsa_dispatch._dispatch.table import plan_for
from dsa_dispatch._operations import library
from dsa_dispatch.testing import FakeBackend, isolated_registry

pytestmark = pytest.mark.overhead

CACHED = 5.0
"""Microseconds of a cached decision on a 2-core cloud CPU."""
MISS = 1000.0
"""Microseconds of a decision that is not in the table, imports and self-tests done."""
NO_GRADIENTS = [False, False]


def nothing(inputs, request, needs_grad, policy):
    """The bare call that a decision is measured against."""


def report(line):
    """Shown with ``pytest -s``."""
    sys.stdout.write(f"{line}\n")


def instant(q, kv, indices, length, *, v_channels, **kwargs):
    return q[..., :v_channels].clone(), q.new_zeros(q.shape[:2])


def no_gradient(q, kv, indices, length, out, lse, dout, **kwargs):
    return torch.zeros_like(q)


@pytest.fixture
def inputs():
    query, key, indices, *_ = attention()
    return [query, key, indices]


def cached(inputs, policy=""):
    """Microseconds of a cached decision beyond a bare call with the same arguments."""
    plan_for(inputs, REQUEST, NO_GRADIENTS, policy)
    decided, bare = microseconds(
        lambda: plan_for(inputs, REQUEST, NO_GRADIENTS, policy),
        lambda: nothing(inputs, REQUEST, NO_GRADIENTS, policy),
        rounds=3000,
        enough=0.8 * CACHED,
    )
    return decided - bare


@pytest.mark.parametrize("case", ["auto", "explicit config", "use_backend", "limits"])
def test_a_cached_decision_is_within_its_budget(inputs, case):
    limits = {"max_rows": 1 << 20, "max_keys": 1 << 20} if case == "limits" else {}
    with (
        isolated_registry(FakeBackend("fake", **limits).spec),
        use_backend("fake" if case == "use_backend" else None),
    ):
        cost = cached(inputs, "dsa_kernel_backend:fake" if case == "explicit config" else "")
        assert stats().misses == {"run_fused_absorbed_sparse_attention": 1}
    report(f"cached decision, {case}: {cost:.2f} µs (budget {CACHED})")
    assert cost <= CACHED


def test_a_hit_costs_the_same_with_many_backends(inputs):
    with isolated_registry(*(FakeBackend(f"backend{index}").spec for index in range(20))):
        cost = cached(inputs)
    report(f"cached decision, 20 backends: {cost:.2f} µs (budget {CACHED})")
    assert cost <= CACHED


def test_a_miss_without_imports_is_within_its_budget(inputs):
    """Five backends with two stages each, as many as this library knows."""
    with isolated_registry(*(FakeBackend(f"backend{index}").spec for index in range(5))) as runtime:
        needs = [True, True]
        plan_for(inputs, REQUEST, needs, "")

        def miss():
            runtime.plans = {}
            plan_for(inputs, REQUEST, needs, "")

        (cost,) = microseconds(miss, rounds=100)
        assert stats().misses["run_fused_absorbed_sparse_attention"] > 10
    report(f"decision that is not in the table, 5 backends, 2 stages: {cost:.0f} µs (budget {MISS:.0f})")
    assert cost <= MISS


def test_the_op_boundary_and_autograd_are_reported_beside_it(inputs):
    """No budget: torch's own dispatcher and autograd, which no library escapes."""
    stages = {"attention_forward": instant, "attention_backward": no_gradient}
    fake = FakeBackend("fake", tuple(stages), replace=stages)
    query, key, indices, scale, value = attention()
    trained_query, trained_key, *_ = attention(grad=True)
    ones = torch.ones(3, 1, 2, value)

    def forward():
        return dsa_dispatch.run_fused_absorbed_sparse_attention(None, query, key, indices, scale, value)

    def trained():
        return dsa_dispatch.run_fused_absorbed_sparse_attention(
            None, trained_query, trained_key, indices, scale, value
        )

    def both():
        torch.autograd.grad(trained(), (trained_query, trained_key), ones)

    with isolated_registry(fake.spec):
        rows = {
            "the decision": lambda: plan_for(inputs, REQUEST, NO_GRADIENTS, ""),
            "the decision as an op": lambda: library.decide(inputs, REQUEST, NO_GRADIENTS, ""),
            "the kernel alone (a stand-in that copies)": lambda: instant(
                query[:, 0], None, None, None, v_channels=value
            ),
            "the operation without gradients": forward,
            "the operation with gradients, forward": trained,
            "the operation with gradients, forward and backward": both,
        }
        costs = microseconds(*rows.values(), rounds=100)
        assert stats().ran("attention_backward")
    for name, cost in zip(rows, costs, strict=True):
        report(f"{name}: {cost:.1f} µs")
