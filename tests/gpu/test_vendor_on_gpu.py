"""cuDNN's and FlashMLA's kernels on a GPU: the contract, each other's company, what explain says, and memory."""

from __future__ import annotations

import math

import pytest
import torch

import dsa_dispatch as dsa
from dsa_backends.cudnn_dsa import attention_backward as cudnn_backward
from dsa_backends.cudnn_dsa import indexer_loss as cudnn_loss
from dsa_backends.cudnn_dsa import indexer_topk as cudnn_topk
from dsa_backends.cudnn_dsa.spec import SPEC as CUDNN
from dsa_backends.flash_mla import attention_forward as flash_forward
from dsa_backends.flash_mla.spec import SPEC as FLASHMLA
from dsa_dispatch._call import CallSpec, RowLayout, StageOptions
from dsa_dispatch.errors import BackendDeclined
from dsa_dispatch.testing import BackendConformance, assert_backend_ran

CUDA = torch.device("cuda")
MIB = 1 << 20
SCALE = 576**-0.5
LIMITS = {"out": 4e-3, "dq": 6e-3, "dkv": 6e-3}
"""Of the contract, relative to fp64."""


def reason_to_skip() -> str:
    """Why a vendor's kernel cannot run here; "" where both can."""
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    for provider in (flash_forward.provider, cudnn_backward.provider):
        try:
            provider()
        except BackendDeclined as declined:
            return str(declined)
    return ""


MISSING = reason_to_skip()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


class OnGpu(BackendConformance):
    @classmethod
    def checks(cls):
        return tuple(check for check in super().checks() if not check.device.startswith("cpu"))


class TestCudnn(OnGpu):
    backend = "cudnn"


class TestFlashMla(OnGpu):
    backend = "flashmla"


del OnGpu


def pinned(forward, backward):
    return {
        "dsa_kernel_backend": {"attention_forward": forward, "attention_backward": backward},
        "dsa_kernel_fallback": "error",
    }


def operands(rows, heads, keys, width, batch=1):
    make = torch.Generator("cuda").manual_seed(heads)

    def draw(*shape):
        return torch.randn(shape, generator=make, device=CUDA).bfloat16()

    query, key, dout = (
        draw(rows, batch, heads, 576),
        draw(keys, batch, 1, 576),
        draw(rows, batch, heads, 512),
    )
    ids = torch.rand(batch, rows, keys, generator=make, device=CUDA).topk(width).indices.int()
    ids[torch.rand(ids.shape, generator=make, device=CUDA) < 0.2] = -1
    ids[:, 1] = -1
    length = torch.randint(1, width + 1, (batch, rows), generator=make, device=CUDA).int()
    return query, key, ids, length, dout


def attention(config, query, key, ids, length, dout):
    query, key = query.detach().requires_grad_(), key.detach().requires_grad_()
    out, lse = dsa.run_fused_absorbed_sparse_attention(
        config, query, key, ids, SCALE, 512, length, return_lse=True
    )
    dq, dkv = torch.autograd.grad(out, (query, key), dout)
    return {"out": out.detach(), "lse": lse, "dq": dq, "dkv": dkv}


@pytest.mark.parametrize("backward", ["cudnn", "triton", "torch_dense"])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_a_forward_by_flashmla_serves_every_backward(heads, backward, record_property):
    query, key, ids, length, dout = operands(96, heads, 2304, 1024)
    exact = attention(
        pinned("torch_dense", "torch_dense"), query.double(), key.double(), ids, length, dout.double()
    )
    with (
        assert_backend_ran("flashmla", "attention_forward"),
        assert_backend_ran(backward, "attention_backward"),
    ):
        got = attention(pinned("flashmla", backward), query, key, ids, length, dout)
    for name, limit in LIMITS.items():
        error = float((got[name].double() - exact[name]).norm() / exact[name].norm())
        record_property(name, error)
        assert error <= limit
    finite = exact["lse"].isfinite()
    assert torch.equal(got["lse"].isfinite(), finite)
    # fp32 sums of a score of size 1 over 1024 keys, and a conversion from base 2.
    assert float((got["lse"].double() - exact["lse"])[finite].abs().max()) <= 1e-4


def test_cudnn_in_a_config_means_flashmla_too_and_explain_names_both_providers(record_property):
    query, key, ids, length, _ = operands(8, 16, 256, 128)
    decision = dsa.explain(
        "run_fused_absorbed_sparse_attention",
        {"dsa_kernel_backend": "cudnn", "dsa_kernel_fallback": "error"},
        query.requires_grad_(),
        key,
        ids,
        SCALE,
        512,
        length,
    )
    text = str(decision)
    record_property("explain", text)
    chosen = {stage.stage: (stage.chosen.backend, stage.chosen.provider) for stage in decision.stages}
    assert chosen["attention_forward"][0] == "flashmla"
    assert chosen["attention_forward"][1] == flash_forward.provider()
    assert chosen["attention_forward"][1].split(", ")[1] in ("lse base 2", "lse base e")
    assert chosen["attention_backward"][0] == "cudnn"
    assert chosen["attention_backward"][1] == cudnn_backward.provider()
    assert all(f"{backend} ({provider})" in text for backend, provider in chosen.values())


