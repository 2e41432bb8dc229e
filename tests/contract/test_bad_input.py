"""Bad input: a clear ``InvalidInputError`` before any backend is asked, and every tensor left as it was."""

from __future__ import annotations

import math
import re
import types

import pytest
import torch
from contract import make

from dsa_dispatch import (
    run_fused_absorbed_sparse_attention,
    run_fused_dsa_attention,
    run_fused_gqa_sparse_attention,
    run_fused_qk_topk,
    run_fused_qk_topk_with_loss,
)
from dsa_dispatch.errors import InvalidInputError, NoBackendError
from dsa_dispatch.testing import isolated_registry

META = "meta"


def f32(*shape):
    return make.normal(*shape, dtype=torch.float32, grad=True)


def topk():
    return {
        "q": f32(4, 2, 3, 5), "k": f32(6, 2, 5), "weights": f32(4, 2, 3), "index_topk": 3, "starts": None,
        "ends": None,
    }  # fmt: skip


def loss():
    return topk() | {
        "block_size": None, "query": f32(4, 2, 3, 7), "key": f32(6, 2, 1, 7), "softmax_scale": 0.5, "loss_coeff": 0.1,
    }  # fmt: skip


def absorbed():
    return {
        "query": f32(4, 2, 3, 7), "key": f32(6, 2, 1, 7), "topk_indices": make.ids(2, 4, 3, 6),
        "softmax_scale": 0.5, "v_channels": 5, "topk_length": torch.full((2, 4), 3),
    }  # fmt: skip


def grouped():
    return {
        "query": f32(4, 2, 6, 7), "key": f32(6, 2, 3, 7), "value": f32(6, 2, 3, 5),
        "topk_indices": make.ids(2, 4, 3, 6), "softmax_scale": 0.5, "topk_length": torch.full((2, 4), 3),
    }  # fmt: skip


def dsa():
    return {
        "query": f32(4, 2, 3, 7), "key": f32(6, 2, 1, 7), "up_v_weight": f32(3, 2, 5), "q_indexer": f32(4, 2, 3, 5),
        "k_indexer": f32(6, 2, 5), "indexer_weights": f32(4, 2, 3), "indexer_topk": 3, "softmax_scale": 0.5,
        "loss_coeff": 0.1,
    }  # fmt: skip


OPERATIONS = {
    "topk": (run_fused_qk_topk, topk),
    "loss": (run_fused_qk_topk_with_loss, loss),
    "absorbed": (run_fused_absorbed_sparse_attention, absorbed),
    "grouped": (run_fused_gqa_sparse_attention, grouped),
    "dsa": (run_fused_dsa_attention, dsa),
}

