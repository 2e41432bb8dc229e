"""No operation holds more than its plan says: the measured peak of every one against the budget."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch
from contract import make
from contract.peak import nbytes, peak_bytes

from dsa_dispatch import (
    Channels,
    Heads,
    IndexWidth,
    LossTerms,
    run_fused_absorbed_sparse_attention,
    run_fused_gqa_sparse_attention,
    run_fused_qk_topk,
    run_fused_qk_topk_with_loss,
    use_backend,
)
from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._execution import attention as attention_module
from dsa_dispatch._execution import loss as loss_module
from dsa_dispatch._execution import memory
from dsa_dispatch._execution import topk as topk_module
from dsa_dispatch.testing import FakeBackend, isolated_registry
from dsa_dispatch.testing.fakes import reference_capability

SIZE, HEADS, CHANNELS, VALUES, WIDTH = 1024, 16, 64, 48, 256
BUDGET = 4 << 20
"""Less than any quadratic tensor of these sizes, and less than the block the reference cuts its rows into."""
SLACK = 64 << 10
"""What is not per row: 0-d results, slot numbers, and the allocator's rounding of some fifty tensors to 64 bytes."""


@contextlib.contextmanager
def recorded_plans():
    plans = []

    def plan_memory(*args, **kwargs):
        plans.append(memory.plan_memory(*args, **kwargs))
        return plans[-1]

    with contextlib.ExitStack() as stack:
        for module in (attention_module, loss_module, topk_module):
            stack.enter_context(mock.patch.object(module, "plan_memory", plan_memory))
        yield plans


def within(call, kept=lambda result: result):
    """Run ``call``; beside what is ``kept`` of its result it held no more than the plan it made allows."""
    with recorded_plans() as plans:
        result, peak = peak_bytes(call)
    assert plans
    assert all(plan.scratch_bytes <= BUDGET for plan in plans)
    assert any(plan.chunk < plan.rows for plan in plans), "this case would prove nothing"
    outputs = nbytes(*(tensor for tensor in kept(result) if tensor is not None))
    allowed = max(plan.scratch_bytes + plan.fixed_bytes for plan in plans)
    assert peak <= outputs + allowed + SLACK, (peak - outputs, allowed, plans[-1])
    return result


def null_stages():
    """Stages that allocate their outputs and nothing else, so that what is measured is the core's own."""

    def attention_forward(q, kv, ids, length, *, scale, v_channels, rows, options):
        wide = accumulation_dtype(q.dtype)
        return q.new_zeros((*q.shape[:2], v_channels)), q.new_zeros(q.shape[:2], dtype=wide)

    def attention_backward(q, kv, ids, length, out, lse, dout, *, need_dq, **_):
        return torch.zeros_like(q) if need_dq else None

    def gqa_forward(q, k, v, ids, length, **_):
        return q.new_zeros((*q.shape[:2], v.shape[2])), q.new_zeros(
            q.shape[:2], dtype=accumulation_dtype(q.dtype)
        )

    def gqa_backward(q, k, v, ids, length, out, lse, dout, *, need_dq, **_):
        return torch.zeros_like(q) if need_dq else None

    def indexer_topk(q, k, w, starts, ends, *, topk, **_):
        return (
            torch.zeros(q.shape[0], topk, dtype=torch.int32),
            torch.full((q.shape[0],), topk, dtype=torch.int32),
        )

    def indexer_target(query, key, *, indices, rows, **_):
        columns = rows.keys if indices is None else indices.shape[1]
        return torch.zeros(query.shape[0], columns, dtype=accumulation_dtype(query.dtype))

    def indexer_loss(q, k, w, *, need_dq, need_dw, **_):
        wide = accumulation_dtype(q.dtype)
        return LossTerms(
            torch.zeros(q.shape[0], dtype=wide),
            torch.zeros(q.shape, dtype=wide) if need_dq else None,
            torch.zeros(w.shape, dtype=wide) if need_dw else None,
        )

    return {
        function.__name__: function
        for function in (
            attention_forward, attention_backward, gqa_forward, gqa_backward, indexer_topk, indexer_target,
            indexer_loss,
        )
    }  # fmt: skip


