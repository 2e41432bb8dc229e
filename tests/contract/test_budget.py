"""A memory budget that is too small: the error names the one that does, for every stage of the operation at once."""

from __future__ import annotations

import pytest
import torch
from contract import make

from dsa_dispatch import (
    Scratch,
    run_fused_absorbed_sparse_attention,
    run_fused_dsa_attention,
    run_fused_gqa_sparse_attention,
    run_fused_qk_topk,
    run_fused_qk_topk_with_loss,
    use_backend,
)
from dsa_dispatch.errors import ConfigError
from dsa_dispatch.testing import FakeBackend, isolated_registry

ROWS, KEYS, HEADS, CHANNELS, VALUES, WIDTH = 4, 9, 2, 8, 4, 3
WHICH = ("attention", "gqa", "topk", "topk_with_loss", "topk_with_dense_loss", "dsa", "dsa_with_loss")


def operation(which, grad, batch=1, rows=ROWS):
    """``(forward, backward)``; ``backward(result)`` needs every gradient of it, with a strided gradient of ``out``."""

    def normal(*shape, seed=0):
        return make.normal(*shape, seed=seed, grad=grad)

    query, key = normal(rows, batch, HEADS, CHANNELS), normal(KEYS, batch, 1, CHANNELS, seed=1)
    indexer = (
        normal(rows, batch, HEADS, CHANNELS),
        normal(KEYS, batch, CHANNELS, seed=1),
        normal(rows, batch, HEADS),
    )
    up = normal(HEADS, 5, VALUES)
    ids = make.ids(batch, rows, WIDTH, KEYS)
    if which == "attention":
        return lambda: run_fused_absorbed_sparse_attention(None, query, key, ids, 0.1, VALUES), summed
    if which == "gqa":
        value = normal(KEYS, batch, 1, VALUES)
        return lambda: run_fused_gqa_sparse_attention(None, query, key, value, ids, 0.1), summed
    if which == "topk":
        return lambda: run_fused_qk_topk(None, *indexer, WIDTH), lambda result: None
    if which.startswith("topk"):
        plain = query.detach(), key.detach()
        return lambda: run_fused_qk_topk_with_loss(
            None, *indexer, WIDTH, None, None, None, *plain, 0.1, 1.0, sparse_loss="dense" not in which
        ), lambda result: result.loss.backward()
    return lambda: run_fused_dsa_attention(
        config=None, query=query, key=key, up_v_weight=up, q_indexer=indexer[0], k_indexer=indexer[1],
        indexer_weights=indexer[2], indexer_topk=WIDTH, softmax_scale=0.1,
        loss_coeff=1.0 if which == "dsa_with_loss" else 0.0,
    ), lambda result: (result[0].sum() + result[1]).backward()  # fmt: skip


def summed(out):
    out.sum().backward()


def named_budget(forward, **settings):
    with use_backend("torch_dense", memory_budget=1, **settings), pytest.raises(ConfigError) as caught:
        forward()
    return int(str(caught.value).rpartition("Set memory_budget to at least ")[2].rstrip("."))


