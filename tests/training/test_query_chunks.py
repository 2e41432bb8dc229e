"""``query_chunk``: one decision, then chunks of rows inside the op; equal results, and no chunk outlives its turn."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from contract import make
from torch.multiprocessing.reductions import StorageWeakRef

import dsa_dispatch as dsa
from dsa_backends.torch_dense.attention_backward import attention_backward
from dsa_backends.torch_dense.attention_forward import attention_forward
from dsa_dispatch import Heads
from dsa_dispatch.errors import ConfigError
from dsa_dispatch.testing import FakeBackend, isolated_registry
from dsa_dispatch.testing.fakes import reference_capability

ROWS, BATCH, WIDTH, SCALE, V = 37, 2, 5, 0.4, 4
ATTENTION = ("attention_forward", "attention_backward")


def operands(dtype=torch.float64):
    query = make.normal(ROWS, BATCH, 3, 6, seed=1, dtype=dtype, grad=True)
    key = make.normal(ROWS, BATCH, 1, 6, seed=2, dtype=dtype, grad=True)
    indices = make.ids(BATCH, ROWS, WIDTH, ROWS, seed=3)
    length = torch.arange(BATCH * ROWS).reshape(BATCH, ROWS) % (WIDTH + 2)
    return query, key, indices, length


def attended(query, key, indices, length, config=None):
    """``(out, lse, dq, dkey)``."""
    out, lse = dsa.run_fused_absorbed_sparse_attention(
        config, query, key, indices, SCALE, V, length, return_lse=True
    )
    return out, lse, *torch.autograd.grad(out.square().sum(), (query, key))


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("with_length", [False, True])
@pytest.mark.parametrize("chunk", [1, 8, ROWS, 50, "auto", "off"])
def test_chunked_equals_one_call_with_a_ragged_last_chunk_and_sliced_lengths(chunk, with_length):
    query, key, indices, length = operands()
    length = length if with_length else None
    wanted = attended(query, key, indices, length, {"query_chunk": "off"})
    got = attended(query, key, indices, length, {"query_chunk": chunk})
    for mine, other in zip(got, wanted, strict=True):
        # fp64: only the sum into the keys changes its order
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("registry")
def test_a_chunked_selection_is_the_same_ids_bit_for_bit():
    q, k = make.normal(ROWS, BATCH, 2, 4, seed=1), make.normal(ROWS, BATCH, 4, seed=2)
    weights = make.normal(ROWS, BATCH, 2, seed=3)
    whole = dsa.run_fused_qk_topk({"query_chunk": "off"}, q, k, weights, WIDTH)
    for chunk in (1, 8, 50):
        part = dsa.run_fused_qk_topk({"query_chunk": chunk}, q, k, weights, WIDTH)
        assert torch.equal(part.indices.sort().values, whole.indices.sort().values)
        assert torch.equal(part.length, whole.length)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("sparse", [True, False])
def test_a_chunked_loss_equals_one_call(sparse):
    q, k, weights = (
        make.normal(ROWS, BATCH, 2, 4, seed=1, grad=True), make.normal(ROWS, BATCH, 4, seed=2, grad=True),
        make.normal(ROWS, BATCH, 2, seed=3, grad=True),
    )  # fmt: skip
    query, key, _, _ = operands()

    def learnt(chunk):
        loss = dsa.run_fused_qk_topk_with_loss(
            {"query_chunk": chunk}, q, k, weights, WIDTH, None, None, None, query, key, SCALE, 0.5,
            sparse_loss=sparse,
        ).loss  # fmt: skip
        return loss, *torch.autograd.grad(loss, (q, k, weights))

    torch.testing.assert_close(learnt(8), learnt("off"), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("registry")
def test_all_chunks_run_under_one_decision():
    query, key, indices, length = operands()
    dsa.reset_stats()
    attended(query, key, indices, length, {"query_chunk": 8})
    assert dict(dsa.stats().decisions) == {"run_fused_absorbed_sparse_attention": 1}
    assert dict(dsa.stats().misses) == {"run_fused_absorbed_sparse_attention": 1}
    assert dsa.stats().ran("attention_forward") == {"torch_dense": 1}, "a run is counted once, not per chunk"


class Watched:
    """A backend that pads 3 heads to 16, and watches what its kernels are given and give."""

    def __init__(self):
        self.alive, self.accumulators, self.rows = [], [], {stage: [] for stage in ATTENTION}
        self.most_alive = 0
        capability = dataclasses.replace(reference_capability(), heads=Heads(multiple_of=16, pad=True))
        self.fake = FakeBackend(
            "watched", dict.fromkeys(ATTENTION, capability),
            replace={"attention_forward": self.forward, "attention_backward": self.backward},
        )  # fmt: skip

    def watch(self, tensor):
        # The storage and not the tensor: a slice of it would keep the memory and let the tensor go.
        self.alive.append(StorageWeakRef(tensor.untyped_storage()))

    def count(self):
        self.most_alive = max(self.most_alive, sum(not ref.expired() for ref in self.alive))

    def forward(self, q, kv, indices, length, **kwargs):
        self.count()
        assert q.shape[1] == 16
        self.rows["attention_forward"].append(q.shape[0])
        out, lse = attention_forward(q, kv, indices, length, **kwargs)
        self.watch(q)
        self.watch(out)
        return out, lse

    def backward(self, q, kv, indices, length, out, lse, dout, *, dkv, **kwargs):
        self.count()
        self.rows["attention_backward"].append(q.shape[0])
        self.accumulators.append((dkv.data_ptr(), dkv.dtype))
        dq = attention_backward(q, kv, indices, length, out, lse, dout, dkv=dkv, **kwargs)
        self.watch(q)
        self.watch(dq)
        return dq


@pytest.fixture
def watched():
    watched = Watched()
    with isolated_registry(watched.fake.spec, installed=True), dsa.use_backend("watched", query_chunk=8):
        yield watched


def test_the_padded_query_and_the_output_of_one_chunk_at_a_time_are_alive(watched):
    query, key, indices, length = operands()
    attended(query, key, indices, length)
    total = BATCH * ROWS
    wanted = [8] * (total // 8) + [total % 8]
    assert watched.rows == {"attention_forward": wanted, "attention_backward": wanted}
    assert watched.most_alive == 0, "nothing of a chunk is left when the next one begins"


def test_key_gradients_of_all_chunks_accumulate_into_one_fp32_buffer(watched):
    query, key, indices, length = operands(torch.bfloat16)
    attended(query, key, indices, length)
    assert len(watched.accumulators) > 1
    ((_, dtype),) = set(watched.accumulators)
    assert dtype == torch.float32


def test_a_forward_without_grad_only_chunks(watched):
    query, key, indices, length = operands()
    for context, tensors in (
        (torch.no_grad(), (query, key)),
        (torch.enable_grad(), (query.detach(), key.detach())),
    ):
        watched.rows["attention_forward"].clear()
        with context, torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail):
            out = dsa.run_fused_absorbed_sparse_attention(None, *tensors, indices, SCALE, V, length)
        assert len(watched.rows["attention_forward"]) == -(-BATCH * ROWS // 8)
        assert not watched.rows["attention_backward"]
        assert not out.requires_grad


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("settings", "outcome", "why"),
    [
        ({"query_chunk": 8}, "used", "74 rows in chunks of 8 (query_chunk=8)"),
        ({"query_chunk": 100}, "declined", "74 rows in one piece (query_chunk=100)"),
        ({"query_chunk": "auto"}, "declined", "74 rows in one piece (memory_budget="),
        ({"query_chunk": "auto", "memory_budget": 4000}, "used", "(memory_budget=4000)"),
        ({"query_chunk": "off"}, "declined", "74 rows in one piece (query_chunk=off)"),
    ],
)  # fmt: skip
def test_both_outcomes_are_in_the_stats_and_said_once(settings, outcome, why, caplog):
    query, key, indices, length = operands()
    dsa.reset_stats()
    with caplog.at_level(logging.INFO, logger="dsa_dispatch"):
        attended(query, key, indices, length, settings)
        attended(query, key, indices, length, settings)
    assert dict(dsa.stats().chunking) == {(stage, outcome): 2 for stage in ATTENTION}
    said = [record.getMessage() for record in caplog.records if "query chunks" in record.getMessage()]
    assert len(said) == 2, "once for the forward, once for the backward"
    for stage, message in zip(ATTENTION, said, strict=True):
        assert message.startswith(f"{stage} on torch_dense: query chunks {outcome}")
        assert why in message


@pytest.mark.usefixtures("registry")
def test_a_budget_below_one_row_names_the_bytes_it_needs():
    query, key, indices, length = operands()
    with pytest.raises(ConfigError, match="Set memory_budget to at least"):
        attended(query, key, indices, length, {"memory_budget": 10})
