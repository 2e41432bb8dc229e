"""A backward runs what its forward decided, wherever and whenever it runs."""

from __future__ import annotations

import threading

import pytest
import torch
from contract import make
from torch.utils.checkpoint import checkpoint

from dsa_dispatch import (
    configure,
    run_fused_absorbed_sparse_attention,
    run_fused_dsa_attention,
    run_fused_gqa_sparse_attention,
    stats,
    use_backend,
)
from dsa_dispatch.checkpointing import save_topk_policy
from dsa_dispatch.testing import FakeBackend, isolated_registry


@pytest.fixture
def fakes():
    """Two backends beside the reference, the first preferred under ``auto``."""
    first, second = FakeBackend("first", rank=2), FakeBackend("second", rank=1)
    with isolated_registry(first.spec, second.spec, installed=True):
        yield first, second


def absorbed():
    leaves = make.normal(4, 2, 2, 6, grad=True), make.normal(7, 2, 1, 6, seed=1, grad=True)
    return run_fused_absorbed_sparse_attention(None, *leaves, make.ids(2, 4, 3, 7), 0.4, 4), leaves


def grouped():
    leaves = [make.normal(4, 2, 4, 6, grad=True)]
    leaves += [make.normal(7, 2, 2, 6, seed=seed, grad=True) for seed in (1, 2)]
    return run_fused_gqa_sparse_attention(None, *leaves, make.ids(2, 4, 3, 7), 0.4), leaves


OPERATIONS = pytest.mark.parametrize(
    ("run", "backward"), [(absorbed, "attention_backward"), (grouped, "gqa_backward")]
)


def ran(stage):
    return stats().ran(stage)


@OPERATIONS
def test_after_use_backend_has_ended(fakes, run, backward):
    with use_backend("second"):
        out, _ = run()
    out.sum().backward()
    assert ran(backward) == {"second": 1}


@OPERATIONS
def test_inside_a_use_backend_that_names_another(fakes, run, backward):
    out, _ = run()
    with use_backend("second", fallback="error"):
        out.sum().backward()
    assert ran(backward) == {"first": 1}


@OPERATIONS
def test_in_a_fresh_thread(fakes, run, backward):
    with use_backend("second"):
        out, leaves = run()
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    thread.join()
    assert all(leaf.grad is not None for leaf in leaves)
    assert ran(backward) == {"second": 1}


@OPERATIONS
def test_after_configure_has_changed_the_default(fakes, run, backward):
    configure({"dsa_kernel_backend": "second"})
    out, _ = run()
    configure({"dsa_kernel_backend": "torch_dense"})
    out.sum().backward()
    assert ran(backward) == {"second": 1}


@OPERATIONS
def test_twice_over_one_graph(fakes, run, backward):
    with use_backend("second"):
        out, leaves = run()
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    with use_backend("torch_dense"):
        second = torch.autograd.grad(out.sum(), leaves)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    assert ran(backward) == {"second": 2}


@OPERATIONS
def test_settings_of_the_forward_hold_in_the_backward(fakes, run, backward):
    with use_backend("second", query_chunk=3):
        out, _ = run()
    second = fakes[1]
    second.calls.clear()
    out.sum().backward()
    assert [shapes[0][0] for stage, shapes in second.calls if stage == backward] == [3, 3, 2]


def test_two_graphs_with_two_decisions_do_not_mix(fakes):
    with use_backend("second"):
        chosen, _ = absorbed()
    default, _ = absorbed()
    default.sum().backward()
    assert ran("attention_backward") == {"first": 1}
    chosen.sum().backward()
    assert ran("attention_backward") == {"first": 1, "second": 1}


def layer(query, key, up, q, k, w):
    return run_fused_dsa_attention(
        config=None, query=query, key=key, up_v_weight=up, q_indexer=q, k_indexer=k, indexer_weights=w,
        indexer_topk=3, softmax_scale=0.4, loss_coeff=0.5,
    )  # fmt: skip


def layer_inputs():
    return [
        make.normal(*shape, seed=seed, grad=True)
        for seed, shape in enumerate(
            [(4, 2, 2, 6), (7, 2, 1, 6), (2, 3, 4), (4, 2, 2, 5), (7, 2, 5), (4, 2, 2)]
        )
    ]


def step(inputs, **how):
    out, loss = checkpoint(layer, *inputs, use_reentrant=False, **how) if how else layer(*inputs)
    return out, loss


def gradients_of(inputs, out, loss):
    return torch.autograd.grad(out.square().sum() + loss, inputs)


def test_a_replay_under_save_topk_policy_selects_and_decides_nothing_anew(fakes):
    inputs = layer_inputs()
    with use_backend("second"):
        wanted = gradients_of(inputs, *step(inputs))
    decisions = dict(stats().decisions)
    with use_backend("second"):
        out, loss = step(inputs, context_fn=save_topk_policy())
    forward = {stage: ran(stage) for stage in ("indexer_topk", "attention_forward", "indexer_loss")}
    decided = stats().decisions["run_fused_dsa_attention"] - decisions["run_fused_dsa_attention"]
    assert decided == 3  # attention, selection, loss
    for got, want in zip(gradients_of(inputs, out, loss), wanted, strict=True):
        assert torch.equal(got, want)
    assert stats().decisions["run_fused_dsa_attention"] == decisions["run_fused_dsa_attention"] + decided
    assert ran("indexer_topk") == forward["indexer_topk"] == {"second": 2}
    assert ran("attention_forward") == {"second": forward["attention_forward"]["second"] + 1}
    assert ran("indexer_loss") == {"second": forward["indexer_loss"]["second"] + 1}
    assert ran("attention_backward") == {"second": 2}


def test_a_replay_under_plain_checkpoint_decides_anew_from_what_holds_then(fakes):
    inputs = layer_inputs()
    configure({"dsa_kernel_backend": "second"})
    out, loss = step(inputs, context_fn=torch.utils.checkpoint.noop_context_fn)
    assert ran("indexer_topk") == {"second": 1}
    gradients_of(inputs, out, loss)
    assert ran("indexer_topk") == {"second": 2}
    assert ran("attention_backward") == {"second": 1}


def test_an_explicit_config_holds_in_a_plain_replay_too(fakes):
    inputs = layer_inputs()[:2]
    ids = make.ids(2, 4, 3, 7)

    def attend(query, key):
        return run_fused_absorbed_sparse_attention({"dsa_kernel_backend": "second"}, query, key, ids, 0.4, 4)

    checkpoint(attend, *inputs, use_reentrant=False).sum().backward()
    assert ran("attention_forward") == {"second": 2}
    assert ran("attention_backward") == {"second": 1}


def test_save_topk_policy_refuses_what_would_match_nothing():
    with pytest.raises(TypeError, match=r"torch.ops.x.y.default"):
        save_topk_policy([torch.ops.aten.mm])
