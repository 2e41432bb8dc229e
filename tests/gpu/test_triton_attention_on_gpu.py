"""The Triton attention on a GPU, in bf16 and in full size: right, the same bits on demand, and nothing but its keys."""

from __future__ import annotations

import pytest
import torch
from gpu.exact import GRADIENT, LSE, OUT, assert_close, assert_lse, attention

import dsa_dispatch as dsa
from dsa_dispatch.testing import assert_backend_ran

pytestmark = pytest.mark.usefixtures("triton_only")
SCALE = 576**-0.5


def draw(*shape, seed=0, dtype=torch.bfloat16):
    make = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=make, device="cuda").to(dtype)


def distinct(rows, keys, width, seed=0):
    make = torch.Generator("cuda").manual_seed(seed)
    parts = [
        torch.rand(min(512, rows - first), keys, generator=make, device="cuda")
        .topk(width, sorted=False)
        .indices
        for first in range(0, rows, 512)
    ]
    return torch.cat(parts).int()


def run(query, key, indices, length, dout, scale=SCALE, v=512):
    """Forward and backward of flat operands through the public operation; ``out, lse, dq, dkv``, flat."""
    leaves = query[:, None].requires_grad_(), key[:, None, None].requires_grad_()
    with assert_backend_ran("triton", "attention_forward", "attention_backward"):
        out, lse = dsa.run_fused_absorbed_sparse_attention(
            None, *leaves, indices[None], scale, v, None if length is None else length[None], return_lse=True
        )
        dq, dkv = torch.autograd.grad(out, leaves, dout[:, None])
    return out.detach()[:, 0], lse[0], dq[:, 0], dkv[:, 0, 0]


def agrees(query, key, indices, length, scale=SCALE, v=512, gradient=GRADIENT, lse=LSE, by_row=True):
    dout = draw(*query.shape[:2], v, seed=99)
    got = run(query, key, indices, length, dout, scale, v)
    if length is None:
        length = torch.full((len(query),), indices.shape[1], device="cuda")
    want = attention(query, key, indices, length, dout, scale, v)
    assert_close(got[0], want[0], OUT, "out")
    assert_lse(got[1], want[1], lse)
    assert_close(got[2], want[2], gradient, "dq", by_row)
    assert_close(got[3], want[3], gradient, "dkv", by_row)
    return got


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [1, 4, 8, 24, 48, 96, 128])
def test_any_head_count_agrees_with_fp64_beside_holes_empty_rows_and_nan(heads, deterministic):
    query, key = draw(40, heads, 576, seed=heads), draw(8192, 576, seed=1)
    ids = distinct(40, 8192, 2048)
    ids[3] = -1
    ids[5, ::3] = -1
    ids[6, 1::7] = 8192 + 9
    ids[8, 100] = ids[8, 50]
    length = torch.full((40,), 2048, dtype=torch.int32, device="cuda")
    length[7], length[9] = 1000, 0
    ids[ids == 17] = -1
    key[17] = torch.nan
    with dsa.use_backend(deterministic=deterministic):
        out, lse, dq, dkv = agrees(query, key, ids, length)
    for row in (3, 9):
        assert out[row].abs().max() == 0
        assert lse[row].isneginf().all()
        assert dq[row].abs().max() == 0
    assert dkv[17].abs().max() == 0


@pytest.mark.parametrize(("qk", "v"), [(512, 512), (528, 512), (544, 512), (320, 256), (192, 128), (80, 64)])
def test_other_channels_agree_with_fp64(qk, v):
    agrees(draw(40, 64, qk), draw(3000, qk, seed=1), distinct(40, 3000, 500), None, qk**-0.5, v)


@pytest.mark.parametrize("width", [15, 16, 17, 63, 64, 65, 1000, 2051])
def test_any_width_agrees_with_fp64(width):
    agrees(draw(24, 16, 576), draw(4096, 576, seed=1), distinct(24, 4096, width), None)


@pytest.mark.parametrize("heads", [8, 64])
def test_a_single_slot_gives_its_key_and_no_gradient_to_the_query(heads):
    """P is 1 whatever the query, so dS is what fp32 leaves of a difference of equal sums over 512 channels."""
    query, key, dout = draw(24, heads, 576), draw(4096, 576, seed=1), draw(24, heads, 512, seed=2)
    ids = distinct(24, 4096, 1)
    out, lse, dq, dkv = run(query, key, ids, None, dout)
    assert torch.equal(out, key[ids[:, 0].long(), None, :512].expand_as(out))
    want = attention(query, key, ids, torch.ones(24, device="cuda"), dout, SCALE, 512)
    assert_lse(lse, want[1], LSE)
    assert float(dq.abs().max()) <= 1e-4
    assert_close(dkv, want[3], GRADIENT, "dkv")


@pytest.mark.parametrize("heads", [16, 128])
def test_more_slots_than_keys_with_holes(heads):
    make = torch.Generator("cuda").manual_seed(3)
    ids = torch.randint(-100, 400, (50, 1000), generator=make, device="cuda").int()
    agrees(draw(50, heads, 576), draw(300, 576, seed=1), ids, None)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [16, 64])
