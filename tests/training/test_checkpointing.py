"""``save_topk_policy()``: a replay selects nothing and runs what the first pass ran; one without effect raises."""

from __future__ import annotations

import pytest
import torch
from contract import make
from torch.utils.checkpoint import checkpoint
from training.models import ROWS, SharingModel, checkpointed, stages_run

import dsa_dispatch as dsa
from dsa_dispatch.checkpointing import save_topk_policy, save_topk_reentrant
from dsa_dispatch.errors import ConfigError
from dsa_dispatch.index_sharing import IndexShareSchedule
from dsa_dispatch.nn import Selection
from dsa_dispatch.testing import FakeBackend, isolated_registry

SCHEDULE = IndexShareSchedule.explicit(3, [0, 2], mtp_depths=2)
"""Layers 0 and 2 select, layer 1 shares, and so do both MTP depths after the first of them selected."""
SELECTIONS = 3
UNWANTED = -(10**9)
"""A rank below the reference's: such a backend runs where it is named, and nowhere else."""

pytestmark = [
    pytest.mark.usefixtures("registry"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # inductor's own imports
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # dynamo's own look
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(rows=ROWS):
    return make.normal(rows, 2, 16, seed=3, grad=True)


def trained(model, call=None):
    """``(gradients, stages run in the forward, stages run in the backward)``."""
    x = inputs()
    dsa.reset_stats()
    value = model(x) if call is None else call(x)
    forward = stages_run()
    dsa.reset_stats()
    value.backward()
    return {**model.gradients(), "x": x.grad}, forward, stages_run()


def assert_same_gradients(got, wanted):
    assert set(got) == set(wanted)
    for name, gradient in wanted.items():
        # fp64, where only the order of sums may differ
        torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-10, msg=name)


@pytest.fixture
def plain():
    return trained(SharingModel(SCHEDULE))[0]


@pytest.mark.parametrize("retained", [False, True])
def test_eager_replay_selects_nothing_on_main_and_mtp_layers_alike(plain, retained):
    model = SharingModel(SCHEDULE, checkpointed(save_topk_policy()))
    gradients, forward, backward = trained(model)
    assert_same_gradients(gradients, plain)
    assert forward["indexer_topk"] == SELECTIONS
    assert backward["indexer_topk"] == 0
    assert backward["attention_forward"] == len(SCHEDULE.logical_layers), "everything else is recomputed"
    if retained:
        value = model(inputs())
        value.backward(retain_graph=True)
        dsa.reset_stats()
        value.backward()
        assert stages_run()["indexer_topk"] == 0, "nor does the replay of a second backward"


def test_without_the_policy_the_replay_selects_again(plain):
    gradients, _, backward = trained(SharingModel(SCHEDULE, checkpointed()))
    assert_same_gradients(gradients, plain)
    assert backward["indexer_topk"] == SELECTIONS


@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiled_replay_selects_nothing(plain, where):
    model = SharingModel(SCHEDULE, checkpointed(save_topk_policy()))
    if where == "inside":
        model.layers = torch.nn.ModuleList(
            torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in model.layers
        )
        call = model
    else:
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients, forward, backward = trained(model, call)
    assert_same_gradients({name.replace("_orig_mod.", ""): g for name, g in gradients.items()}, plain)
    assert forward["indexer_topk"] == SELECTIONS
    assert backward["indexer_topk"] == 0


def attend(q, k):
    chosen = dsa.run_fused_qk_topk(None, q[..., :4], k[..., :4], q[..., 0], 3)
    return dsa.run_fused_absorbed_sparse_attention(None, q, k[:, :, None], chosen.indices, 0.5, 6).sum()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", "around"])
def test_inductor_replay_selects_nothing(where):
    q, k = make.normal(6, 1, 2, 8, seed=1, grad=True), make.normal(6, 1, 8, seed=2, grad=True)
    expected = torch.autograd.grad(attend(q, k), (q, k))
    policy = save_topk_policy()

    def around(function):
        return lambda *args: checkpoint(function, *args, use_reentrant=False, context_fn=policy)

    if where == "inside":
        call = around(torch.compile(attend, fullgraph=True, backend="inductor"))
    else:
        call = torch.compile(around(attend), fullgraph=True, backend="inductor")
    value = call(q, k)
    dsa.reset_stats()
    gradients = torch.autograd.grad(value, (q, k))
    assert stages_run()["indexer_topk"] == 0
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)


def test_the_replay_runs_the_backends_of_the_first_pass_after_use_backend_has_ended():
    fake = FakeBackend("fake", rank=UNWANTED)
    with isolated_registry(fake.spec, installed=True):
        model = SharingModel(SCHEDULE, checkpointed(save_topk_policy()))
        with dsa.use_backend("fake"):
            value = model(inputs())
        fake.calls.clear()
        dsa.reset_stats()
        value.backward()
        assert set(dsa.stats().ran("attention_forward")) == {"fake"}
        assert set(dsa.stats().ran("attention_backward")) == {"fake"}
        assert not dsa.stats().decisions, "the replay decides nothing"


@pytest.mark.parametrize("saving", [False, True])
def test_reentrant_checkpointing_whose_first_pass_has_no_grad(plain, saving):
    def wrap(layer, x, shared):
        def flat(*args):  # reentrant autograd sees only tensors at the top level of a result
            out, selection = layer(*args)
            return out, *selection

        function = save_topk_reentrant(flat) if saving else flat
        out, *selection = checkpoint(function, x, shared, use_reentrant=True)
        return out, Selection(*selection)

    gradients, forward, backward = trained(SharingModel(SCHEDULE, wrap))
    assert_same_gradients(gradients, plain)
    assert forward["indexer_topk"] == SELECTIONS
    assert forward["attention_backward"] == 0
    assert backward["indexer_topk"] == (0 if saving else SELECTIONS)


