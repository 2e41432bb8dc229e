"""Attention kernels under the interpreter, in fp16 and fp32, against fp64 formulas."""

from __future__ import annotations

import pytest
import torch
from oracle import attention, attention_gradients, relative

from dsa_backends.triton_kernels.attention_backward import attention_backward, launch_backward
from dsa_backends.triton_kernels.attention_forward import attention_forward, launch_forward
from dsa_backends.triton_kernels.tiles import AttentionTile, BackwardTiles
from dsa_dispatch._call import RowLayout, StageOptions

# fp16 keeps 11 bits: products of a few hundred channels round to about 1e-3; fp32 sums agree to about 1e-6.
TOLERANCE = {torch.float16: 2e-3, torch.float32: 5e-6}


def case(rows, keys, width, heads, dqk, dtype, seed=0, holes=True, gain=1.0):
    make = torch.Generator().manual_seed(seed)
    q = (torch.randn(rows, heads, dqk, generator=make) * gain).to(dtype)
    kv = (torch.randn(keys, dqk, generator=make) * gain).to(dtype)
    indices = torch.stack(
        [torch.randperm(keys * 2, generator=make)[:width] % keys for _ in range(rows)]
    ).int()
    length = torch.full((rows,), width, dtype=torch.int32)
    if holes:
        indices[torch.rand(rows, width, generator=make) < 0.3] = -1
        indices[0, : width // 2] = keys + 5
        indices[-1] = -1
        length[rows // 2] = width // 2
    return q, kv, indices, length


def layout(q, kv):
    return RowLayout(batch=1, rows=len(q), keys=len(kv))


@pytest.mark.parametrize(
    ("heads", "dqk", "dv", "dtype"),
    [
        (1, 64, 64, torch.float32),
        (4, 80, 64, torch.float16),
        (8, 192, 128, torch.float16),
        (24, 320, 256, torch.float16),
        (48, 80, 64, torch.float16),
        (96, 32, 16, torch.float32),
        (3, 112, 96, torch.float32),
        (128, 32, 16, torch.float16),
    ],
)
def test_forward_and_backward_agree_with_the_formula_for_any_head_count_and_holes_anywhere(
    dtype, heads, dqk, dv
):
    q, kv, indices, length = case(5, 40, 37, heads, dqk, dtype)
    scale = dqk**-0.5
    options = StageOptions()
    out, lse = attention_forward(
        q, kv, indices, length, scale=scale, v_channels=dv, rows=layout(q, kv), options=options
    )
    want_out, want_lse = attention(q, kv, indices, length, scale, dv)
    assert relative(out, want_out) < TOLERANCE[dtype]
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=0)
    assert out[-1].abs().max() == 0
    assert torch.isneginf(lse[-1]).all()

    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    want_dq, want_dkv = attention_gradients(q, kv, indices, length, dout, scale, dv)
    dkv = torch.ones(kv.shape)
    dq = attention_backward(
        q, kv, indices, length, out, lse, dout, scale=scale, v_channels=dv, need_dq=True, dkv=dkv,
        rows=layout(q, kv), options=options,
    )  # fmt: skip
    assert relative(dq, want_dq) < 3 * TOLERANCE[dtype]
    assert relative(dkv - 1, want_dkv) < 3 * TOLERANCE[dtype]  # added into, not overwritten


@pytest.mark.parametrize(("dqk", "dv"), [(576, 512), (512, 512), (560, 512)])
def test_wide_keys_are_cut_in_value_parts_and_a_tail(dqk, dv):
    q, kv, indices, length = case(2, 20, 18, 5, dqk, torch.float16)
    length[:] = 18
    indices[-1, 3] = 7
    scale = 576**-0.5
    out, lse = attention_forward(
        q, kv, indices, length, scale=scale, v_channels=dv, rows=layout(q, kv), options=StageOptions()
    )
    want_out, want_lse = attention(q, kv, indices, length, scale, dv)
    assert relative(out, want_out) < 2e-3
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=0)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half()
    dkv = torch.zeros(kv.shape)
    dq = attention_backward(
        q, kv, indices, length, out, lse, dout, scale=scale, v_channels=dv, need_dq=True, dkv=dkv,
        rows=layout(q, kv), options=StageOptions(),
    )  # fmt: skip
    want_dq, want_dkv = attention_gradients(q, kv, indices, length, dout, scale, dv)
    assert relative(dq, want_dq) < 6e-3
    assert relative(dkv, want_dkv) < 6e-3


def test_memory_of_an_invalid_id_is_never_used_even_when_it_holds_nan():
    q, kv, indices, length = case(3, 16, 12, 4, 80, torch.float16)
    kv[0] = torch.nan
    indices[indices == 0] = -1
    out, lse = attention_forward(
        q, kv, indices, length, scale=0.1, v_channels=64, rows=layout(q, kv), options=StageOptions()
    )
    assert not out.isnan().any()
    dkv = torch.zeros(kv.shape)
    dq = attention_backward(
        q, kv, indices, length, out, lse, torch.ones_like(out), scale=0.1, v_channels=64, need_dq=True, dkv=dkv,
        rows=layout(q, kv), options=StageOptions(),
    )  # fmt: skip
    assert not dq.isnan().any()
    assert not dkv.isnan().any()
    assert dkv[0].abs().max() == 0


