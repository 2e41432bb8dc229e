"""``torch.library.opcheck`` on every op: schema, fake tensors, autograd registration, tracing."""

from __future__ import annotations

import pytest
import torch
from contract import make

from dsa_dispatch._dispatch.table import Request
from dsa_dispatch._operations import library

ROWS, KEYS = 3, 5


QUICK = ("test_schema", "test_faketensor", "test_autograd_registration")


def opcheck(op, arguments, traced=False):
    """Tracing through AOT takes seconds, so one argument set of each op goes through it and all through the rest."""
    torch.library.opcheck(
        op, arguments, test_utils=(*QUICK, "test_aot_dispatch_dynamic") if traced else QUICK
    )


def attention_request(group):
    return Request(group, "opcheck", v_channels=2, bounds="ranges").text()


def indexer_request(group, sparse=True, bounds="causal"):
    return Request(group, "opcheck", width=2, sparse_loss=sparse, bounds=bounds).text()


def qkv(batch, grad):
    return (
        make.normal(ROWS, batch, 4, 3, seed=1, grad=grad),
        make.normal(KEYS, batch, 2, 3, seed=2, grad=grad),
        make.normal(KEYS, batch, 2, 2, seed=3, grad=grad),
    )


def absorbed(batch, grad):
    return (
        make.normal(ROWS, batch, 2, 3, seed=1, grad=grad),
        make.normal(KEYS, batch, 1, 3, seed=2, grad=grad),
    )


def indexer(batch, grad):
    return (
        make.normal(ROWS, batch, 2, 3, seed=4, grad=grad),
        make.normal(KEYS, batch, 3, seed=5, grad=grad),
        make.normal(ROWS, batch, 2, seed=6, dtype=torch.float32, grad=grad),
    )


def detached(tensors):
    return [tensor.detach() for tensor in tensors]


def ids(batch, dtype=torch.int32):
    return make.ids(batch, ROWS, 4, KEYS, dtype=dtype)


def lengths(batch, given):
    return torch.full((batch, ROWS), 3) if given else None


def decide(tensors, request, need):
    return library.decide(detached(tensors), request, need, "")


CASES = pytest.mark.parametrize(
    ("batch", "grad", "given"),
    [(1, False, False), (1, True, True), (2, True, False), (2, False, True), (0, True, True)],
)  # fmt: skip


def test_every_op_is_checked():
    checked = {
        library.decide, library.indexer_topk, library.attention_forward, library.attention_backward,
        library.gqa_forward, library.gqa_backward, library.indexer_loss, library.scale_gradient,
        library.project_up, library.project_up_backward,
    }  # fmt: skip
    assert set(library.ALL_OPS) == checked


@CASES
def test_decide(batch, grad, given):
    tensors = [*detached(absorbed(batch, False)), ids(batch)]
    policy = "dsa_kernel_backend:torch_dense" if given else ""
    opcheck(
        library.decide,
        (tensors, attention_request("attention"), [grad, given], policy),
        traced=given and batch == 2,
    )


@CASES
def test_indexer_topk(batch, grad, given):
    tensors = indexer(batch, False)
    bounds = (torch.zeros(ROWS, dtype=torch.int32), torch.full((ROWS,), KEYS)) if given else (None, None)
    plan = decide(tensors, indexer_request("topk", bounds="ranges" if given else "causal"), [])
    opcheck(
        library.indexer_topk,
        (*tensors, *bounds, 2, grad, 2 if given else None, plan),
        traced=given and batch == 2,
    )


@CASES
def test_attention_forward(batch, grad, given):
    tensors = absorbed(batch, grad)
    plan = decide([*tensors, ids(batch)], attention_request("attention"), [grad, grad])
    dtype = torch.int64 if given else torch.int32
    opcheck(
        library.attention_forward,
        (*tensors, ids(batch, dtype), lengths(batch, given), 0.6, 2, plan),
        traced=grad and batch == 2,
    )