def test_one_key_chosen_by_4096_queries(heads, deterministic):
    ids = torch.full((4096, 128), -1, dtype=torch.int32, device="cuda")
    ids[:, 0] = 5
    ids[:, 77] = torch.arange(4096, device="cuda") % 256
    with dsa.use_backend(deterministic=deterministic):
        agrees(draw(4096, heads, 576), draw(256, 576, seed=1), ids, None)


@pytest.mark.parametrize("heads", [16, 64])
def test_queries_thirty_times_as_large(heads):
    """Scores of some hundreds: their rounding, 2**-24 of their size in each of a few dozen steps, is the lse's.

    A row that one key takes whole is left out of the judgement by rows: its dS is the difference of two equal numbers,
    one of them summed over an output of 16 bits, so all that it has is rounding.
    """
    query, key = draw(40, heads, 576) * 30, draw(8192, 576, seed=1)
    size = float((query.double() @ key.double().T).abs().max()) * SCALE
    agrees(
        query,
        key,
        distinct(40, 8192, 2048),
        None,
        gradient=2 * GRADIENT,
        lse=LSE + size * 2.0**-20,
        by_row=False,
    )


def test_an_id_of_two_to_the_32_and_three_is_no_key():
    query, key, dout = draw(20, 16, 576), draw(900, 576, seed=1), draw(20, 16, 512, seed=2)
    ids = distinct(20, 900, 300).long()
    ids[:, 7] = 2**32 + 3
    ids[4, 9], ids[5, 9] = -(2**32) + 3, 2**31
    plain = torch.where((ids < 0) | (ids >= 900), -1, ids).int()
    with dsa.use_backend(deterministic=True):
        wide, narrow = (run(query, key, given, None, dout) for given in (ids, plain))
    assert all(torch.equal(one, other) for one, other in zip(wide, narrow, strict=True))


@pytest.mark.parametrize("heads", [16, 64])
def test_keys_whose_row_times_stride_passes_two_to_the_31st(heads):
    far = torch.empty(2050 * 2**20, dtype=torch.bfloat16, device="cuda").as_strided((2050, 576), (2**20, 1))
    far.copy_(draw(2050, 576, seed=1))
    ids = distinct(20, 2050, 300)
    ids[:, :2] = torch.tensor([2048, 2049], device="cuda")
    agrees(draw(20, heads, 576), far, ids, None)


@pytest.mark.parametrize("heads", [1, 16])
def test_more_rows_than_65535(heads):
    """More than a grid has in its second and third dimensions."""
    rows = 65_537
    ids = torch.randint(
        0, 5000, (rows, 16), generator=torch.Generator("cuda").manual_seed(0), device="cuda"
    ).int()
    agrees(draw(rows, heads, 576), draw(5000, 576, seed=1), ids, None)


@pytest.mark.parametrize("rows", [1, 16])
def test_few_rows_split_over_the_slots_agree_with_the_same_rows_unsplit(rows):
    query, key, ids = draw(rows, 16, 576), draw(8192, 576, seed=1), distinct(rows, 8192, 2048)
    results = []
    for deterministic in (False, True):
        with dsa.use_backend(deterministic=deterministic), torch.no_grad():
            results.append(
                dsa.run_fused_absorbed_sparse_attention(
                    None, query[:, None], key[:, None, None], ids[None], SCALE, 512, return_lse=True
                )
            )
    (out, lse), (whole, whole_lse) = results
    torch.testing.assert_close(out, whole, atol=OUT * float(whole.float().abs().max()), rtol=OUT)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_deterministic_gradients_have_the_same_bits_in_20_runs_in_two_budgets_and_beside_other_work(heads):
    query, key, ids = draw(300, heads, 576), draw(8192, 576, seed=1), distinct(300, 8192, 2048)
    ids[:, 5] = 4000  # a key that every row adds to
    dout = draw(300, heads, 512, seed=2)
    other = torch.cuda.Stream()
    busy = draw(4096, 4096, seed=3)
    first = None
    for turn in range(20):
        if turn % 4 >= 2:
            # Programs then start in another order, and finish in another.
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                for _ in range(20):
                    busy @ busy
        with dsa.use_backend(deterministic=True, memory_budget="64MiB" if turn % 2 else "1GiB"):
            results = run(query, key, ids, None, dout)
        torch.cuda.synchronize()
        first = first or results
        assert all(torch.equal(one, again) for one, again in zip(first, results, strict=True)), f"run {turn}"


def test_the_fast_gradient_of_queries_has_the_same_bits_in_20_runs():
    query, key, ids = draw(300, 64, 576), draw(8192, 576, seed=1), distinct(300, 8192, 2048)
    dout = draw(300, 64, 512, seed=2)
    runs = [run(query, key, ids, None, dout)[:3] for _ in range(20)]
    assert all(
        torch.equal(one, again) for later in runs[1:] for one, again in zip(runs[0], later, strict=True)
    )
