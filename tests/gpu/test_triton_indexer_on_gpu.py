"""Selection, teacher and loss of the Triton backend on a GPU, in full size."""

from __future__ import annotations

import pytest
import torch
from gpu.exact import GRADIENT, assert_close

import dsa_dispatch as dsa
from dsa_dispatch.testing import assert_backend_ran

pytestmark = pytest.mark.usefixtures("triton_only")


def generator(seed=0):
    return torch.Generator("cuda").manual_seed(seed)


def uniform(*shape):
    return torch.rand(shape, generator=generator(), device="cuda")


SCORES = {
    "values that differ in their low bits only": (
        lambda: 1 + (uniform(33, 16385) * 2_055_000).floor() * 2.0**-23,
        2048,
    ),
    "all equal": (lambda: torch.ones(5, 40_000, device="cuda"), 2048),
    "8192 zeros and few positives": (lambda: torch.where(uniform(5, 8192) < 0.01, 1.0, 0.0), 2048),
    "2048 of 262,209": (lambda: torch.randn(8, 262_209, generator=generator(), device="cuda"), 2048),
    "4096 of 70,000 integers": (lambda: (uniform(8, 70_000) * 50).floor(), 4096),
    "an odd width": (lambda: torch.randn(8, 1001, generator=generator(), device="cuda"), 17),
    "zeros of both signs": (lambda: torch.where(uniform(5, 9000) < 0.5, -0.0, 0.0), 1000),
    "mostly minus infinity": (lambda: torch.where(uniform(5, 9000) < 0.95, -torch.inf, 1.0), 1000),
    "as many columns as chosen": (lambda: torch.randn(5, 2048, generator=generator(), device="cuda"), 2048),
    "65,537 rows": (lambda: (uniform(65_537, 300) * 40).floor(), 64),
}


@pytest.mark.parametrize("name", SCORES)
def test_selection_is_the_stable_sort(name):
    # Here, since Triton decides for good at its first import how it runs, and this file is also read without a GPU.
    from dsa_backends.triton_kernels.indexer_topk import select_from_scores

    make, topk = SCORES[name]
    scores = make()
    starts = torch.zeros(len(scores), dtype=torch.int32, device="cuda")
    ids, length = select_from_scores(scores, starts, torch.full_like(starts, scores.shape[1]), topk)
    want = torch.sort(scores + 0.0, dim=1, descending=True, stable=True).indices[:, :topk].sort(1).values
    assert torch.equal(ids.sort(1).values.long(), want)
    assert (length == topk).all()


def integers(*shape, seed, high=3):
    """Small: every product and sum is exact in bf16 and fp32, so that ties are ties of the formula too."""
    return torch.randint(1 - high, high, shape, generator=generator(seed), device="cuda").bfloat16()


def chosen_by_formula(q, k, w, ends, topk):
    scores = torch.einsum("th,thj->tj", w.float(), torch.einsum("thd,jd->thj", q.float(), k.float()).relu())
    columns = torch.arange(len(k), device="cuda")
    scores = scores.masked_fill(columns >= ends[:, None], -torch.inf)
    return torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :topk].sort(1).values


@pytest.mark.parametrize("heads", [1, 4, 8, 24, 48, 96, 128])
def test_any_head_count_selects_by_the_rule(heads):
    q, k, w = (
        integers(70, 1, heads, 128, seed=1),
        integers(40_000, 1, 128, seed=2),
        integers(70, 1, heads, seed=3),
    )
    with assert_backend_ran("triton", "indexer_topk"):
        picked = dsa.run_fused_qk_topk(None, q, k, w.float(), 2048)
    ends = torch.arange(40_000 - 69, 40_001, device="cuda")
    want = torch.cat(
        [chosen_by_formula(q[row : row + 10, 0], k[:, 0], w[row : row + 10, 0], ends[row : row + 10], 2048)
         for row in range(0, 70, 10)]
    )  # fmt: skip
    assert (picked.length == 2048).all()
    assert torch.equal(picked.indices[0].sort(1).values.long(), want)


def test_more_rows_than_65535_select_by_the_rule():
    rows, keys = 65_600, 66_000
    q, k, w = integers(rows, 1, 2, 64, seed=1), integers(keys, 1, 64, seed=2), integers(rows, 1, 2, seed=3)
    picked = dsa.run_fused_qk_topk(None, q, k, w.float(), 64)
    for row in (0, 1, 32_767, 32_768, 65_535, 65_536, rows - 1):
        ends = torch.tensor([keys - rows + row + 1], device="cuda")
        want = chosen_by_formula(q[row : row + 1, 0], k[:, 0], w[row : row + 1, 0], ends, 64)
        assert torch.equal(picked.indices[0, row].sort().values.long(), want[0]), row


def test_a_key_stored_twice_is_never_chosen_at_its_higher_place_alone():
    q = torch.randn(64, 1, 64, 128, generator=generator(1), device="cuda").bfloat16()
    half = torch.randn(20_000, 1, 128, generator=generator(2), device="cuda").bfloat16()
    w = torch.randn(64, 1, 64, generator=generator(3), device="cuda")
    starts = torch.zeros(64, dtype=torch.int32, device="cuda")
    picked = dsa.run_fused_qk_topk(None, q, torch.cat([half, half]), w, 2049, starts, starts + 40_000)
    chosen = torch.zeros(64, 40_000, dtype=torch.bool, device="cuda").scatter_(
        1, picked.indices[0].long(), True
    )
    assert not (chosen[:, 20_000:] & ~chosen[:, :20_000]).any()