PLAIN = {}
PADDED = {
    "heads": Heads(multiple_of=64, pad=True), "channels": Channels(multiple_of=96, pad=True),
    "width": IndexWidth(multiple_of=320, pad=True), "index_form": "prefix",
}  # fmt: skip
FORMS = {"plain": PLAIN, "padded": PADDED, "holes": {"index_form": "holes"}}


@pytest.fixture(params=["torch_dense", *FORMS])
def backend(request):
    """The reference, and stages without scratch under three capabilities."""
    changes = FORMS.get(request.param, PLAIN)
    narrow = {name: value for name, value in changes.items() if name != "heads"}
    stages = {
        "attention_forward": changes, "attention_backward": changes, "gqa_forward": narrow, "gqa_backward": narrow,
        "indexer_topk": {name: value for name, value in changes.items() if name != "width"},
        "indexer_target": narrow, "indexer_loss": changes,
    }  # fmt: skip
    fake = FakeBackend(
        "null",
        {name: dataclasses.replace(reference_capability(), **kept) for name, kept in stages.items()},
        replace=null_stages(),
    )
    name = "torch_dense" if request.param == "torch_dense" else "null"
    with (
        isolated_registry(fake.spec, installed=True),
        use_backend(name, fallback="error", memory_budget=BUDGET, query_chunk=700),
    ):
        yield request.param


LAYOUTS = pytest.mark.parametrize(
    ("batch", "dtype", "ids_dtype", "strided"),
    [
        (1, torch.bfloat16, torch.int32, False),
        (1, torch.float32, torch.int64, True),
        (2, torch.bfloat16, torch.int32, False),
        (2, torch.float32, torch.int64, True),
    ],
)


def leaf(tensor, strided):
    """Strided: the channels are not contiguous, so every row has to be copied."""
    if strided:
        tensor = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    return tensor.detach().requires_grad_()


@LAYOUTS
@pytest.mark.parametrize("kind", ["absorbed", "gqa"])
def test_attention(backend, kind, batch, dtype, ids_dtype, strided):
    rows = SIZE // batch
    query = leaf(make.normal(rows, batch, HEADS, CHANNELS, dtype=dtype), strided)
    ids = make.ids(batch, rows, WIDTH, rows, dtype=ids_dtype)
    length = torch.full((batch, rows), WIDTH)
    if kind == "absorbed":
        leaves = [query, leaf(make.normal(rows, batch, 1, CHANNELS, seed=1, dtype=dtype), False)]

        def forward():
            return run_fused_absorbed_sparse_attention(
                None, *leaves, ids, 0.1, VALUES, length, return_lse=True
            )
    else:
        leaves = [
            query,
            *(
                leaf(make.normal(rows, batch, 4, size, seed=1, dtype=dtype), strided)
                for size in (CHANNELS, VALUES)
            ),
        ]

        def forward():
            return run_fused_gqa_sparse_attention(None, *leaves, ids, 0.1, length, return_lse=True)

    out, _ = within(forward)
    dout = torch.ones((), dtype=dtype).expand(out.shape) if strided else torch.ones_like(out)
    within(lambda: torch.autograd.grad(out, leaves, dout))


def one_piece_cases():
    query = make.normal(SIZE, 1, HEADS, CHANNELS, dtype=torch.float32, grad=True)
    key, value = (make.normal(SIZE, 1, 1, size, seed=1, dtype=torch.float32) for size in (CHANNELS, VALUES))
    ids = make.ids(1, SIZE, WIDTH, SIZE)
    return {
        "attention": lambda: run_fused_absorbed_sparse_attention(None, query, key, ids, 0.1, VALUES),
        "gqa": lambda: run_fused_gqa_sparse_attention(None, query, key, value, ids, 0.1),
    }, query