STARTS, ENDS = torch.zeros(4, dtype=torch.int32), torch.full((4,), 6, dtype=torch.int32)
SCALES = [None, 0.0, -1.0, math.inf, math.nan, torch.tensor(0.5), "0.5", True]
ATTENTION_SHAPES = [
    ({"query": f32(4, 3, 7)}, r"query: expected 4 dimensions \[sq, b, h", r"query.unsqueeze\(1\)"),
    ({"query": f32(4, 2, 0, 7)}, "query: needs at least one of heads", r"\[4, 2, 0, 7\]"),
    ({"key": f32(6, 2, 7)}, "key: expected 4 dimensions", r"\[6, 2, 7\]"),
    ({"key": f32(6, 3, 1, 7)}, "key: expected .* with size 2 in dimension 1", r"got shape \[6, 3, 1, 7\]"),
    ({"query": f32(4, 2, 3, 8)}, "key: expected .* with size 8 in dimension 3", "as in query"),
    ({"query": f32(4, 2, 3, 7).long()}, "query: got dtype torch.int64", "bfloat16"),
    ({"query": f32(4, 2, 3, 7).half()}, "query is torch.float16 and key is torch.float32", "same dtype"),
    (
        {"topk_indices": make.ids(2, 4, 3, 6).short()},
        "topk_indices: got dtype torch.int16",
        "int32 and int64",
    ),
    (
        {"topk_indices": make.ids(2, 4, 3, 6).float()},
        "topk_indices: got dtype torch.float32",
        "int32 and int64",
    ),
    (
        {"topk_indices": make.ids(4, 2, 3, 6)},
        "topk_indices: expected .* with size 2 in dimension 0",
        "as in query",
    ),
    ({"topk_indices": make.ids(2, 4, 3, 6)[0]}, r"topk_indices: expected 3 dimensions", r"unsqueeze\(0\)"),
    ({"topk_length": torch.full((2, 5), 3)}, "topk_length: expected .* size 4", r"got shape \[2, 5\]"),
    ({"topk_length": torch.full((2, 4), 3.0)}, "topk_length: got dtype torch.float32", "int32 and int64"),
    ({"topk_length": torch.full((4,), 3)}, "topk_length: expected 2 dimensions", r"got shape \[4\]"),
    ({"key": f32(6, 2, 1, 7).detach().to(META)}, "key is on meta, but query is on cpu", "one device"),
    ({"query": [1.0]}, "query: expected a torch.Tensor, got list", ""),
]
INDEXER_SHAPES = [
    ({"q": f32(4, 3, 5)}, "expected 4 dimensions .sq, b, hi, di.", r"unsqueeze\(1\)"),
    ({"q": f32(4, 2, 0, 5), "weights": f32(4, 2, 0)}, "needs at least one of index heads", r"\[4, 2, 0, 5\]"),
    ({"q": f32(4, 2, 3, 0), "k": f32(6, 2, 0)}, "needs at least one of index channels", r"\[4, 2, 3, 0\]"),
    ({"k": f32(6, 5)}, "k: expected 3 dimensions", r"unsqueeze\(1\)"),
    ({"k": f32(6, 2, 4)}, "k: expected .* with size 5 in dimension 2", "as in q"),
    ({"k": f32(6, 2, 5).double()}, "q is torch.float32 and k is torch.float64", "cast one"),
    ({"weights": f32(4, 3)}, "weights: expected 3 dimensions", r"unsqueeze\(1\)"),
    ({"weights": f32(4, 2, 2)}, "weights: expected .* with size 3 in dimension 2", "as in q"),
    ({"weights": torch.ones(4, 2, 3, dtype=torch.int32)}, "weights: got dtype torch.int32", "float32"),
    ({"weights": f32(4, 2, 3).detach().to(META)}, "weights is on meta, but .* on cpu", "one device"),
    ({"starts": STARTS}, "starts is given and ends is None", "neither"),
    ({"ends": ENDS}, "ends is given and starts is None", "neither"),
    ({"starts": STARTS[:3], "ends": ENDS}, "starts: expected .* with size 4", r"got shape \[3\]"),
    ({"starts": STARTS, "ends": ENDS.expand(3, 4)}, "ends: expected .* with size 2", r"got shape \[3, 4\]"),
    ({"starts": STARTS.view(1, 1, 4), "ends": ENDS}, "starts: expected .sq. or", r"got shape \[1, 1, 4\]"),
    ({"starts": STARTS.float(), "ends": ENDS}, "starts: got dtype torch.float32", "int32 and int64"),
    ({"starts": STARTS.to(META), "ends": ENDS}, "starts is on meta", "one device"),
    ({"index_topk": 0}, "index_topk: got 0", "at least 1"),
    ({"index_topk": 2.0}, "index_topk: got 2.0", "int"),
    ({"block_size": 0}, "block_size: got 0", "at least 1"),
    ({"packed_seq_params": object()}, "packed_seq_params needs starts and ends", "decide"),
    ({"cp_size": 2}, "cp_size=2 needs starts and ends", "decide"),
    ({"cp_size": 0}, "cp_size: got 0", "at least 1"),
]


class Group:
    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


LOSS_ARGUMENTS = [
    ({"query_valid_rows": torch.ones(3, dtype=torch.bool)}, "query_valid_rows: expected", "sq=4, b=2"),
    ({"query_valid_rows": torch.ones(3, 4, dtype=torch.bool)}, "query_valid_rows: expected", r"\[3, 4\]"),
    ({"query_valid_rows": torch.ones(4)}, "query_valid_rows: got dtype torch.float32", "bool"),
    ({"loss_coeff": -0.1}, "loss_coeff: got -0.1", "at least 0"),
    ({"loss_coeff": math.nan}, "loss_coeff: got nan", "finite"),
    ({"loss_coeff": torch.tensor(0.1)}, "loss_coeff: got tensor", "float"),
    ({"pg_collection": types.SimpleNamespace(tp=Group(2))}, "tensor-parallel group of 2 ranks", "one rank"),
]
TEACHER_SHAPES = [
    ({"query": f32(4, 3, 7)}, "query: expected 4 dimensions", r"unsqueeze\(1\)"),
    ({"query": f32(5, 2, 3, 7)}, "query: expected .* with size 4 in dimension 0", "as in q"),
    ({"key": f32(7, 2, 1, 7)}, "key: expected .* with size 6 in dimension 0", "as in k"),
    ({"key": f32(6, 2, 2, 7)}, "key: expected one shared head or the 3 heads", r"\[6, 2, 2, 7\]"),
    ({"query": f32(4, 2, 3, 7).double()}, "query is torch.float64 and key is torch.float32", "same dtype"),
    ({"query": f32(4, 2, 3, 7).detach().to(META)}, "query is on meta", "one device"),
]
DSA_NAMES = {"q": "q_indexer", "k": "k_indexer", "weights": "indexer_weights", "index_topk": "indexer_topk",
             "starts": "varlen_starts", "ends": "varlen_ends"}  # fmt: skip


