"""The scratch that the capabilities declare is what the stages allocate, measured by torch's own memory events."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dsa_backends.torch_dense import attention_backward as backward_module
from dsa_backends.torch_dense.attention_backward import attention_backward
from dsa_backends.torch_dense.attention_forward import attention_forward
from dsa_backends.torch_dense.gqa import gqa_backward, gqa_forward
from dsa_backends.torch_dense.indexer_loss import indexer_loss
from dsa_backends.torch_dense.indexer_target import indexer_target
from dsa_backends.torch_dense.indexer_topk import indexer_topk
from dsa_backends.torch_dense.spec import SPEC
from dsa_dispatch._call import CallSpec, RowLayout, StageOptions

ROWS, KEYS, WIDTH, HEADS, QK, V = 96, 1000, 64, 4, 48, 32
SLACK = 4096
"""Bytes for tensors of a few numbers per row (lengths, lse, kl) and for temporaries of single flags."""


def peak_bytes(function):
    """``(peak above the start, result)`` from the allocator's events."""
    function()  # caches, lazy initialisation
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = function()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events, "the profiler recorded no memory events"
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, result


def total_bytes(result):
    tensors = [result] if isinstance(result, torch.Tensor) else [x for x in result if x is not None]
    return sum(tensor.nbytes for tensor in tensors)


def stage_call(stage, dtype, options, sparse, rows):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    layout = RowLayout(1, rows, KEYS)
    indices = torch.randint(0, KEYS, (rows, WIDTH), generator=generator, dtype=torch.int32)
    length = torch.full((rows,), WIDTH, dtype=torch.int32)
    starts = torch.zeros(rows, dtype=torch.int32)
    ends = (torch.arange(rows) + KEYS - rows + 1).int()
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    slots = (indices, length) if sparse else (None, None)
    q, kv = random(rows, HEADS, QK), random(KEYS, QK)
    out, lse, dout = random(rows, HEADS, V), random(rows, HEADS).to(acc), random(rows, HEADS, V)
    k, v = random(KEYS, 2, QK), random(KEYS, 2, V)
    common = {"rows": layout, "options": options}
    if stage == "indexer_topk":
        w = random(rows, HEADS)
        return lambda: indexer_topk(q, kv, w, starts, ends, topk=WIDTH, use_relu=True, **common)
    if stage == "indexer_target":
        return lambda: indexer_target(
            q, kv, indices=slots[0], length=slots[1], starts=starts, ends=ends, lse=None, scale=0.1, **common
        )
    if stage == "indexer_loss":
        w, mass, dk = random(rows, HEADS), torch.rand(rows, WIDTH if sparse else KEYS), torch.zeros(KEYS, QK)
        dk = dk.to(acc)
        return lambda: indexer_loss(
            q, kv, w, indices=slots[0], length=slots[1], starts=starts, ends=ends, mass=mass,
            use_relu=True, need_dq=True, need_dw=True, dk=dk, **common,
        )  # fmt: skip
    if stage == "attention_forward":
        return lambda: attention_forward(q, kv, indices, length, scale=0.1, v_channels=V, **common)
    if stage == "attention_backward":
        dkv = torch.zeros(KEYS, QK, dtype=acc)
        return lambda: attention_backward(
            q, kv, indices, length, out, lse, dout, scale=0.1, v_channels=V, need_dq=True, dkv=dkv, **common
        )
    if stage == "gqa_forward":
        return lambda: gqa_forward(q, k, v, indices, length, scale=0.1, **common)
    dk, dv = torch.zeros(k.shape, dtype=acc), torch.zeros(v.shape, dtype=acc)
    return lambda: gqa_backward(
        q, k, v, indices, length, out, lse, dout, scale=0.1, need_dq=True, dk=dk, dv=dv, **common
    )


def declared(stage, dtype, sparse, deterministic=False):
    call = CallSpec(
        "any", dtype=str(dtype).removeprefix("torch."), rows=ROWS, keys=KEYS, width=WIDTH, heads=HEADS, kv_heads=2,
        qk_channels=QK, v_channels=V, index_heads=HEADS, index_channels=QK, sparse_loss=sparse,
        deterministic=deterministic,
    )  # fmt: skip
    return SPEC.stages[stage].capability.scratch(call)


STAGE_FORMS = [
    *((stage, True) for stage in SPEC.stages),
    ("indexer_target", False),
    ("indexer_loss", False),
]


@pytest.mark.parametrize(("stage", "sparse"), STAGE_FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_peak_is_the_declared_scratch(stage, sparse, dtype):
    """At most what is declared, outputs aside, and no phantom: at least four fifths of it."""
    scratch = declared(stage, dtype, sparse)
    assert len({name for name, _ in scratch.per_row + scratch.fixed}) == len(scratch.per_row + scratch.fixed)
    peak, result = peak_bytes(stage_call(stage, dtype, StageOptions(), sparse, ROWS))
    used, allowed = peak - total_bytes(result), scratch.row_bytes * ROWS + scratch.fixed_bytes
    assert used <= allowed + SLACK
    assert used >= 0.8 * allowed


@pytest.mark.parametrize("stage", [stage for stage in SPEC.stages if stage != "indexer_topk"])
def test_a_deterministic_stage_holds_one_row_at_a_time(stage):
    scratch = declared(stage, torch.float32, True, deterministic=True)
    peak, result = peak_bytes(stage_call(stage, torch.float32, StageOptions(deterministic=True), True, ROWS))
    assert peak - total_bytes(result) <= scratch.row_bytes + scratch.fixed_bytes + SLACK


def test_a_long_call_holds_no_more_than_a_block_of_rows():
    plan = backward_module.buffer_plan(
        width=WIDTH, heads=HEADS, qk=QK, dtype=torch.float32, device_type="cpu", deterministic=False
    )
    assert plan.block is not None
    rows = 3 * plan.block
    peak, result = peak_bytes(
        stage_call("attention_backward", torch.float32, StageOptions(), True, rows % KEYS)
    )
    block = plan.row_bytes * plan.block + plan.scratch().fixed_bytes
    assert 0.8 * block <= peak - total_bytes(result) <= block + SLACK


def test_nothing_of_rows_by_keys_by_heads_is_declared_for_the_dense_loss():
    for stage in ("indexer_target", "indexer_loss"):
        few, many = (
            SPEC.stages[stage].capability.scratch(
                dataclasses.replace(
                    CallSpec("any", keys=4096, sparse_loss=False), heads=heads, index_heads=heads
                )
            )
            for heads in (1, 64)
        )
        assert few == many
