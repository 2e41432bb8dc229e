"""The reference backend on a CUDA device: right, the same answer in any chunk, and within the budget it planned."""

from __future__ import annotations

import pytest
import torch

import dsa_dispatch as dsa
from dsa_backends.torch_dense.spec import SPEC
from dsa_dispatch._cli.check import LIMITS
from dsa_dispatch._registry import selftest
from dsa_dispatch._registry.availability import resolve_reference
from dsa_dispatch.testing import assert_backend_ran

CUDA = torch.device("cuda", 0)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def reference_only():
    with dsa.use_backend("torch_dense", fallback="error"):
        yield


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("stage", SPEC.stages)
def test_every_stage_agrees_with_dense_formulas(stage, dtype):
    function = resolve_reference(SPEC.stages[stage].function)
    errors = selftest.measure(function, SPEC.stages[stage].capability, stage, CUDA, dtype, large=True)
    assert errors
    assert max(errors.values()) <= LIMITS[dtype]


def indexer_inputs(rows, keys, batch=1, heads=8, channels=64, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((rows, batch, heads, channels), (keys, batch, channels), (rows, batch, heads))
    return [torch.randn(shape, device=CUDA, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_selection_is_the_same_bits_in_chunks_and_in_a_batch(dtype):
    q, k, w = indexer_inputs(300, 5000, batch=2, dtype=dtype)
    with assert_backend_ran("torch_dense", "indexer_topk"):
        whole = dsa.run_fused_qk_topk(None, q, k, w, 257)
    chunked = dsa.run_fused_qk_topk(None, q, k, w, 257, block_size=37)
    alone = dsa.run_fused_qk_topk(None, q[:, 1:], k[:, 1:], w[:, 1:], 257)
    order = whole.indices.sort(-1).values
    assert torch.equal(order, chunked.indices.sort(-1).values)
    assert torch.equal(order[1:], alone.indices.sort(-1).values)
    assert torch.equal(whole.length, chunked.length)


def test_equal_keys_score_equally_wherever_they_stand():
    q, k, w = indexer_inputs(64, 3000)
    twins = torch.cat((k, k))
    starts, ends = torch.zeros(64, dtype=torch.int32, device=CUDA), torch.full((64,), 6000, device=CUDA)
    picked = dsa.run_fused_qk_topk(None, q, twins, w, 513, starts, ends.int()).indices[0]
    for row in picked.tolist():
        chosen = set(row)
        assert all(key - 3000 in chosen for key in chosen if key >= 3000)


@pytest.mark.parametrize("budget", [64 * MIB, 512 * MIB])
def test_peak_memory_stays_within_the_plan(budget):
    rows, keys, heads, width = 4096, 4096, 16, 1024
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, device=CUDA, generator=generator).bfloat16()

    query, key = draw(rows, 1, heads, 576).requires_grad_(), draw(keys, 1, 1, 576).requires_grad_()
    ids = torch.randint(-1, keys, (1, rows, width), device=CUDA, dtype=torch.int32)
    accumulator = keys * 576 * 4
    outputs = rows * heads * (512 * 2 + 4)
    # Products through cuBLAS may take a workspace of its own, allocated once per handle and stream.
    slack = 64 * MIB
    with dsa.use_backend(memory_budget=budget):
        warm = dsa.run_fused_absorbed_sparse_attention(None, query[:8], key, ids[:, :8], 0.05, 512)
        warm.sum().backward()
        del warm
        query.grad = key.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = dsa.run_fused_absorbed_sparse_attention(None, query, key, ids, 0.05, 512)
        forward = torch.cuda.max_memory_allocated() - before
        upstream = torch.randn_like(out)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        out.backward(upstream)
        backward = torch.cuda.max_memory_allocated() - start
    gradients = 2 * rows * heads * 576 * 2 + 2 * keys * 576 * 2
    assert forward <= budget + outputs + slack
    assert backward <= budget + accumulator + gradients + slack


def test_deterministic_attention_is_bitwise_over_chunks():
    generator = torch.Generator("cuda").manual_seed(0)
    query = torch.randn(70, 2, 5, 96, device=CUDA, generator=generator, requires_grad=True)
    key = torch.randn(90, 2, 1, 96, device=CUDA, generator=generator, requires_grad=True)
    ids = torch.randint(-1, 90, (2, 70, 33), device=CUDA, dtype=torch.int32)
    results = []
    for chunk in ("off", 7):
        with dsa.use_backend(deterministic=True, query_chunk=chunk):
            out, lse = dsa.run_fused_absorbed_sparse_attention(
                None, query, key, ids, 0.1, 64, return_lse=True
            )
            results.append((out, lse, *torch.autograd.grad(out.square().sum(), (query, key))))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