@pytest.mark.parametrize("splits", [2, 3, 7])
def test_split_slots_merge_to_the_same_answer(splits):
    q, kv, indices, length = case(3, 300, 230, 4, 80, torch.float32)
    tile = AttentionTile(16, 16, 4, 2)
    whole = launch_forward(q, kv, indices, length, scale=0.1, v_channels=64, tile=tile, splits=1)
    parts = launch_forward(q, kv, indices, length, scale=0.1, v_channels=64, tile=tile, splits=splits)
    torch.testing.assert_close(parts[0], whole[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(parts[1], whole[1], atol=1e-5, rtol=1e-6)


def test_under_deterministic_a_row_has_the_same_bits_alone_and_among_others():
    q, kv, indices, length = case(6, 300, 230, 4, 80, torch.float32, holes=False)
    options = StageOptions(deterministic=True)
    whole, _ = attention_forward(
        q, kv, indices, length, scale=0.1, v_channels=64, rows=layout(q, kv), options=options
    )
    alone, _ = attention_forward(
        q[2:3], kv, indices[2:3], length[2:3], scale=0.1, v_channels=64, rows=layout(q, kv), options=options
    )
    assert torch.equal(whole[2:3], alone)


def test_three_kernel_backward_equals_the_fused_one():
    q, kv, indices, length = case(4, 50, 40, 20, 80, torch.float32)
    out, lse = attention(q, kv, indices, length, 0.1, 64)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    want_dq, want_dkv = attention_gradients(q, kv, indices, length, dout, 0.1, 64)
    pair = AttentionTile(16, 16, 4, 1)
    for tiles in (
        BackwardTiles(pair, AttentionTile(16, 16, 4, 1, 32)),
        BackwardTiles(pair, AttentionTile(16, 16, 4, 1, 32), AttentionTile(16, 16, 4, 1, 32)),
    ):
        dkv = torch.zeros(kv.shape)
        dq = launch_backward(
            q, kv, indices, length, out.float(), lse.float(), dout, scale=0.1, v_channels=64, need_dq=True, dkv=dkv,
            tiles=tiles, deterministic=False, budget=1 << 30,
        )  # fmt: skip
        assert relative(dq, want_dq) < 1e-5
        assert relative(dkv, want_dkv) < 1e-5


def test_deterministic_gradient_has_the_same_bits_for_any_budget_and_more_than_128_heads():
    q, kv, indices, length = case(7, 12, 20, 130, 32, torch.float32)
    indices[:, 3] = 4  # one key chosen by every row
    out, lse = attention(q, kv, indices, length, 0.1, 16)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    _, want = attention_gradients(q, kv, indices, length, dout, 0.1, 16)
    results = []
    for budget in (1, 1 << 30):
        dkv = torch.zeros(kv.shape)
        attention_backward(
            q, kv, indices, length, out.float(), lse.float(), dout, scale=0.1, v_channels=16, need_dq=False, dkv=dkv,
            rows=layout(q, kv), options=StageOptions(deterministic=True, memory_budget=budget),
        )  # fmt: skip
        results.append(dkv)
    assert relative(results[0], want) < 1e-5
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("need", ["dq", "dkv"])
def test_either_gradient_alone_equals_the_pair(need):
    q, kv, indices, length = case(4, 50, 40, 4, 80, torch.float32)
    out, lse = attention(q, kv, indices, length, 0.1, 64)
    dout = torch.ones(out.shape)
    want_dq, want_dkv = attention_gradients(q, kv, indices, length, dout, 0.1, 64)
    dkv = torch.zeros(kv.shape) if need == "dkv" else None
    dq = attention_backward(
        q, kv, indices, length, out.float(), lse.float(), dout, scale=0.1, v_channels=64, need_dq=need == "dq",
        dkv=dkv, rows=layout(q, kv), options=StageOptions(),
    )  # fmt: skip
    assert (dq is None) == (need == "dkv")
    assert relative(want_dq if dq is None else dq, want_dq) < 1e-5
    assert relative(want_dkv if dkv is None else dkv, want_dkv) < 1e-5


def test_an_lse_of_plus_infinity_on_an_empty_row_gives_zero_gradients():
    q, kv, indices, length = case(2, 8, 6, 2, 32, torch.float32)
    indices[:] = -1
    lse = torch.full((2, 2), torch.inf)
    dkv = torch.zeros(kv.shape)
    dq = attention_backward(
        q, kv, indices, length, torch.zeros(2, 2, 16), lse, torch.ones(2, 2, 16), scale=0.1, v_channels=16,
        need_dq=True, dkv=dkv, rows=layout(q, kv), options=StageOptions(),
    )  # fmt: skip
    assert dq.abs().max() == 0
    assert dkv.abs().max() == 0


def test_row_times_stride_may_pass_two_to_the_31st():
    base = torch.empty(2**31 + 4096, dtype=torch.float16)
    kv = base.as_strided((2049, 32), (2**20, 1))
    kv[:] = torch.randn(2049, 32, generator=torch.Generator().manual_seed(0)).half()
    q = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(1)).half()
    indices = torch.tensor([[2048, 5]], dtype=torch.int32)
    length = torch.tensor([2], dtype=torch.int32)
    out, _ = attention_forward(
        q, kv, indices, length, scale=0.1, v_channels=16, rows=layout(q, kv), options=StageOptions()
    )
    want, _ = attention(q, kv, indices, length, 0.1, 16)
    assert relative(out, want) < 2e-3


def test_inputs_strided_in_their_first_dimension_are_read_in_place_and_kept():
    q, kv, indices, length = case(4, 20, 12, 4, 32, torch.float32, holes=False)
    wide = torch.zeros(8, 4, 32)
    wide[::2] = q
    options = StageOptions()
    got, _ = attention_forward(
        wide[::2], kv, indices, length, scale=0.1, v_channels=16, rows=layout(q, kv), options=options
    )
    want, _ = attention_forward(
        q, kv, indices, length, scale=0.1, v_channels=16, rows=layout(q, kv), options=options
    )
    assert torch.equal(got, want)
    assert torch.equal(wide[::2], q)
