"""``offload_topk()``: one copy per storage, for what autograd and for what the checkpoint policy saves."""

from __future__ import annotations

import pytest
import torch
from contract import make
from torch.utils.checkpoint import checkpoint
from training.models import ROWS, SharingModel, checkpointed, stages_run

import dsa_dispatch as dsa
from dsa_dispatch.checkpointing import save_topk_policy
from dsa_dispatch.errors import ConfigError
from dsa_dispatch.index_sharing import IndexShareSchedule
from dsa_dispatch.offload import offload_topk

pytestmark = [
    pytest.mark.usefixtures("registry"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # dynamo's own look
]
IDS = 2 * ROWS * 4 * 4
"""Bytes of one layer's indices: batch, rows, width, int32."""


def attend(q, k, indices):
    return dsa.run_fused_absorbed_sparse_attention(None, q, k, indices, 0.5, 6).square().sum()


def operands():
    q, k = make.normal(8, 1, 2, 6, seed=1, grad=True), make.normal(8, 1, 1, 6, seed=2, grad=True)
    return q, k, make.ids(1, 8, 5, 8, seed=3)


def test_ids_shared_by_layers_make_one_copy_and_give_the_same_gradients():
    q, k, ids = operands()
    expected = torch.autograd.grad(attend(q, k, ids) + attend(q, k, ids[:, :, 1:]), (q, k))
    with offload_topk(1) as window:
        value = attend(q, k, ids) + attend(q, k, ids[:, :, 1:])
    assert (window.storages, window.bytes) == (1 + 2, ids.nbytes + 2 * 8), "the ids and two plan numbers"
    torch.testing.assert_close(torch.autograd.grad(value, (q, k)), expected, rtol=0, atol=0)


def test_a_window_inside_another_makes_no_second_copy():
    q, k, ids = operands()
    expected = torch.autograd.grad(attend(q, k, ids) * 3, (q, k))
    with offload_topk(ids.nbytes) as outer:
        value = attend(q, k, ids)
        with offload_topk(ids.nbytes) as inner:
            value = value + attend(q, k, ids)
        value = value + attend(q, k, ids)
    assert (outer.storages, inner.storages) == (1, 0)
    torch.testing.assert_close(torch.autograd.grad(value, (q, k)), expected, rtol=1e-12, atol=1e-12)


def test_a_copy_made_inside_serves_the_window_around_it():
    q, k, ids = operands()
    with offload_topk(ids.nbytes) as outer:
        with offload_topk(ids.nbytes) as inner:
            value = attend(q, k, ids)
        value = value + attend(q, k, ids)
    assert (outer.storages, inner.storages) == (0, 1)
    value.backward()


def test_the_graph_no_longer_holds_the_ids_it_saved():
    q, k, ids = operands()
    storage = torch.multiprocessing.reductions.StorageWeakRef(ids.untyped_storage())
    with offload_topk(8 * 5 * 4):
        value = attend(q, k, ids)
    del ids
    assert storage.expired()
    value.backward()


def test_small_tensors_and_other_types_stay_where_they_are():
    q, k, ids = operands()
    with offload_topk(ids.nbytes + 1) as window:
        attend(q, k, ids)
    assert window.storages == 0
    with offload_topk(ids.nbytes) as window:
        attend(q, k, ids)
    assert window.storages == 1


def test_ids_changed_in_place_between_two_uses_are_two_copies():
    q, k, ids = operands()
    other = ids.flip(2).contiguous()
    expected = torch.autograd.grad(attend(q, k, ids) + attend(q, k, other), (q, k))
    with offload_topk(ids.nbytes) as window:
        value = attend(q, k, ids)
        ids.copy_(other)
        value = value + attend(q, k, ids)
    assert window.storages == 2
    torch.testing.assert_close(torch.autograd.grad(value, (q, k)), expected, rtol=0, atol=0)


def test_a_second_backward_brings_the_ids_back_again():
    q, k, ids = operands()
    with offload_topk(1):
        value = attend(q, k, ids) + attend(q, k, ids)
    first = torch.autograd.grad(value, (q, k), retain_graph=True)
    second = torch.autograd.grad(value, (q, k))
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_memory_freed_and_given_to_other_ids_is_not_taken_for_the_old_ones():
    q, k, _ = operands()
    wanted, values = [], []
    with offload_topk(1) as window:
        for seed in range(8):
            ids = make.ids(1, 8, 5, 8, seed=seed)
            wanted.append(torch.autograd.grad(attend(q, k, ids), (q, k)))
            values.append(attend(q, k, ids))
            del ids
    assert window.storages >= 8
    for value, expected in zip(values, wanted, strict=True):
        torch.testing.assert_close(torch.autograd.grad(value, (q, k)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("where", ["eager", "inside", "around"])
def test_what_the_checkpoint_policy_saves_is_offloaded_too(where):
    torch._dynamo.reset()
    schedule = IndexShareSchedule.explicit(3, [0, 2])
    x = make.normal(ROWS, 2, 16, seed=3)
    plain = SharingModel(schedule)
    plain(x).backward()
    model = SharingModel(schedule, checkpointed(save_topk_policy()))
    call = model
    if where == "inside":
        model.layers = torch.nn.ModuleList(
            torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in model.layers
        )
    elif where == "around":
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
    with offload_topk(IDS) as window:
        value = call(x)
    assert (window.storages, window.bytes) == (2, 2 * IDS), (
        "one copy per selecting layer, none for the sharing one"
    )
    dsa.reset_stats()
    value.backward()
    assert stages_run()["indexer_topk"] == 0
    for (name, got), wanted in zip(model.gradients().items(), plain.gradients().values(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10, msg=name)
    torch._dynamo.reset()


def test_ids_passed_into_a_checkpointed_region_are_offloaded():
    q, k, ids = operands()
    with offload_topk(ids.nbytes) as window:
        value = checkpoint(attend, q, k, ids, use_reentrant=False)
    assert window.storages == 1
    value.backward()


@pytest.mark.parametrize("size", ["", 0, "many"])
def test_a_size_that_cannot_be_meant_is_a_config_error(size):
    with pytest.raises(ConfigError, match="offload_topk"), offload_topk(size):
        pass


def test_a_window_inside_a_compiled_function_says_to_put_it_around_the_call():
    def inside(q, k, ids):
        with offload_topk():
            return attend(q, k, ids)

    torch._dynamo.reset()
    with pytest.raises(Exception, match="offload_topk inside a compiled function"):
        torch.compile(inside, fullgraph=True, backend="aot_eager")(*operands())
