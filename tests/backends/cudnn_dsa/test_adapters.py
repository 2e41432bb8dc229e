"""What the adapters add to the frontend: plans in a bounded table, the mask of a slice, the fused selection, groups."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types
from unittest import mock

import fake_frontend
import pytest
import torch

from dsa_backends.cudnn_dsa import attention_backward, attention_forward, frontend, indexer_topk
from dsa_backends.cudnn_dsa.attention_backward import row_pieces
from dsa_backends.cudnn_dsa.plans import PLANS, Plans
from dsa_backends.cudnn_dsa.segments import segments
from dsa_backends.cudnn_dsa.spec import SPEC
from dsa_backends.flash_mla.slots import LN2, aligned, is_hopper, on_device, packed
from dsa_backends.torch_dense import indexer_topk as reference
from dsa_dispatch._call import CallSpec, DeviceInfo, RowLayout, StageOptions
from dsa_dispatch._decline import DeclineCode
from dsa_dispatch._dispatch.check import declines

OPTIONS = StageOptions()


@pytest.fixture(autouse=True)
def frontend_of_fakes():
    with fake_frontend.installed():
        yield


def backward_operands(rows, heads=2, channels=512, keys=5, width=128):
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    ids = torch.full((rows, width), -1, dtype=torch.int32)
    ids[:, :3] = torch.randint(0, keys, (rows, 3), generator=generator)
    length = torch.full((rows,), 3, dtype=torch.int32)
    q, kv = draw(rows, heads, channels), draw(keys, channels)
    out, lse = fake_frontend.forward_rows(q, kv, ids, length, 0.1, 512)
    return q, kv, ids, length, out, lse, draw(rows, heads, 512)


def backward(operands, **changes):
    arguments = {
        "need_dq": True,
        "dkv": torch.zeros(operands[1].shape),
        "rows": RowLayout(1, 1, 1),
        **changes,
    }
    return attention_backward.attention_backward(
        *operands, scale=0.1, v_channels=512, options=OPTIONS, **arguments
    )


def test_variable_lengths_do_not_grow_the_plans_without_bound():
    with mock.patch.object(PLANS, "limit", 4):
        for rows in range(1, 9):
            backward(backward_operands(rows))
    assert len(PLANS) == 4


def test_one_shape_is_planned_once():
    built = fake_frontend.SparseAttentionBackward.built
    for _ in range(3):
        backward(backward_operands(6))
    assert fake_frontend.SparseAttentionBackward.built == built + 1


def test_the_least_recently_used_plan_goes_first():
    plans = Plans(limit=2)
    made = {name: plans.get(name, fake_frontend.Plan) for name in ("a", "b")}
    plans.get("a", fake_frontend.Plan)
    plans.get("c", fake_frontend.Plan)
    assert plans.get("a", fake_frontend.Plan) is made["a"]
    assert plans.get("b", fake_frontend.Plan) is not made["b"]


def test_pieces_of_rows_give_the_gradients_of_the_whole():
    operands = backward_operands(150)
    whole_dkv = torch.zeros(operands[1].shape)
    whole = backward(operands, dkv=whole_dkv)
    with mock.patch.object(attention_backward, "MAX_ELEMENTS", 64 * 2 * 512):
        dkv = torch.zeros(operands[1].shape)
        pieces = backward(operands, dkv=dkv)
    assert torch.equal(pieces, whole)
    # Each piece's sum is rounded to bf16 once, and so is the whole: roundings of at most 2**-9 each.
    assert float((dkv - whole_dkv).norm() / whole_dkv.norm()) < 2**-8


@pytest.mark.parametrize(
    ("rows", "elements"),
    [(1, 10), (29127, 128 * 576), (29128, 128 * 576), (100_000, 73728), (58_255, 64 * 576)],
)
def test_pieces_cover_all_rows_below_the_limit(rows, elements):
    """Each begins where the lengths, 4 bytes a row, begin at 16 bytes: the kernel was compiled to expect that."""
    pieces = list(row_pieces(rows, elements))
    assert all(piece.start * 4 % 16 == 0 for piece in pieces)
    assert len(pieces) == -(-rows // (attention_backward.MAX_ELEMENTS // elements // 64 * 64))
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == rows
    assert all((piece.stop - piece.start) * elements <= attention_backward.MAX_ELEMENTS for piece in pieces)


def test_delta_comes_from_the_output_in_the_inputs_type_and_that_is_the_gradients_error():
    """Why the backward ranks below one that is given more: no row of few, steep scores can be more accurate."""
    q, kv, ids, length, out, lse, dout = backward_operands(64)
    q = q * 30
    out, lse = fake_frontend.forward_rows(q, kv, ids, length, 0.1, 512)
    wide_q, wide_out = q.double().requires_grad_(), out.double()
    keys = kv.double()[ids[:, :3].long()]
    weight = (torch.einsum("thd,twd->thw", wide_q, keys) * 0.1).softmax(2)
    (exact,) = torch.autograd.grad(torch.einsum("thw,twd->thd", weight, keys), wide_q, dout.double())
    wide = weight.detach()
    products = torch.einsum("thd,twd->thw", dout.double(), keys)
    rounded = wide * (products - (wide_out * dout.double()).sum(2, keepdim=True)) * 0.1
    expected = torch.einsum("thw,twd->thd", rounded, keys)
    got = backward((q, kv, ids, length, out, lse, dout)).double()
    assert (got - exact).norm() > 3 * (got - expected).norm()


def test_strided_operands_are_packed_and_packed_ones_are_not_copied():
    operands = backward_operands(6)
    strided = tuple(torch.stack((tensor, tensor), 1)[:, 0] for tensor in operands)
    assert torch.equal(backward(strided), backward(operands))
    assert packed(operands[0]) is operands[0]


@pytest.mark.parametrize("made", [packed, aligned])
def test_what_does_not_begin_at_16_bytes_is_copied_to_where_it_does(made):
    buffer = torch.arange(4 * 64 + 1, dtype=torch.bfloat16)
    start = next(first for first in (0, 1) if buffer[first:].data_ptr() % 16)
    shifted = buffer[start : start + 4 * 64].view(4, 64)
    result = made(shifted)
    assert result.data_ptr() % 16 == 0
    assert torch.equal(result, shifted)


@pytest.mark.parametrize(("width", "kept"), [(96, True), (100, False)])
def test_rows_are_read_in_place_where_each_begins_at_16_bytes(width, kept):
    rows = torch.zeros(4, width, dtype=torch.bfloat16)[:, :64]
    assert (aligned(rows).data_ptr() == rows.data_ptr()) is kept


@pytest.mark.parametrize(
    ("kind", "capability", "hopper"),
    [("cpu", (9, 0), False), ("cuda", (9, 0), True), ("cuda", (10, 0), False), ("cuda", (12, 0), False)],
)
def test_hopper_is_one_compute_capability(kind, capability, hopper):
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        assert is_hopper(torch.device(kind)) is hopper


def test_kernels_are_launched_on_the_device_of_their_tensors():
    """Providers look at the current device, which may be another one."""
    entered = mock.MagicMock()
    elsewhere = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda", 3))
    with mock.patch.object(torch.cuda, "device", return_value=entered) as guard:
        assert on_device(elsewhere) is entered
        with on_device(torch.zeros(1)):
            pass
    guard.assert_called_once_with(torch.device("cuda", 3))


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_a_slice_of_rows_sees_the_keys_that_the_whole_call_gives_it(chunk):
    layout = RowLayout(batch=2, rows=7, keys=140)
    ends = torch.tensor([140 - 7 + row + 1 for _ in range(2) for row in range(7)])
    for first in range(0, 14, chunk):
        count = min(chunk, 14 - first)
        for segment in segments(layout.at(first), count):
            for row in range(segment.first, segment.last):
                assert segment.offset + row - segment.first + 1 == ends[first + row]
            assert segment.columns <= 140


def test_rows_before_the_first_key_are_left_out():
    layout = RowLayout(batch=1, rows=9, keys=4)
    (segment,) = segments(layout, 9)
    assert (segment.first, segment.last, segment.offset) == (5, 9, 0)


def test_ranges_never_hand_more_rows_than_keys_to_the_scores():
    layout = RowLayout(batch=1, rows=9, keys=4, bounds="ranges")
    assert [segment.rows for segment in segments(layout, 9)] == [4, 4, 1]


def select(function, rows=6, keys=300, topk=8, heads=16, layout=None):
    layout = layout or RowLayout(batch=1, rows=rows, keys=keys)
    generator = torch.Generator().manual_seed(3)
    q = torch.randint(-2, 3, (rows, heads, 128), generator=generator).bfloat16()
    k = torch.randint(-2, 3, (keys, 128), generator=generator).bfloat16()
    w = torch.randint(-2, 3, (rows, heads), generator=generator).float()
    ends = (torch.arange(rows) + keys - rows + 1).clamp(min=0).int()
    return function(
        q, k, w, torch.zeros_like(ends), ends, rows=layout, topk=topk, use_relu=True, options=OPTIONS
    )


def test_the_fused_selection_chooses_the_same_keys():
    wanted, length = select(reference.indexer_topk)
    with mock.patch.object(frontend, "is_blackwell", return_value=True):
        got, got_length = select(indexer_topk.indexer_topk)
    assert torch.equal(got.sort(1).values, wanted.sort(1).values)
    assert torch.equal(got_length, length)
    assert bool(((got >= 0) == (torch.arange(8) < length[:, None])).all())


def test_a_selection_of_every_key_asks_for_no_score():
    forbidden = mock.Mock(side_effect=AssertionError("scored"))
    with fake_frontend.installed(indexer_forward_wrapper=forbidden):
        got, length = select(indexer_topk.indexer_topk, keys=6, topk=8)
    assert length.tolist() == [1, 2, 3, 4, 5, 6]
    assert got[2].tolist() == [0, 1, 2, -1, -1, -1, -1, -1]


def test_a_negative_zero_ties_with_zero():
    rows, keys = 1, 256
    q, k = torch.zeros(rows, 16, 128).bfloat16(), torch.zeros(keys, 128).bfloat16()
    q[:, 0, 0], k[::2, 0] = 1.0, -1.0
    w = -torch.ones(rows, 16)
    ends = torch.full((rows,), keys, dtype=torch.int32)
    got, _ = indexer_topk.indexer_topk(
        q,
        k,
        w,
        torch.zeros_like(ends),
        ends,
        rows=RowLayout(1, rows, keys),
        topk=4,
        use_relu=True,
        options=OPTIONS,
    )
    assert sorted(got[0].tolist()) == [0, 1, 2, 3]


def test_more_than_64_heads_of_the_forward_run_in_groups():
    q, kv, ids, length, *_ = backward_operands(3, heads=192, channels=576)
    arguments = {"scale": 0.1, "v_channels": 512, "rows": RowLayout(1, 1, 1), "options": OPTIONS}
    out, lse = attention_forward.attention_forward(q, kv, ids, length, **arguments)
    for first in (0, 64, 128):
        part = slice(first, first + 64)
        one, one_lse = attention_forward.attention_forward(q[:, part], kv, ids, length, **arguments)
        assert torch.equal(out[:, part], one)
        assert torch.equal(lse[:, part], one_lse)


def test_a_forward_in_base_two_is_converted():
    def base_two(*args, **kwargs):
        result = fake_frontend.sparse_attention_forward_wrapper(*args, **kwargs)
        return {**result, "lse": result["lse"] / LN2}

    q, kv, ids, length, *_ = backward_operands(3, heads=64, channels=576)
    arguments = {"scale": 0.1, "v_channels": 512, "rows": RowLayout(1, 1, 1), "options": OPTIONS}
    wanted = attention_forward.attention_forward(q, kv, ids, length, **arguments)
    with fake_frontend.installed(sparse_attention_forward_wrapper=base_two):
        got = attention_forward.attention_forward(q, kv, ids, length, **arguments)
        assert attention_forward.provider().endswith("lse base 2")
    torch.testing.assert_close(got[1], wanted[1])


CALL = CallSpec(
    "run_fused_absorbed_sparse_attention",
    device="cuda",
    width=2048,
    heads=64,
    needs_grad=frozenset({"query", "key"}),
)


@pytest.mark.parametrize(
    ("capability", "served"),
    [
        ((8, 0), False),
        ((9, 0), True),
        ((10, 0), True),
        ((10, 3), True),
        ((10, 1), False),
        ((11, 0), False),
        ((12, 0), False),
    ],
)
@pytest.mark.parametrize("stage", ["attention_backward", "attention_forward"])
def test_gpus_are_a_list(stage, capability, served):
    info = DeviceInfo("cuda", "gpu", capability, 1 << 37, 1 << 18)
    codes = [decline.code for decline in declines(SPEC.stages[stage].capability, stage, CALL, info)]
    assert codes == ([] if served else [DeclineCode.COMPUTE_CAPABILITY])


def test_the_backward_takes_head_counts_as_they_are_and_pads_one_to_two():
    heads = SPEC.stages["attention_backward"].capability.heads
    assert [heads.fit(count) for count in (1, 2, 6, 8, 16, 64, 96, 128)] == [2, 2, 6, 8, 16, 64, 96, 128]


def test_widths_of_the_backward_are_bucketed():
    width = SPEC.stages["attention_backward"].capability.width
    assert {width.fit(size) for size in range(1, 129)} == {128}


def test_determinism_is_declined_for_the_backward_and_kept_by_the_selection():
    info = DeviceInfo("cuda", "gpu", (9, 0), 1 << 37, 1 << 18)
    call = dataclasses.replace(CALL, deterministic=True)
    (decline,) = declines(SPEC.stages["attention_backward"].capability, "attention_backward", call, info)
    assert decline.code is DeclineCode.DETERMINISM
    assert SPEC.stages["indexer_topk"].capability.tie_rule == "lower_index"


def test_the_spec_imports_no_provider():
    code = (
        "import sys, dsa_backends.cudnn_dsa.spec, dsa_backends.flash_mla.spec; "
        "print([name for name in ('cudnn', 'cutlass', 'sgl_kernel', 'flash_mla', 'tvm_ffi') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