@pytest.mark.parametrize("kind", ["attention", "gqa"])
def test_what_a_stage_hands_over_is_no_transient_of_a_call_in_one_piece(kind):
    """It is the result itself. Counted as a buffer beside it, 4096 rows of 128 heads ran in two chunks for nothing."""
    cases, query = one_piece_cases()
    stages = [f"{kind}_forward", f"{kind}_backward"]
    fake = FakeBackend("null", stages, replace={name: null_stages()[name] for name in stages})
    budget = 64 * SIZE  # a row of the core's own needs less, a row of the output or of the gradient much more
    with isolated_registry(fake.spec), use_backend("null", memory_budget=budget), recorded_plans() as plans:
        out, forward_peak = peak_bytes(cases[kind])
        dout = torch.ones_like(out)
        (gradient,), backward_peak = peak_bytes(lambda: torch.autograd.grad(out, query, dout))
    forward, _, backward = plans
    assert [plan.chunked for plan in (forward, backward)] == [False, False]
    lse = SIZE * HEADS * 4
    assert forward_peak <= nbytes(out) + lse + forward.scratch_bytes + forward.fixed_bytes + SLACK
    assert backward_peak <= nbytes(gradient) + backward.scratch_bytes + backward.fixed_bytes + SLACK


def test_what_a_stage_hands_over_counts_where_it_is_copied():
    heads, channels = 128, 576
    query = torch.empty(8, 2, heads, channels, dtype=torch.bfloat16)
    key, ids = torch.empty(9, 2, 1, channels, dtype=torch.bfloat16), make.ids(2, 8, 3, 9)
    fake = FakeBackend("null", ["attention_forward"], replace=null_stages())
    for chunk, batch in ((4, 1), (8, 2)):
        with isolated_registry(fake.spec), use_backend("null", query_chunk=chunk), recorded_plans() as plans:
            run_fused_absorbed_sparse_attention(None, query[:, :batch], key[:, :batch], ids[:batch], 0.1, 512)
        assert dict(plans[0].per_row)["output of the chunk"] == heads * (512 * 2 + 4)


@LAYOUTS
@pytest.mark.parametrize("debug_checks", [False, True])
def test_selection(backend, batch, dtype, ids_dtype, strided, debug_checks):
    rows = SIZE // batch
    q = leaf(make.normal(rows, batch, 8, 32, dtype=dtype), strided)
    k, w = make.normal(rows, batch, 32, seed=1, dtype=dtype), make.normal(rows, batch, 8, seed=2, dtype=dtype)
    with use_backend(debug_checks=debug_checks):
        within(lambda: run_fused_qk_topk(None, q, k, w, WIDTH))


@LAYOUTS
@pytest.mark.parametrize("sparse", [True, False])
def test_loss(backend, batch, dtype, ids_dtype, strided, sparse):
    rows = SIZE // batch
    leaves = [
        leaf(make.normal(rows, batch, 8, 32, dtype=dtype), strided),
        make.normal(rows, batch, 32, seed=1, dtype=dtype, grad=True),
        make.normal(rows, batch, 8, seed=2, dtype=dtype, grad=True),
    ]
    query = leaf(make.normal(rows, batch, HEADS, CHANNELS, seed=3, dtype=dtype), strided).detach()
    key = make.normal(rows, batch, 1, CHANNELS, seed=4, dtype=dtype)
    valid = torch.ones(batch, rows, dtype=torch.bool)

    def run():
        return run_fused_qk_topk_with_loss(
            None,
            *leaves,
            WIDTH,
            None,
            None,
            None,
            query,
            key,
            0.1,
            1.0,
            query_valid_rows=valid,
            sparse_loss=sparse,
        )

    def kept(result):
        # The gradients are made in the forward and saved in the accumulation type.
        return [*result, *(torch.empty(tensor.shape, dtype=accumulation_dtype(dtype)) for tensor in leaves)]

    within(run, kept)
