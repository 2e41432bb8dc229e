"""At run time only ``BackendDeclined`` moves on to the next backend; anything else propagates and names its origin."""

from __future__ import annotations

import pytest
import torch
from contract import formulas, make

from dsa_dispatch import (
    Decline,
    DeclineCode,
    Scratch,
    run_fused_absorbed_sparse_attention,
    run_fused_qk_topk,
    stats,
    use_backend,
)
from dsa_dispatch.errors import BackendDeclined, NoBackendError
from dsa_dispatch.testing import FakeBackend, assert_backend_ran, isolated_registry

REASON = Decline(DeclineCode.RUNTIME, "workspace", "too small", "more")
IDS = make.ids(2, 4, 3, 7)


def leaves():
    return make.normal(4, 2, 2, 6, grad=True), make.normal(7, 2, 1, 6, seed=1, grad=True)


def attend(inputs, config=None):
    return run_fused_absorbed_sparse_attention(config, *inputs, IDS, 0.4, 4)


def right(out, gradients, inputs):
    wanted, _ = formulas.absorbed(*inputs, formulas.naming_counts(IDS, None, 7), 0.4, 4)
    torch.testing.assert_close(out, wanted, rtol=1e-11, atol=1e-11)  # fp64: only the order of sums differs
    for got, want in zip(gradients, torch.autograd.grad(wanted.sum(), inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_a_decline_in_the_forward_moves_on():
    fake = FakeBackend("fake", ("attention_forward",), rank=5, declines=REASON)
    inputs = leaves()
    with isolated_registry(fake.spec, installed=True), assert_backend_ran("torch_dense", "attention_forward"):
        out = attend(inputs)
        gradients = torch.autograd.grad(out.sum(), inputs)
    assert fake.calls
    right(out, gradients, inputs)


def test_a_decline_in_the_backward_moves_on():
    fake = FakeBackend("fake", ("attention_backward",), rank=5, declines=REASON)
    inputs = leaves()
    with (
        isolated_registry(fake.spec, installed=True),
        assert_backend_ran("torch_dense", "attention_backward"),
    ):
        out = attend(inputs)
        gradients = torch.autograd.grad(out.sum(), inputs)
    assert fake.calls
    right(out, gradients, inputs)


def test_a_decline_after_some_chunks_of_the_backward_leaves_nothing_counted_twice():
    from dsa_backends.torch_dense.attention_backward import attention_backward

    calls = []

    def second_chunk_declines(*args, **kwargs):
        calls.append(args[0].shape[0])
        if len(calls) == 2:
            raise BackendDeclined(REASON)
        return attention_backward(*args, **kwargs)

    fake = FakeBackend(
        "fake", ("attention_backward",), rank=5, replace={"attention_backward": second_chunk_declines}
    )
    inputs = leaves()
    with isolated_registry(fake.spec, installed=True), use_backend(query_chunk=3):
        out = attend(inputs)
        gradients = torch.autograd.grad(out.sum(), inputs)
        assert stats().ran("attention_backward") == {"torch_dense": 1}
    assert calls == [3, 3]
    right(out, gradients, inputs)


def test_every_backend_that_declines_is_passed_over_once():
    first = FakeBackend("first", ("indexer_topk",), rank=5, declines=REASON)
    second = FakeBackend("second", ("indexer_topk",), rank=4, declines=REASON)
    q, k, w = make.normal(4, 1, 2, 3), make.normal(7, 1, 3, seed=1), make.normal(4, 1, 2, seed=2)
    with isolated_registry(first.spec, second.spec, installed=True):
        with assert_backend_ran("torch_dense", "indexer_topk"):
            run_fused_qk_topk(None, q, k, w, 3)
        assert stats().declines["indexer_topk", "first", "RUNTIME"] >= 1
        assert stats().declines["indexer_topk", "second", "RUNTIME"] >= 1
    assert len(first.calls) == len(second.calls) == 1


@pytest.mark.parametrize("stage", ["attention_forward", "attention_backward"])
def test_under_fallback_error_a_decline_raises_with_its_reason(stage):
    fake = FakeBackend("fake", ("attention_forward", "attention_backward"), declines=None)
    inputs = leaves()
    with isolated_registry(fake.spec, installed=True), use_backend("fake", fallback="error"):
        out = attend(inputs)
        fake.declines = REASON
        with pytest.raises(NoBackendError, match=f"no backend may serve .*{stage}") as caught:
            attend(inputs) if stage == "attention_forward" else out.sum().backward()
        assert "RUNTIME workspace: got too small" in str(caught.value)
        assert "torch_dense" not in stats().ran(stage)


@pytest.mark.parametrize("error", [RuntimeError("out of tiles"), ValueError("bad"), ZeroDivisionError()])
@pytest.mark.parametrize("stage", ["attention_forward", "attention_backward"])
def test_any_other_exception_propagates_with_a_note(stage, error):
    fake = FakeBackend("fake", (stage,), rank=5, raises=error)
    inputs = leaves()
    with isolated_registry(fake.spec, installed=True):
        with pytest.raises(type(error)) as caught:
            attend(inputs).sum().backward()
        assert stats().ran(stage) == {}
    assert caught.value.__notes__[-1] == f"raised by backend fake in stage {stage}"


def test_the_next_backend_is_judged_with_the_lengths_of_the_call():
    picky = FakeBackend("picky", ("attention_forward",), rank=9, declines=REASON)
    short = FakeBackend("short", ("attention_forward",), rank=5, max_rows=7)
    inputs = leaves()
    with (
        isolated_registry(picky.spec, short.spec, installed=True),
        assert_backend_ran("torch_dense", "attention_forward"),
    ):
        attend(inputs)
    assert picky.calls
    assert not short.calls


def test_the_next_backend_is_given_rows_by_its_own_memory():
    def costly(call):
        return Scratch(per_row=(("much", 1 << 16),))

    picky = FakeBackend("picky", ("attention_forward",), rank=9, declines=REASON)
    hungry = FakeBackend("hungry", ("attention_forward",), rank=5, scratch=costly)
    inputs = leaves()
    with isolated_registry(picky.spec, hungry.spec, installed=True), use_backend(memory_budget=3 << 16):
        attend(inputs)
    assert [shapes[0][0] for _, shapes in hungry.calls] == [2, 2, 2, 2]