def test_the_selection_has_the_same_bits_in_20_runs_in_two_budgets_and_beside_other_work():
    q = torch.randn(300, 1, 64, 128, generator=generator(1), device="cuda").bfloat16()
    k = torch.randn(50_000, 1, 128, generator=generator(2), device="cuda").bfloat16()
    w = torch.randn(300, 1, 64, generator=generator(3), device="cuda")
    other, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    first = None
    for turn in range(20):
        if turn % 4 >= 2:
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                for _ in range(10):
                    busy @ busy
        with dsa.use_backend(memory_budget="32MiB" if turn % 2 else "1GiB"):
            picked = dsa.run_fused_qk_topk(None, q, k, w, 2048)
        torch.cuda.synchronize()
        order = picked.indices.sort(-1).values
        first = order if first is None else first
        assert torch.equal(first, order), f"run {turn}"


def loss_operands(rows, keys, heads, index_heads):
    q = torch.randn(rows, 1, index_heads, 128, generator=generator(1), device="cuda").bfloat16()
    k = torch.randn(keys, 1, 128, generator=generator(2), device="cuda").bfloat16()
    w = torch.randn(rows, 1, index_heads, generator=generator(3), device="cuda") * (index_heads * 128) ** -0.5
    query = torch.randn(rows, 1, heads, 576, generator=generator(4), device="cuda").bfloat16()
    key = torch.randn(keys, 1, 1, 576, generator=generator(5), device="cuda").bfloat16()
    return q, k, w, query, key


def run_loss(operands, topk, sparse=True):
    q, k, w, query, key = operands
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, w)]
    with assert_backend_ran("triton", "indexer_topk", "indexer_target", "indexer_loss"):
        result = dsa.run_fused_qk_topk_with_loss(
            None, *leaves, topk, None, None, None, query, key, 576**-0.5, 1.0, calculate_per_token_loss=True,
            sparse_loss=sparse,
        )  # fmt: skip
        return result, torch.autograd.grad(result.loss, leaves)


def exact_loss(operands, valid, ids):
    q, k, w, query, key = operands
    with torch.no_grad():
        scores = 576**-0.5 * query[:, 0].double() @ key[:, 0, 0].double()[ids].transpose(1, 2)
        mass = torch.softmax(scores.masked_fill(~valid[:, None], -torch.inf), -1).sum(1)
        target = mass / mass.sum(1, keepdim=True)
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, w)]
    hidden = torch.einsum("thd,tjd->thj", leaves[0][:, 0], leaves[1][:, 0][ids]).relu()
    logits = torch.einsum("th,thj->tj", leaves[2][:, 0], hidden).masked_fill(~valid, -torch.inf)
    term = target * (target.clamp_min(1e-10).log() - torch.log_softmax(logits, 1))
    loss = torch.where(valid, term, 0.0).sum()
    return loss, torch.autograd.grad(loss, leaves)


def assert_gradients(grads, want):
    # As a whole only: a product that is zero but for its rounding may fall on either side of the ReLU, which gives or
    # takes a whole term of one row.
    for what, got, exact in zip(("dq", "dk", "dw"), grads, want, strict=True):
        assert_close(got, exact, GRADIENT, what, by_row=False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "index_heads"), [(128, 64), (16, 16), (24, 1), (64, 128)])
def test_sparse_loss_agrees_with_fp64(heads, index_heads, deterministic):
    operands = loss_operands(24, 8192, heads, index_heads)
    with dsa.use_backend(deterministic=deterministic):
        result, grads = run_loss(operands, 2048)
    ids = result.indices[0].long()
    loss, want = exact_loss(operands, ids >= 0, ids.clamp_min(0))
    assert float(result.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-3)
    assert_gradients(grads, want)


def test_dense_loss_agrees_with_fp64():
    operands = loss_operands(24, 1500, 16, 16)
    result, grads = run_loss(operands, 256, sparse=False)
    columns = torch.arange(1500, device="cuda")
    valid = columns < torch.arange(1500 - 23, 1501, device="cuda")[:, None]
    loss, want = exact_loss(operands, valid, columns.expand(24, 1500))
    assert float(result.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-3)
    assert_gradients(grads, want)


def test_deterministic_loss_has_the_same_bits_in_20_runs_in_two_budgets_and_beside_other_work():
    operands = loss_operands(200, 8192, 64, 64)
    other, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    first = None
    for turn in range(20):
        if turn % 4 >= 2:
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                for _ in range(10):
                    busy @ busy
        with dsa.use_backend(deterministic=True, memory_budget="64MiB" if turn % 2 else "1GiB"):
            result, grads = run_loss(operands, 2048)
        torch.cuda.synchronize()
        found = (result.loss, *grads)
        first = first or found
        assert all(torch.equal(one, again) for one, again in zip(first, found, strict=True)), f"run {turn}"
