"""The opaque ``torch.library`` ops. Their names and schemas are stable API; their bodies are in ``_execution``.

One op decides; one op per stage runs what it decided. ``plan`` is the 0-d int64 CPU tensor that ``decide`` returned:
a tensor, so that compiled graphs, checkpoint policies and the saved tensors of a graph carry it like any other.
An op cannot return None, so a zero-size tensor stands for a gradient that is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._dispatch.recording import NO_PLAN, RECORDED
from dsa_dispatch._dispatch.table import plan_for, record
from dsa_dispatch._execution import attention, gqa, loss, projection, topk

NAMESPACE: Final = "dsa_dispatch"
# torch.library is untyped in the releases we support.
LIBRARY: Final[Any] = torch.library.Library(NAMESPACE, "DEF")


def _define(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)


def _decide(inputs: Sequence[Tensor], request: str, needs_grad: Sequence[bool], policy: str) -> Tensor:
    if RECORDED.get() is not None:
        record(inputs, request, needs_grad, policy)
        return torch.tensor(NO_PLAN, device="cpu")
    # A clone: compiled code may reuse the memory of an op's result once it has been read.
    return plan_for(inputs, request, needs_grad, policy).token.clone()


def _fake_decide(inputs: Sequence[Tensor], request: str, needs_grad: Sequence[bool], policy: str) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _fake_topk(q: Tensor, k: Tensor, weights: Tensor, starts: Any, ends: Any, topk: int, *_: Any) -> Any:
    rows, batch = q.shape[:2]
    return (
        q.new_empty((batch, rows, topk), dtype=torch.int32),
        q.new_empty((batch, rows), dtype=torch.int32),
    )


def _fake_outputs(query: Tensor, v_channels: Any) -> tuple[Tensor, Tensor]:
    rows, batch, heads = query.shape[:3]
    return (
        query.new_empty((rows, batch, heads, v_channels)),
        query.new_empty((batch, rows, heads), dtype=accumulation_dtype(query.dtype)),
    )


def _fake_attention(
    query: Tensor, key: Tensor, indices: Tensor, length: Any, scale: float, v_channels: int, plan: Tensor
) -> tuple[Tensor, Tensor]:
    return _fake_outputs(query, v_channels)


def _fake_gqa(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake_outputs(query, value.shape[3])


def _like(tensor: Tensor, needed: bool, dtype: torch.dtype | None = None) -> Tensor:
    dtype = tensor.dtype if dtype is None else dtype
    return tensor.new_empty(tensor.shape if needed else (0,), dtype=dtype)


def _fake_attention_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    length: Any,
    out: Tensor,
    lse: Tensor,
    scale: float,
    v_channels: int,
    need_dq: bool,
    need_dkv: bool,
    plan: Tensor,
) -> tuple[Tensor, Tensor]:
    return _like(query, need_dq), _like(key, need_dkv, None if need_dkv else query.dtype)


def _fake_gqa_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    length: Any,
    out: Tensor,
    lse: Tensor,
    scale: float,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    plan: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(query, need_dq), _like(key, need_dk), _like(value, need_dv)


def _fake_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    indices: Any,
    length: Any,
    lse: Any,
    starts: Any,
    ends: Any,
    valid_rows: Any,
    scale: float,
    coefficient: float,
    per_token: bool,
    use_relu: bool,
    need_dq: bool,
    need_dk: bool,
    need_dw: bool,
    block_size: Any,
    link: Any,
    plan: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = accumulation_dtype(q.dtype)
    scalar = q.new_empty((), dtype=wide)
    return (
        scalar,
        torch.empty_like(scalar),
        _like(q, need_dq, wide),
        _like(k, need_dk, wide),
        _like(weights, need_dw, wide),
    )


def _scale_gradient(
    gradient: Tensor, factor: Tensor, upstream: Tensor, link: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return (gradient * (factor * upstream)).to(dtype)


def _fake_scale_gradient(
    gradient: Tensor, factor: Tensor, upstream: Tensor, link: Any, dtype: torch.dtype
) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


_define(
    "decide(Tensor[] inputs, str request, bool[] needs_grad, str policy) -> Tensor", _decide, _fake_decide
)
_define(
    "indexer_topk(Tensor q, Tensor k, Tensor weights, Tensor? starts, Tensor? ends, int topk, bool use_relu, "
    "int? block_size, Tensor plan) -> (Tensor, Tensor)",
    topk.indexer_topk,
    _fake_topk,
)
_define(
    "attention_forward(Tensor query, Tensor key, Tensor indices, Tensor? length, float scale, int v_channels, "
    "Tensor plan) -> (Tensor, Tensor)",
    attention.attention_forward,
    _fake_attention,
)
_define(
    "attention_backward(Tensor dout, Tensor query, Tensor key, Tensor indices, Tensor? length, Tensor out, "
    "Tensor lse, float scale, int v_channels, bool need_dq, bool need_dkv, Tensor plan) -> (Tensor, Tensor)",
    attention.attention_backward,
    _fake_attention_backward,
)
_define(
    "gqa_forward(Tensor query, Tensor key, Tensor value, Tensor indices, Tensor? length, float scale, "
    "Tensor plan) -> (Tensor, Tensor)",
    gqa.gqa_forward,
    _fake_gqa,
)
_define(
    "gqa_backward(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor indices, Tensor? length, Tensor out, "
    "Tensor lse, float scale, bool need_dq, bool need_dk, bool need_dv, Tensor plan) -> (Tensor, Tensor, Tensor)",
    gqa.gqa_backward,
    _fake_gqa_backward,
)
_define(
    "indexer_loss(Tensor q, Tensor k, Tensor weights, Tensor query, Tensor key, Tensor? indices, Tensor? length, "
    "Tensor? lse, Tensor? starts, Tensor? ends, Tensor? valid_rows, float scale, float coefficient, bool per_token, "
    "bool use_relu, bool need_dq, bool need_dk, bool need_dw, int? block_size, Tensor? link, "
    "Tensor plan) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    loss.indexer_loss,
    _fake_loss,
)
_define(
    "scale_gradient(Tensor gradient, Tensor factor, Tensor upstream, Tensor? link, ScalarType dtype) -> Tensor",
    _scale_gradient,
    _fake_scale_gradient,
)

_define("project_up(Tensor out, Tensor weight) -> Tensor", projection.project_up, projection.fake_project_up)
_define(
    "project_up_backward(Tensor gradient, Tensor out, Tensor weight, bool need_out, bool need_weight) "
    "-> (Tensor, Tensor)",
    projection.project_up_backward,
    projection.fake_project_up_backward,
)

OPS = torch.ops.dsa_dispatch
decide = OPS.decide.default
indexer_topk = OPS.indexer_topk.default
attention_forward = OPS.attention_forward.default
attention_backward = OPS.attention_backward.default
gqa_forward = OPS.gqa_forward.default
gqa_backward = OPS.gqa_backward.default
indexer_loss = OPS.indexer_loss.default
scale_gradient = OPS.scale_gradient.default
project_up = OPS.project_up.default
project_up_backward = OPS.project_up_backward.default

ALL_OPS: Final = (
    decide,
    indexer_topk,
    attention_forward,
    attention_backward,
    gqa_forward,
    gqa_backward,
    indexer_loss,
    scale_gradient,
    project_up,
    project_up_backward,
)