@CASES
@pytest.mark.parametrize("need", [(True, True), (True, False), (False, True), (False, False)])
def test_attention_backward(batch, grad, given, need):
    tensors = detached(absorbed(batch, False))
    plan = decide([*tensors, ids(batch)], attention_request("attention"), [True, True])
    length = lengths(batch, given)
    out, lse = library.attention_forward(*tensors, ids(batch), length, 0.6, 2, plan)
    dout = make.normal(*out.shape, seed=7, grad=grad)
    opcheck(
        library.attention_backward,
        (dout, *tensors, ids(batch), length, out, lse, 0.6, 2, *need, plan),
    )


@CASES
def test_gqa_forward(batch, grad, given):
    tensors = qkv(batch, grad)
    plan = decide([*tensors, ids(batch)], attention_request("gqa"), [grad] * 3)
    opcheck(
        library.gqa_forward,
        (*tensors, ids(batch), lengths(batch, given), 0.6, plan),
        traced=grad and batch == 2,
    )


@CASES
@pytest.mark.parametrize(
    "need", [(True, True, True), (False, True, False), (True, False, False), (False, False, True)]
)
def test_gqa_backward(batch, grad, given, need):
    tensors = detached(qkv(batch, False))
    plan = decide([*tensors, ids(batch)], attention_request("gqa"), [True] * 3)
    length = lengths(batch, given)
    out, lse = library.gqa_forward(*tensors, ids(batch), length, 0.6, plan)
    dout = make.normal(*out.shape, seed=7, grad=grad)
    opcheck(
        library.gqa_backward,
        (dout, *tensors, ids(batch), length, out, lse, 0.6, *need, plan),
    )


@CASES
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(
    "need", [(True, True, True), (False, False, True), (False, True, False), (False, False, False)]
)
def test_indexer_loss(batch, grad, given, sparse, need):
    tensors = indexer(batch, False)
    if grad:
        tensors = tuple(tensor.requires_grad_(wanted) for tensor, wanted in zip(tensors, need, strict=True))
    teacher = absorbed(batch, False)
    plan = decide([*tensors, *teacher], indexer_request("loss", sparse), need)
    chosen = (ids(batch)[..., :2].contiguous(), torch.full((batch, ROWS), 2, dtype=torch.int32))
    lse = make.normal(batch, ROWS, teacher[0].shape[2], seed=8) if sparse and given else None
    bounds = (torch.zeros(ROWS, dtype=torch.int32), torch.full((ROWS,), KEYS)) if given else (None, None)
    valid = torch.ones(batch, ROWS, dtype=torch.bool) if given else None
    opcheck(
        library.indexer_loss,
        (*tensors, *teacher, *(chosen if sparse else (None, None)), lse, *bounds, valid, 0.6, 0.7, given, given,
         *need, 2 if given else None, None if given else torch.zeros((), requires_grad=True), plan),
        traced=grad and batch == 2 and sparse and all(need),
    )  # fmt: skip


@pytest.mark.parametrize("link", [None, torch.zeros((), requires_grad=True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scale_gradient(dtype, link):
    gradient, factor = make.normal(3, 2, dtype=torch.float32), torch.tensor(0.5)
    opcheck(
        library.scale_gradient, (gradient, factor, torch.tensor(2.0, requires_grad=True), link, dtype),
    )  # fmt: skip


@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("grad", [False, True])
def test_project_up(batch, grad):
    opcheck(
        library.project_up,
        (make.normal(3, batch, 2, 5, grad=grad), make.normal(2, 4, 5, grad=grad)),
        traced=True,
    )


@pytest.mark.parametrize("need", [(True, True), (True, False), (False, True), (False, False)])
def test_project_up_backward(need):
    tensors = make.normal(3, 2, 8), make.normal(3, 2, 2, 5), make.normal(2, 4, 5)
    opcheck(library.project_up_backward, (*tensors, *need))
