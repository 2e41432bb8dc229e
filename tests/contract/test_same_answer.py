"""The same call gives the same answer whatever stands beside it: grad mode, chunks, budget, batch, autocast."""

from __future__ import annotations

import itertools

import pytest
import torch
from contract import make

from dsa_dispatch import (
    run_fused_absorbed_sparse_attention,
    run_fused_dsa_attention,
    run_fused_gqa_sparse_attention,
    run_fused_qk_topk,
    run_fused_qk_topk_with_loss,
    stats,
    use_backend,
)
from dsa_dispatch.testing import FakeBackend, assert_backend_ran, isolated_registry

ROWS, KEYS, TOPK = 23, 70, 9
TYPES = [torch.float32, torch.bfloat16, torch.float64]


def indexer(batch, dtype, grad=False):
    return (
        make.normal(ROWS, batch, 3, 20, seed=1, dtype=dtype, grad=grad),
        make.normal(KEYS, batch, 20, seed=2, dtype=dtype, grad=grad),
        make.normal(ROWS, batch, 3, seed=3, dtype=dtype, grad=grad),
    )


def item(tensors, index):
    return [tensor[:, index : index + 1] for tensor in tensors]


def selected(selection):
    return selection.indices.sort(-1).values, selection.length


def same_selection(one, other):
    for first, second in zip(selected(one), selected(other), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", TYPES)
def test_selection_with_and_without_gradients(dtype):
    plain = run_fused_qk_topk(None, *indexer(2, dtype), TOPK)
    with assert_backend_ran("torch_dense", "indexer_topk"):
        recorded = run_fused_qk_topk(None, *indexer(2, dtype, grad=True), TOPK)
    with torch.no_grad():
        unrecorded = run_fused_qk_topk(None, *indexer(2, dtype, grad=True), TOPK)
    same_selection(plain, recorded)
    same_selection(plain, unrecorded)
    query, key = make.normal(ROWS, 2, 2, 4, dtype=dtype), make.normal(KEYS, 2, 1, 4, dtype=dtype)
    with_loss = run_fused_qk_topk_with_loss(
        None, *indexer(2, dtype, grad=True), TOPK, None, None, None, query, key, 0.5, 1.0
    )
    same_selection(plain, with_loss)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_selection_in_one_chunk_or_many(dtype, deterministic):
    inputs = indexer(2, dtype)
    whole = run_fused_qk_topk(None, *inputs, TOPK)
    for settings, block in (
        ({"query_chunk": 1}, None), ({"query_chunk": 7}, None), ({"memory_budget": 9000}, None), ({}, 5),
        ({"query_chunk": "off"}, None),
    ):  # fmt: skip
        with (
            use_backend("torch_dense", deterministic=deterministic, **settings),
            assert_backend_ran("torch_dense", "indexer_topk"),
        ):
            same_selection(whole, run_fused_qk_topk(None, *inputs, TOPK, block_size=block))


@pytest.mark.parametrize("dtype", TYPES)
def test_selection_alone_or_in_a_batch_and_of_a_row_alone_or_beside_others(dtype):
    inputs = indexer(3, dtype)
    together = run_fused_qk_topk(None, *inputs, TOPK)
    ends = torch.arange(KEYS - ROWS + 1, KEYS + 1, dtype=torch.int32)
    for index in range(3):
        alone = run_fused_qk_topk(None, *item(inputs, index), TOPK)
        assert torch.equal(alone.indices.sort(-1).values[0], together.indices.sort(-1).values[index])
        q, k, w = item(inputs, index)
        for row in (0, 7, ROWS - 1):
            one = slice(row, row + 1)
            single = run_fused_qk_topk(None, q[one], k, w[one], TOPK, 0 * ends[one], ends[one])
            assert torch.equal(single.indices.sort(-1).values[0, 0], alone.indices.sort(-1).values[0, row])


class Absorbed:
    def __init__(self, dtype, batch=3):
        self.inputs = (
            make.normal(ROWS, batch, 4, 24, seed=1, dtype=dtype, grad=True),
            make.normal(KEYS, batch, 1, 24, seed=2, dtype=dtype, grad=True),
        )
        self.ids = make.ids(batch, ROWS, 33, KEYS)

    def run(self, inputs=None, ids=None):
        inputs = self.inputs if inputs is None else inputs
        ids = self.ids if ids is None else ids
        return run_fused_absorbed_sparse_attention(None, *inputs, ids, 0.2, 16, return_lse=True)


class Grouped(Absorbed):
    def __init__(self, dtype, batch=3):
        self.inputs = (
            make.normal(ROWS, batch, 4, 24, seed=1, dtype=dtype, grad=True),
            make.normal(KEYS, batch, 2, 24, seed=2, dtype=dtype, grad=True),
            make.normal(KEYS, batch, 2, 10, seed=3, dtype=dtype, grad=True),
        )
        self.ids = make.ids(batch, ROWS, 33, KEYS)

    def run(self, inputs=None, ids=None):
        inputs = self.inputs if inputs is None else inputs
        ids = self.ids if ids is None else ids
        return run_fused_gqa_sparse_attention(None, *inputs, ids, 0.2, return_lse=True)


BOTH = pytest.mark.parametrize("attention", [Absorbed, Grouped])


def answer(case, inputs=None, ids=None):
    """Output, lse, gradients. The upstream gradient of an item does not depend on the batch it is in."""
    inputs = case.inputs if inputs is None else inputs
    out, lse = case.run(inputs, ids)
    upstream = make.normal(ROWS, 1, *out.shape[2:], seed=7, dtype=out.dtype).expand(out.shape)
    return out.detach(), lse, *torch.autograd.grad(out, inputs, upstream)


@BOTH
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_is_bitwise_over_grad_mode_and_repeated_calls(attention, dtype):
    case = attention(dtype)
    first, second = answer(case), answer(case)
    with torch.no_grad():
        unrecorded = case.run()
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(first, unrecorded, strict=False):
        assert torch.equal(one, other)


CHUNKS = [{"query_chunk": 1}, {"query_chunk": 5}, {"memory_budget": 40_000}, {"query_chunk": "off"}]


@BOTH
@pytest.mark.parametrize("settings", CHUNKS, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_over_chunks(attention, dtype, settings):
    case = attention(dtype)
    whole = answer(case)
    with use_backend("torch_dense", **settings), assert_backend_ran("torch_dense"):
        chunked = answer(case)
    # The contract's bound: 1e-6 in fp32, 4e-3 in bf16; fp64 by the same rounding is far below.
    bound = 4e-3 if dtype == torch.bfloat16 else 1e-6
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@BOTH
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_over_batch(attention, dtype):
    case = attention(dtype)
    together = answer(case)
    bound = 4e-3 if dtype == torch.bfloat16 else 1e-6
    for index in range(3):
        alone = answer(
            case, [tensor[:, index : index + 1] for tensor in case.inputs], case.ids[index : index + 1]
        )
        for place, (one, other) in enumerate(zip(alone, in_item(together, index), strict=True)):
            torch.testing.assert_close(one, other, rtol=bound, atol=bound, msg=str(place))


def in_item(parts, index):
    out, lse, *gradients = parts
    one = slice(index, index + 1)
    return out[:, one], lse[one], *(gradient[:, one] for gradient in gradients)


@BOTH
@pytest.mark.parametrize("dtype", TYPES)
def test_deterministic_attention_is_bitwise_over_chunks_budget_and_batch(attention, dtype):
    case = attention(dtype)
    with use_backend("torch_dense", deterministic=True):
        whole = answer(case)
    for settings in CHUNKS:
        with use_backend("torch_dense", deterministic=True, **settings):
            for one, other in zip(whole, answer(case), strict=True):
                assert torch.equal(one, other), settings
    with use_backend("torch_dense", deterministic=True):
        for index in range(3):
            alone = answer(
                case, [tensor[:, index : index + 1] for tensor in case.inputs], case.ids[index : index + 1]
            )
            for one, other in zip(alone, in_item(whole, index), strict=True):
                assert torch.equal(one, other)


def test_torchs_global_switch_is_the_default_of_deterministic():
    case = Absorbed(torch.float32)
    with use_backend("torch_dense", deterministic=True):
        asked = answer(case)
    torch.use_deterministic_algorithms(True)
    try:
        switched = answer(case)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(asked, switched, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(
    "settings", [{"query_chunk": 1}, {"query_chunk": 5}, {"memory_budget": 60_000}], ids=str
)
def test_the_loss_over_chunks(settings, sparse):
    def loss():
        inputs = indexer(2, torch.float64, grad=True)
        query, key = make.normal(ROWS, 2, 2, 4), make.normal(KEYS, 2, 1, 4, seed=4)
        value = run_fused_qk_topk_with_loss(
            None, *inputs, TOPK, None, None, None, query, key, 0.5, 1.0, sparse_loss=sparse
        ).loss
        return value.detach(), *torch.autograd.grad(value, inputs)

    whole = loss()
    with use_backend("torch_dense", **settings):
        chunked = loss()
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)  # fp64: only the order of sums differs


def everything(dtype):
    given = {
        "query": make.normal(6, 2, 2, 8, seed=1, dtype=dtype, grad=True),
        "key": make.normal(9, 2, 1, 8, seed=2, dtype=dtype, grad=True),
        "up_v_weight": make.normal(2, 3, 6, seed=3, dtype=dtype, grad=True),
        "q_indexer": make.normal(6, 2, 2, 8, seed=4, dtype=dtype, grad=True),
        "k_indexer": make.normal(9, 2, 8, seed=5, dtype=dtype, grad=True),
        "indexer_weights": make.normal(6, 2, 2, seed=6, dtype=dtype, grad=True),
    }
    parts = run_fused_dsa_attention(config=None, **given, indexer_topk=4, softmax_scale=0.4, loss_coeff=0.5)
    return list(given.values()), parts


NARROW = pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])