SETTINGS = {
    "auto": {},
    "one row": {"query_chunk": 1},
    "in one piece": {"query_chunk": "off"},
    "more than all rows": {"query_chunk": 99},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("which", WHICH)
def test_the_budget_that_is_named_does_for_the_whole_operation_and_a_byte_less_for_none(
    registry, which, grad, batch, settings
):
    forward, backward = operation(which, grad, batch)
    kept = SETTINGS[settings]
    needed = named_budget(forward, **kept)
    with use_backend("torch_dense", memory_budget=needed - 1, **kept), pytest.raises(ConfigError) as caught:
        forward()
    assert str(caught.value).endswith(f"at least {needed}.")
    with use_backend("torch_dense", memory_budget=needed, **kept):
        result = forward()
        if grad:
            backward(result)


def costs_of_two_rows():
    """What a row costs, and what one of a chunk hands over beside it: here far more than the row itself."""
    buffer, size = 1 << 10, 1 << 10
    fake = FakeBackend(
        "costly", ["attention_forward"], scratch=lambda call: Scratch(per_row=(("buffer", buffer),))
    )
    query, key = make.normal(2, 1, 1, size), make.normal(KEYS, 1, 1, size)
    ids = make.ids(1, 2, WIDTH, KEYS)

    def attend(rows):
        return run_fused_absorbed_sparse_attention(None, query[:rows], key, ids[:, :rows], 0.1, size)

    return fake, attend, (size + 1) * query.element_size()


def test_few_rows_may_cost_less_in_one_piece_unless_a_setting_cuts_them():
    fake, attend, handed_over = costs_of_two_rows()
    with isolated_registry(fake.spec):

        def needed(rows, **settings):
            with use_backend(memory_budget=1, **settings), pytest.raises(ConfigError) as caught:
                attend(rows)
            named = int(str(caught.value).rpartition("at least ")[2].rstrip("."))
            with use_backend(memory_budget=named - 1, **settings), pytest.raises(ConfigError):
                attend(rows)
            with use_backend(memory_budget=named, **settings):
                attend(rows)
            return named

        row = needed(1)
        assert needed(2) == 2 * row < row + handed_over
        assert needed(2, query_chunk=1) == row + handed_over
        assert needed(2, query_chunk=2) == 2 * row
        assert needed(2, query_chunk="off") == needed(1, query_chunk=1) == row


@pytest.mark.parametrize("rows", [1, 3])
def test_a_block_size_is_heeded_in_the_budget_that_is_named(registry, rows):
    q, k, w = make.normal(rows, 1, 2, 8), make.normal(KEYS, 1, 8, seed=1), make.normal(rows, 1, 2, seed=2)

    def forward():
        return run_fused_qk_topk(None, q, k, w, WIDTH, block_size=1)

    needed = named_budget(forward)
    with use_backend("torch_dense", memory_budget=needed - 1), pytest.raises(ConfigError):
        forward()
    with use_backend("torch_dense", memory_budget=needed):
        forward()


@pytest.mark.parametrize(
    ("which", "stage"), [("attention", "attention_forward"), ("gqa", "gqa_forward"), ("topk", "indexer_topk")]
)
def test_the_error_names_stage_backend_and_costs(registry, which, stage):
    forward, _ = operation(which, grad=False)
    with use_backend("torch_dense", memory_budget=10), pytest.raises(ConfigError) as caught:
        forward()
    assert f"memory_budget: got 10 bytes, but one row of {stage} on torch_dense needs" in str(caught.value)


@pytest.mark.parametrize("which", ["attention", "gqa"])
def test_a_backward_that_does_not_fit_is_refused_before_the_forward_has_run(registry, which):
    forward, _ = operation(which, grad=False)
    training, _ = operation(which, grad=True)
    with (
        use_backend("torch_dense", memory_budget=named_budget(forward)),
        pytest.raises(ConfigError, match=r"one row of (attention|gqa)_backward on torch_dense needs"),
    ):
        training()


def test_a_later_stage_that_needs_most_is_the_one_that_is_named(registry):
    forward, _ = operation("dsa_with_loss", grad=True)
    with use_backend("torch_dense", memory_budget=10), pytest.raises(ConfigError) as caught:
        forward()
    assert "one row of indexer_target on torch_dense and indexer_loss on torch_dense needs" in str(
        caught.value
    )


def test_a_setting_that_is_wrong_in_another_way_keeps_its_own_error(registry):
    forward, _ = operation("dsa", grad=False)
    with pytest.raises(ConfigError, match="memory_budget: got 0"), use_backend(memory_budget=0):
        forward()


def test_compiled_code_names_the_budget_of_the_stage_that_was_refused(registry):
    forward, _ = operation("topk_with_loss", grad=False)
    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    with (
        use_backend("torch_dense", memory_budget=1),
        pytest.raises(ConfigError, match="one row of indexer_topk on"),
    ):
        compiled()
