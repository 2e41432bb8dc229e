"""What a backend hands back is looked at, and what the caller gets is its own."""

from __future__ import annotations

import pytest
import torch
from contract import make
from torch.autograd import forward_ad

import dsa_dispatch as dsa
from dsa_dispatch.errors import ConfigError, InvalidInputError, PluginError
from dsa_dispatch.testing import FakeBackend, isolated_registry

IDS = make.ids(1, 4, 3, 7)


def operands():
    return make.normal(4, 1, 2, 6, grad=True), make.normal(7, 1, 1, 6, seed=1, grad=True)


def attend(query, key):
    return dsa.run_fused_absorbed_sparse_attention(None, query, key, IDS, 0.4, 4)


def right(q, v_channels):
    return q.new_zeros(*q.shape[:2], v_channels), q.new_zeros(q.shape[:2])


FORWARD_FAULTS = {
    "out is [4, 1, 4] torch.float64, the contract asks for [4, 2, 4]": lambda out, lse, q: (out[:, :1], lse),
    "out is [4, 2, 4] torch.float32": lambda out, lse, q: (out.float(), lse),
    "lse is [8] torch.float64": lambda out, lse, q: (out, lse.reshape(-1)),
    "lse is [4, 2] torch.bfloat16": lambda out, lse, q: (out, lse.bfloat16()),
    "out is None": lambda out, lse, q: (None, lse),
    "returned [4, 2, 4] torch.float64, the contract asks for (out, lse)": lambda out, lse, q: out,
    "out shares memory with an input": lambda out, lse, q: (q[..., :4], lse),
}


@pytest.mark.parametrize("text", FORWARD_FAULTS)
def test_a_wrong_result_of_a_forward_is_named(text):
    def wrong(q, kv, ids, length, *, v_channels, **kwargs):
        return FORWARD_FAULTS[text](*right(q, v_channels), q)

    fake = FakeBackend("wrong", ("attention_forward",), replace={"attention_forward": wrong})
    with isolated_registry(fake.spec), pytest.raises(PluginError) as caught, torch.no_grad():
        attend(*operands())
    assert "backend wrong, stage attention_forward: " in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "text"),
    [(lambda q: None, "dq is None"), (lambda q: q[..., :3].clone(), "dq is [4, 2, 3]")],
    ids=["missing", "narrow"],
)
def test_a_wrong_result_of_a_backward_is_named(answer, text):
    def wrong(q, *args, **kwargs):
        return answer(q)

    fake = FakeBackend("wrong", replace={"attention_backward": wrong})
    with isolated_registry(fake.spec):
        out = attend(*operands())
        with pytest.raises(PluginError, match="backend wrong, stage attention_backward") as caught:
            out.sum().backward()
    assert text in str(caught.value)