def renamed_text(text):
    for plain, name in DSA_NAMES.items():
        text = re.sub(rf"\b{plain}\b(?=:| is| and|$)", name, text)
    return text


def renamed(changes):
    return {DSA_NAMES.get(name, name): value for name, value in changes.items()}


CASES = [
    *(("absorbed", *case) for case in ATTENTION_SHAPES),
    *(("grouped", *case) for case in ATTENTION_SHAPES if case[0].keys() & {"topk_indices", "topk_length"}),
    *(("topk", *case) for case in INDEXER_SHAPES),
    *(("loss", *case) for case in [*INDEXER_SHAPES, *LOSS_ARGUMENTS, *TEACHER_SHAPES]),
    *(
        ("dsa", renamed(change), renamed_text(found), renamed_text(hint))
        for change, found, hint in INDEXER_SHAPES
        if "block_size" not in change
    ),
    *(("dsa", *case) for case in LOSS_ARGUMENTS),
    *(
        (name, {"softmax_scale": scale}, "softmax_scale: got", "float")
        for name in ("loss", "absorbed", "grouped", "dsa")
        for scale in SCALES
    ),
    ("absorbed", {"v_channels": 8}, "v_channels: got 8", "up to the 7 channels"),
    ("absorbed", {"v_channels": 0}, "v_channels: got 0", "at least 1"),
    ("absorbed", {"key": f32(6, 2, 3, 7)}, "key: expected .* with size 1 in dimension 2", "one shared head"),
    ("absorbed", {"query": f32(4, 2, 3, 0), "key": f32(6, 2, 1, 0)}, "needs at least one of .*channels", "query"),
    ("grouped", {"query": f32(4, 2, 5, 7)}, "query has 5 heads and key 3", "multiple"),
    ("grouped", {"query": f32(4, 2, 0, 7)}, "query: needs at least one of heads", ""),
    ("grouped", {"key": f32(6, 2, 0, 7), "value": f32(6, 2, 0, 5)}, "key: needs at least one of heads", ""),
    ("grouped", {"value": f32(6, 2, 3, 0)}, "value: needs at least one of channels", ""),
    ("grouped", {"value": f32(6, 2, 2, 5)}, "value: expected .* with size 3 in dimension 2", "as in key"),
    ("grouped", {"value": f32(6, 2, 3, 5).double()}, "value is torch.float64", "same dtype"),
    ("grouped", {"query": f32(4, 6, 7)}, "query: expected 4 dimensions", r"query.unsqueeze\(1\)"),
    ("dsa", {"up_v_weight": None}, "up_v_weight: got None", r"\[h, vh, dv\]"),
    ("dsa", {"up_v_weight": f32(2, 2, 5)}, "up_v_weight: expected .* with size 3 in dimension 0", "as in query"),
    ("dsa", {"up_v_weight": f32(3, 2, 9)}, "v_channels: got 9", "up to the 7 channels"),
    ("dsa", {"up_v_weight": f32(3, 0, 5)}, "up_v_weight: needs at least one of value channels", ""),
    ("dsa", {"up_v_weight": f32(3, 2, 5).long()}, "up_v_weight: got dtype torch.int64", "float32"),
    ("dsa", {"query": f32(4, 3, 7)}, "query: expected 4 dimensions", r"query.unsqueeze\(1\)"),
    ("dsa", {"q_indexer": f32(5, 2, 3, 5), "indexer_weights": f32(5, 2, 3)}, "with size 5 in dimension 0", "q"),
    ("dsa", {"q_indexer": f32(5, 2, 3, 5), "indexer_weights": f32(5, 2, 3), "loss_coeff": 0.0},
     "with size 5 in dimension 0", "q"),
    ("dsa", {"k_indexer": f32(7, 2, 5), "loss_coeff": 0.0}, "with size 7 in dimension 0", "k"),
    ("dsa", {"q_indexer": f32(4, 1, 3, 5), "indexer_weights": f32(4, 1, 3), "k_indexer": f32(6, 1, 5),
             "loss_coeff": 0.0}, "with size 1 in dimension 1", "q"),
    ("dsa", {"k_indexer": f32(6, 2, 5).detach().to(META), "loss_coeff": 0.0}, "is on meta", "one device"),
    ("dsa", {"query": torch.tensor(1.0), "attn_mask_type": None}, "query: expected 4 dimensions", ""),
    ("dsa", {"key_positions": [0, 1]}, "key_positions: expected a torch.Tensor, got list", ""),
]  # fmt: skip