def test_a_reentrant_wrapper_used_for_a_second_call_raises_and_does_not_attend_with_the_first_ones_ids():
    q, k = make.normal(6, 1, 2, 8, seed=1, grad=True), make.normal(6, 1, 8, seed=2, grad=True)
    once = save_topk_reentrant(attend)
    value = checkpoint(once, q, k, use_reentrant=True)
    with pytest.raises(ConfigError, match="a wrapper for each call"):
        checkpoint(once, q * 2, k, use_reentrant=True)
    value.backward()
    assert q.grad is not None, "the first call is still good"


def test_a_reentrant_wrapper_outside_reentrant_checkpointing_says_what_to_use():
    q, k = make.normal(6, 1, 2, 8, seed=1, grad=True), make.normal(6, 1, 8, seed=2)
    with pytest.raises(ConfigError, match=r"context_fn=save_topk_policy\(\)"):
        checkpoint(save_topk_reentrant(attend), q, k, use_reentrant=False)


def test_a_plain_checkpoint_inside_the_policy_selects_again():
    """Its replay comes after the region's own, which alone has the saved ids: as docs/training.md says."""
    q, k = make.normal(6, 1, 2, 8, seed=1, grad=True), make.normal(6, 1, 8, seed=2)
    expected = torch.autograd.grad(attend(q, k), q)

    def outer(q, k):
        return checkpoint(attend, q, k, use_reentrant=False)

    value = checkpoint(outer, q, k, use_reentrant=False, context_fn=save_topk_policy())
    assert_runs_in_backward(value, q, expected, 1)


def test_the_policy_on_the_inner_checkpoint_selects_nothing_again():
    q, k = make.normal(6, 1, 2, 8, seed=1, grad=True), make.normal(6, 1, 8, seed=2)
    expected = torch.autograd.grad(attend(q, k), q)

    def outer(q, k):
        return checkpoint(attend, q, k, use_reentrant=False, context_fn=save_topk_policy())

    value = checkpoint(outer, q, k, use_reentrant=False, context_fn=save_topk_policy())
    assert_runs_in_backward(value, q, expected, 0)


def assert_runs_in_backward(value, leaf, expected, selections):
    dsa.reset_stats()
    torch.testing.assert_close(torch.autograd.grad(value, leaf), expected, rtol=1e-12, atol=1e-12)
    assert stages_run()["indexer_topk"] == selections


def region(x):
    return (x * 2).sin().sum()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_policy_that_matched_nothing_raises(compiled):
    def call(x):
        return checkpoint(region, x, use_reentrant=False, context_fn=save_topk_policy())

    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="the policy saves nothing") as raised:
        call(torch.ones(3, requires_grad=True))
    assert compiled or raised.type is ConfigError


def test_a_region_that_fails_keeps_its_own_error():
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        checkpoint(fails, inputs(), use_reentrant=False, context_fn=save_topk_policy())


def test_extra_ops_are_saved_too_and_must_be_functional_overloads():
    q, k = make.normal(6, 1, 2, 8, seed=1, grad=True), make.normal(6, 1, 8, seed=2, grad=True)
    expected = torch.autograd.grad(attend(q, k), (q, k))
    policy = save_topk_policy([torch.ops.dsa_dispatch.attention_forward.default])
    value = checkpoint(attend, q, k, use_reentrant=False, context_fn=policy)
    dsa.reset_stats()
    gradients = torch.autograd.grad(value, (q, k))
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
    assert stages_run()["attention_forward"] == 0
    for op in (torch.ops.aten.mm, torch.ops.aten.add_.Tensor, torch.ops.aten.view.default):
        with pytest.raises(TypeError, match="save_topk_policy"):
            save_topk_policy([op])


def test_a_saved_selection_changed_in_place_raises_and_is_not_silently_used():
    changed = []

    def call(q, k):
        chosen = dsa.run_fused_qk_topk(None, q[..., :4], k[..., :4], q[..., 0], 3)
        changed.append(chosen.indices)
        return dsa.run_fused_absorbed_sparse_attention(None, q, k[:, :, None], chosen.indices, 0.5, 6).sum()

    q, k = make.normal(6, 1, 2, 8, seed=1, grad=True), make.normal(6, 1, 8, seed=2)
    value = checkpoint(call, q, k, use_reentrant=False, context_fn=save_topk_policy())
    changed[0].fill_(-1)
    with pytest.raises(RuntimeError, match="changed in place"):
        value.backward()


def test_a_replay_that_selects_more_often_than_the_first_pass_raises():
    times = iter([1, 2])

    def call(q, k):
        return sum(attend(q, k) for _ in range(next(times)))

    q, k = make.normal(6, 1, 2, 8, seed=1, grad=True), make.normal(6, 1, 8, seed=2)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        value = checkpoint(call, q, k, use_reentrant=False, context_fn=save_topk_policy())
        with pytest.raises(RuntimeError, match="more often than the first pass"):
            value.backward()


def test_under_a_plain_checkpoint_the_replay_decides_anew():
    fake = FakeBackend("fake", rank=UNWANTED)
    with isolated_registry(fake.spec, installed=True):
        q, k = make.normal(6, 1, 2, 8, seed=1, grad=True), make.normal(6, 1, 8, seed=2)
        with dsa.use_backend("fake"):
            value = checkpoint(attend, q, k, use_reentrant=False)
        dsa.reset_stats()
        value.backward()
        assert set(dsa.stats().ran("attention_forward")) == {"torch_dense"}