@pytest.mark.parametrize("chunk", ["off", 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_an_output_is_no_view_whatever_batch_and_chunks(registry, batch, chunk):
    query, key = make.normal(4, batch, 2, 6, grad=True), make.normal(7, batch, 1, 6, grad=True)
    ids = make.ids(batch, 4, 3, 7)
    with dsa.use_backend(query_chunk=chunk):
        out, lse = dsa.run_fused_absorbed_sparse_attention(None, query, key, ids, 0.4, 4, return_lse=True)
        grouped = dsa.run_fused_gqa_sparse_attention(None, query, key, key[..., :4], ids, 0.4)
    assert not any(tensor._is_view() for tensor in (out, lse, grouped))
    out += 1  # autograd refuses this for a view


def test_the_projection_and_its_backward_are_out_of_autocasts_reach(registry):
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (4, 1, 2, 8), "key": (6, 1, 1, 8), "up_v_weight": (2, 3, 8)}
    inputs = {
        name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()
    }
    indexer = {
        "q_indexer": torch.randn(4, 1, 2, 8, generator=generator),
        "k_indexer": torch.randn(6, 1, 8, generator=generator),
        "indexer_weights": torch.randn(4, 1, 2, generator=generator),
    }

    def gradients(autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, _ = dsa.run_fused_dsa_attention(
                config=None, **inputs, **indexer, indexer_topk=3, softmax_scale=0.3
            )
            return torch.autograd.grad(out.square().sum(), list(inputs.values()))

    assert all(torch.equal(*pair) for pair in zip(gradients(True), gradients(False), strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # what torch's own jvp warns of
def test_a_forward_mode_derivative_is_refused_and_never_a_silent_zero(registry):
    query, key = (tensor.detach() for tensor in operands())
    with pytest.raises(InvalidInputError, match=r"query is traced by torch\.func"):
        torch.func.jvp(lambda q: attend(q, key), (query,), (torch.ones_like(query),))
    with pytest.raises(InvalidInputError, match=r"query is traced by torch\.func"):
        torch.func.grad(lambda q: attend(q, key).sum())(query)
    with (
        forward_ad.dual_level(),
        pytest.raises(InvalidInputError, match="query carries a forward-mode tangent"),
    ):
        attend(forward_ad.make_dual(query, torch.ones_like(query)), key)


@pytest.mark.parametrize("name", ["query", "key", "topk_indices"])
def test_a_missing_tensor_is_named(registry, name):
    query, key = operands()
    arguments = {"query": query, "key": key, "topk_indices": IDS, name: None}
    with pytest.raises(InvalidInputError, match=f"{name}: expected a torch.Tensor, got None"):
        dsa.run_fused_absorbed_sparse_attention(None, **arguments, softmax_scale=0.4, v_channels=4)


def test_tensors_that_are_not_strided_are_refused(registry):
    query, key = operands()
    with pytest.raises(InvalidInputError, match="query: got a sparse_coo tensor"):
        attend(query.detach().to_sparse(), key)


@pytest.mark.parametrize("scale", [10**400, 1e39, float("inf"), float("nan")])
def test_a_scale_beyond_fp32_is_refused(registry, scale):
    query, key = operands()
    with pytest.raises(InvalidInputError, match="softmax_scale: got"):
        dsa.run_fused_absorbed_sparse_attention(None, query, key, IDS, scale, 4)


@pytest.mark.parametrize("topk", [2**31, 2**63])
def test_a_width_beyond_int32_is_refused(registry, topk):
    q, k, weights = make.normal(2, 1, 2, 4), make.normal(3, 1, 4), make.normal(2, 1, 2)
    with pytest.raises(InvalidInputError, match="index_topk: got"):
        dsa.run_fused_qk_topk(None, q, k, weights, topk)


def test_a_budget_below_a_row_of_the_backward_is_refused_in_the_forward():
    def costly(call):
        return dsa.Scratch(per_row=(("much", 1 << 20),))

    forward = FakeBackend("forward", ("attention_forward",))
    backward = FakeBackend("backward", ("attention_backward",), scratch=costly)
    with isolated_registry(forward.spec, backward.spec), dsa.use_backend(memory_budget="64 KiB"):
        with torch.no_grad():
            attend(*operands())
        with pytest.raises(ConfigError, match="one row of attention_backward on backward needs"):
            attend(*operands())


def test_an_exception_of_a_scratch_for_these_lengths_names_its_backend():
    def broken(call):
        if call.rows > 1:
            raise ZeroDivisionError("many rows")
        return dsa.Scratch()

    fake = FakeBackend("broken", ("attention_forward",), scratch=broken)
    with isolated_registry(fake.spec), pytest.raises(ZeroDivisionError) as caught, torch.no_grad():
        attend(*operands())
    assert caught.value.__notes__ == ["raised by the scratch of backend broken, stage attention_forward"]


def test_a_scratch_that_always_raises_is_a_decline_and_the_next_backend_runs():
    def broken(call):
        raise ZeroDivisionError("no table")

    fake = FakeBackend("broken", ("attention_forward",), scratch=broken)
    with isolated_registry(fake.spec, installed=True), dsa.use_backend("broken"), torch.no_grad():
        attend(*operands())
        assert dict(dsa.stats().ran("attention_forward")) == {"torch_dense": 1}