def state(value):
    if not isinstance(value, torch.Tensor):
        return None
    content = value.detach().clone() if value.device.type != "meta" else None
    return value._version, value.shape, value.stride(), content


@pytest.mark.parametrize(("operation", "changes", "found", "hint"), CASES)
def test_it_is_refused_before_any_backend_is_asked(operation, changes, found, hint):
    function, build = OPERATIONS[operation]
    arguments = build() | changes
    before = {name: state(value) for name, value in arguments.items()}
    with (
        isolated_registry() as runtime,  # no backend at all: were one asked for, the error would say so
        pytest.raises(InvalidInputError, match=f"(?s){found}.*") as caught,
    ):
        function(config=None, **arguments)

    assert re.search(hint, str(caught.value)), str(caught.value)
    assert not runtime.counters
    for name, was in before.items():
        now = state(arguments[name])
        if was is not None:
            assert now[:3] == was[:3]
            assert was[3] is None or torch.equal(now[3], was[3])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_arguments_of_these_cases_are_good_until_they_are_changed(operation):
    function, build = OPERATIONS[operation]
    function(config=None, **build())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_vmap_is_refused(operation):
    function, build = OPERATIONS[operation]
    arguments = build()
    first = next(iter(arguments))

    def one(tensor):
        return function(config=None, **(arguments | {first: tensor}))

    with pytest.raises(InvalidInputError, match=r"batched by vmap.*second dimension"):
        torch.func.vmap(one)(arguments[first].detach().expand(2, *arguments[first].shape))


class FakeDTensor(torch.Tensor):
    """Has the module name of a DTensor: what makes one is a process group, which these tests do without."""


FakeDTensor.__module__ = "torch.distributed.tensor._api"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_distributed_tensor_is_refused(operation):
    function, build = OPERATIONS[operation]
    arguments = build()
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            changed = arguments | {name: value.detach().as_subclass(FakeDTensor)}
            with pytest.raises(InvalidInputError, match=r"is a DTensor.*to_local\(\)"):
                function(config=None, **changed)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"value": f32(6, 2, 3, 2)}, "explicit_values"),
        ({"absorbed_mla": False}, "explicit_values"),
        ({"key_positions": torch.arange(6)}, "key_positions"),
        ({"attn_mask_type": None}, "mask"),
        ({"attn_mask_type": types.SimpleNamespace(name="no_mask")}, "mask"),
    ],
)
def test_a_legal_call_that_nobody_serves_is_never_computed_without_what_it_asked(changes, named):
    with pytest.raises(NoBackendError, match=named):
        run_fused_dsa_attention(config=None, **(dsa() | changes))


def test_teacher_keys_per_head_are_a_legal_call_that_nobody_serves():
    with pytest.raises(NoBackendError, match="per_head_keys"):
        run_fused_qk_topk_with_loss(config=None, **(loss() | {"key": f32(6, 2, 3, 7)}))


def test_a_tensor_parallel_group_matters_to_the_loss_alone():
    out, _ = run_fused_dsa_attention(
        config=None, **(dsa() | {"loss_coeff": 0.0, "pg_collection": types.SimpleNamespace(tp=Group(2))})
    )
    assert out.shape == (4, 2, 6)


@pytest.mark.parametrize("mask", ["causal", "padding_causal", types.SimpleNamespace(name="causal")])
def test_a_causal_mask_is_what_the_bounds_say(mask):
    plain, _ = run_fused_dsa_attention(config=None, **dsa())
    masked, _ = run_fused_dsa_attention(config=None, **dsa(), attn_mask_type=mask)
    assert torch.equal(plain, masked)