@NARROW
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_changes_nothing_of_dsa_attention(dtype, narrow):
    inputs, plain = everything(dtype)
    with torch.autocast("cpu", dtype=narrow):
        others, inside = everything(dtype)
    # The backward outside, as torch asks for: the projection in it is torch's own product.
    gradients = [
        torch.autograd.grad(out.square().sum() + loss, leaves)
        for leaves, (out, loss) in ((inputs, plain), (others, inside))
    ]
    for one, other in zip((*plain, *gradients[0]), (*inside, *gradients[1]), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@BOTH
@NARROW
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_changes_nothing_of_an_attention_even_around_its_backward(attention, dtype, narrow):
    case = attention(dtype)
    plain = answer(case)
    with torch.autocast("cpu", dtype=narrow):
        inside = answer(case)
    for one, other in zip(plain, inside, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("grad", [False, True])
def test_a_kernel_runs_without_autocast_and_unrecorded(grad):
    from dsa_backends.torch_dense.attention_backward import attention_backward
    from dsa_backends.torch_dense.attention_forward import attention_forward

    seen = []

    def watched(kernel):
        def run(*args, **kwargs):
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return kernel(*args, **kwargs)

        return run

    kernels = {"attention_forward": attention_forward, "attention_backward": attention_backward}
    fake = FakeBackend(
        "fake", tuple(kernels), replace={stage: watched(kernel) for stage, kernel in kernels.items()}
    )
    case = Absorbed(torch.float32)
    with (
        isolated_registry(fake.spec),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.set_grad_enabled(grad),
    ):
        out, _ = case.run()
        if grad:
            torch.autograd.grad(out.sum(), case.inputs, create_graph=True)
    assert seen == [(False, False)] * (2 if grad else 1)


def test_a_call_counts_once_whatever_its_chunks(registry):
    case = Absorbed(torch.float32)
    for settings in ({"query_chunk": 2}, {"query_chunk": "off"}):
        before = stats().ran("attention_forward").get("torch_dense", 0)
        with use_backend("torch_dense", **settings):
            case.run()
        assert stats().ran("attention_forward")["torch_dense"] == before + 1


@pytest.mark.parametrize("need", list(itertools.product([False, True], repeat=2)))
def test_gradients_of_some_inputs_are_those_of_all(need):
    case = Absorbed(torch.float32)
    _, _, *wanted = answer(case)
    inputs = [tensor.detach().requires_grad_(it) for tensor, it in zip(case.inputs, need, strict=True)]
    out, _ = case.run(inputs)
    assert out.requires_grad == any(need)
    if any(need):
        out.backward(make.normal(ROWS, 1, *out.shape[2:], seed=7, dtype=out.dtype).expand(out.shape))
    for tensor, gradient, it in zip(inputs, wanted, need, strict=True):
        assert tensor.grad is None if not it else torch.equal(tensor.grad, gradient)