def peak_beyond_results(run):
    """Bytes held at the height of ``run``, without what it returns; ``run`` compiles in a first call."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = [tensor for tensor in run() if tensor is not None]
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(tensor.nbytes for tensor in results)


def within_declared(spec, stage, call, run, record_property):
    scratch = spec.stages[stage].capability.scratch(call)
    declared = scratch.row_bytes * call.batch * call.rows + scratch.fixed_bytes
    peak = peak_beyond_results(run)
    record_property("peak", peak)
    record_property("declared", declared)
    # The allocator rounds each tensor up to 512 bytes and may not split a block of under 1 MiB.
    assert peak <= declared + 2 * MIB
    # A declaration of many times the need would cut calls in pieces for nothing.
    assert declared <= 4 * peak + 16 * MIB


def stage_call(operation, **sizes):
    return CallSpec(operation, device="cuda", **sizes)


@pytest.mark.parametrize("heads", [64, 256])
def test_the_forward_stays_within_its_declared_scratch(heads, record_property):
    rows, keys, width = 1024, 4096, 2048
    query, key, ids, length, _ = operands(rows, heads, keys, width)
    call = stage_call("run_fused_absorbed_sparse_attention", rows=rows, keys=keys, width=width, heads=heads)
    arguments = {
        "scale": SCALE,
        "v_channels": 512,
        "rows": RowLayout(1, rows, keys),
        "options": StageOptions(),
    }
    within_declared(
        FLASHMLA,
        "attention_forward",
        call,
        lambda: flash_forward.attention_forward(query[:, 0], key[:, 0, 0], ids[0], length[0], **arguments),
        record_property,
    )


@pytest.mark.parametrize("heads", [16, 128])
def test_the_backward_stays_within_its_declared_scratch(heads, record_property):
    rows, keys, width = 1024, 4096, 2048
    query, key, ids, length, dout = operands(rows, heads, keys, width)
    with dsa.use_backend("cudnn"):
        out, lse = dsa.run_fused_absorbed_sparse_attention(
            None, query, key, ids, SCALE, 512, length, return_lse=True
        )
    call = stage_call("run_fused_absorbed_sparse_attention", rows=rows, keys=keys, width=width, heads=heads)
    dkv = torch.zeros(keys, 576, device=CUDA)
    given = (query[:, 0], key[:, 0, 0], ids[0], length[0], out[:, 0], lse[0], dout[:, 0])
    arguments = {
        "scale": SCALE,
        "v_channels": 512,
        "rows": RowLayout(1, rows, keys),
        "options": StageOptions(),
    }
    within_declared(
        CUDNN,
        "attention_backward",
        call,
        lambda: [cudnn_backward.attention_backward(*given, need_dq=True, dkv=dkv, **arguments)],
        record_property,
    )


def indexer_operands(rows, keys, heads):
    make = torch.Generator("cuda").manual_seed(keys)
    q = torch.randn(rows, heads, 128, generator=make, device=CUDA).bfloat16()
    k = torch.randn(keys, 128, generator=make, device=CUDA).bfloat16()
    w = torch.randn(rows, heads, generator=make, device=CUDA) * (heads * 128) ** -0.5
    ends = (torch.arange(rows, device=CUDA) + keys - rows + 1).int()
    return q, k, w, torch.zeros_like(ends), ends


@pytest.mark.parametrize("bounds", ["causal", "ranges"])
def test_the_selection_stays_within_its_declared_scratch(bounds, record_property):
    rows, keys, topk = 1024, 8192, 2048
    q, k, w, starts, ends = indexer_operands(rows, keys, 64)
    call = stage_call("run_fused_qk_topk", rows=rows, keys=keys, width=topk, index_heads=64, bounds=bounds)
    within_declared(
        CUDNN,
        "indexer_topk",
        call,
        lambda: cudnn_topk.indexer_topk(
            q,
            k,
            w,
            starts,
            ends,
            rows=RowLayout(1, rows, keys, bounds=bounds),
            topk=topk,
            use_relu=True,
            options=StageOptions(),
        ),
        record_property,
    )


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("sparse", [True, False])
def test_the_loss_stays_within_its_declared_scratch(sparse, weights, record_property):
    rows, keys, topk = 512, 4096, 1024
    q, k, w, starts, ends = indexer_operands(rows, keys, 64)
    w = w.to(getattr(torch, weights))
    ids = torch.rand(rows, keys, device=CUDA).topk(topk).indices.int()
    ids = torch.where(ids < ends[:, None], ids, -1)
    mass = torch.rand(rows, topk if sparse else keys, device=CUDA)
    call = stage_call(
        "run_fused_qk_topk_with_loss",
        rows=rows,
        keys=keys,
        width=topk,
        index_heads=64,
        weights_dtype=weights,
        sparse_loss=sparse,
        needs_grad=frozenset({"q", "k", "weights"}),
    )
    dk = torch.zeros(keys, 128, device=CUDA)
    length = torch.full((rows,), topk, dtype=torch.int32, device=CUDA)

    def run():
        terms = cudnn_loss.indexer_loss(
            q,
            k,
            w,
            indices=ids if sparse else None,
            length=length if sparse else None,
            starts=starts,
            ends=ends,
            mass=mass,
            rows=RowLayout(1, rows, keys),
            use_relu=True,
            need_dq=True,
            need_dw=True,
            dk=dk,
            options=StageOptions(),
        )
        assert math.isfinite(float(terms.kl.sum()))
        return terms

    within_declared(CUDNN, "indexer_loss", call, run, record_property)
