"""``run_fused_absorbed_sparse_attention`` and ``run_fused_gqa_sparse_attention``."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from dsa_dispatch._dispatch.table import Request
from dsa_dispatch._operations import library
from dsa_dispatch._operations import validate as check
from dsa_dispatch._operations.indexer import needs
from dsa_dispatch._policy.config import explicit_text


@overload
def run_fused_absorbed_sparse_attention(
    config: object,
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def run_fused_absorbed_sparse_attention(
    config: object,
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: Tensor | None = None,
    *,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def run_fused_absorbed_sparse_attention(
    config: object,
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: Tensor | None = None,
    *,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


def run_fused_absorbed_sparse_attention(
    config: object,
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: Tensor | None = None,
    *,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every row over its selected keys, in the absorbed MLA layout: the value is ``key[...,
    :v_channels]``.

    ``query [sq, b, h, dqk]``, ``key [sk, b, 1, dqk]`` of one float dtype; ``topk_indices [b, sq, W]`` int32/int64,
    local
    to the batch item, holes allowed: an id below 0, at or above ``sk``, or in a slot at or past ``topk_length [b, sq]``
    is no key. A key named twice counts twice. ``softmax_scale`` is applied in fp32 after the dot product.

    Returns ``out [sq, b, h, v_channels]`` in query's dtype, contiguous; 0 where a row has no key. With
    ``return_lse`` the
    tuple ``(out, lse)``; ``lse [b, sq, h]`` is the natural logarithm in fp32 (fp64 for fp64), -inf where a row has no
    key, and not differentiable. Differentiable once, with respect to query and key.

    Raises ``InvalidInputError`` on bad input, ``ConfigError`` on a bad setting, ``NoBackendError`` when nobody may
    serve.
    """
    check.check_tensors(
        {"query": query, "key": key, "topk_indices": topk_indices, "topk_length": topk_length},
        optional=("topk_length",),
    )
    width = check.check_absorbed(query, key, v_channels)
    check.check_indices(query, topk_indices, topk_length)
    scale = check.check_scale(softmax_scale)
    plan = decide_attention("run_fused_absorbed_sparse_attention", config, query, key, topk_indices, width)
    out, lse = library.attention_forward(query, key, topk_indices, topk_length, scale, width, plan)
    return (out, lse) if return_lse else out


def decide_attention(
    operation: str,
    config: object,
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    v_channels: int,
    extras: str = "",
) -> Tensor:
    """The plan of an absorbed attention whose ids have the shape and dtype of ``topk_indices``."""
    request = Request("attention", operation, v_channels=v_channels, bounds="ranges", extras=extras).text()
    plan: Tensor = library.decide(
        [query.detach(), key.detach(), topk_indices],
        request,
        [needs(query), needs(key)],
        explicit_text(config),
    )
    return plan


@overload
def run_fused_gqa_sparse_attention(
    config: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def run_fused_gqa_sparse_attention(
    config: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    *,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def run_fused_gqa_sparse_attention(
    config: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    *,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


def run_fused_gqa_sparse_attention(
    config: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    *,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Grouped-query attention of every row over its selected keys, which all heads share.

    ``query [sq, b, hq, d]``, ``key [sk, b, hkv, d]``, ``value [sk, b, hkv, dv]``; hq a multiple of hkv. Everything
    else, the errors included, as in ``run_fused_absorbed_sparse_attention``. Returns ``out [sq, b, hq, dv]``.
    """
    check.check_tensors(
        {
            "query": query,
            "key": key,
            "value": value,
            "topk_indices": topk_indices,
            "topk_length": topk_length,
        },
        optional=("topk_length",),
    )
    check.check_grouped(query, key, value)
    check.check_indices(query, topk_indices, topk_length)
    scale = check.check_scale(softmax_scale)
    request = Request("gqa", "run_fused_gqa_sparse_attention", bounds="ranges").text()
    plan = library.decide(
        [query.detach(), key.detach(), value.detach(), topk_indices],
        request,
        [needs(query), needs(key), needs(value)],
        explicit_text(config),
    )
    out, lse = library.gqa_forward(query, key, value, topk_indices, topk_length, scale, plan)
    return (out, lse) if return_lse else out
