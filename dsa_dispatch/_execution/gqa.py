"""Bodies of the grouped-query attention ops."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._dispatch.plan import Plan, plan_of
from dsa_dispatch._execution.attention import (
    assemble,
    attention_memories,
    attention_memory,
    copied_upstream,
    empty_outputs,
    ids_of_chunk,
    key_gradient,
    not_needed,
    row_layout,
    with_rows,
    zeros,
)
from dsa_dispatch._execution.legalize import pad_channels, pad_query
from dsa_dispatch._execution.memory import require_budget
from dsa_dispatch._execution.rows import Chunk, flatten_keys, take_rows
from dsa_dispatch._execution.run import call_stage, opaque, planned_chunks, run_planned


@opaque
def gqa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    length: Tensor | None,
    scale: float,
    plan: Tensor,
) -> tuple[Tensor, Tensor]:
    """``query [sq, b, hq, d]``, ``key [sk, b, hkv, d]``, ``value [sk, b, hkv, dv]`` -> ``out [sq, b, hq, dv]``,
    ``lse``."""
    return run_planned(
        plan_of(plan),
        ("gqa_forward",),
        lambda planned: _forward(planned, query, key, value, indices, length, scale),
    )


def _forward(
    plan: Plan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    length: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    v_channels = value.shape[3]
    if not (query.numel() and key.numel() and indices.numel()):
        return empty_outputs(query, v_channels)
    stage = plan.stage("gqa_forward")
    legal = stage.legalization
    layout = row_layout(query, key)
    memory, *backward = attention_memories(plan, stage, query, (key, value), indices, v_channels)
    require_budget(memory, *backward)
    k, v = pad_channels(flatten_keys(key), legal), flatten_keys(value)

    def one(chunk: Chunk) -> tuple[Tensor, Tensor]:
        ids, lengths = ids_of_chunk(indices, length, chunk, key.shape[0], legal)
        result: tuple[Tensor, Tensor] = call_stage(
            stage,
            pad_query(take_rows(query, chunk), legal),
            k,
            v,
            ids,
            lengths,
            scale=scale,
            rows=layout.at(chunk.start),
            options=plan.options,
        )
        return result

    return assemble(query, memory, v_channels, one)


@opaque
def gqa_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    length: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    plan: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; a zero-size tensor stands for one that is not needed."""
    return run_planned(
        plan_of(plan),
        ("gqa_backward",),
        lambda planned: _backward(
            planned, dout, query, key, value, indices, length, out, lse, scale, (need_dq, need_dk, need_dv)
        ),
    )


def _backward(
    plan: Plan,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    length: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    need: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    if not (query.numel() and key.numel() and indices.numel()):
        return zeros(query, need[0]), zeros(key, need[1]), zeros(value, need[2])
    stage = plan.stage("gqa_backward")
    legal = stage.legalization
    _, _, heads, channels = query.shape
    layout = row_layout(query, key)
    upstream = copied_upstream(out, dout)
    memory = attention_memory(plan, stage, query, (key, value), indices, value.shape[3], upstream)
    require_budget(memory)
    k, v = pad_channels(flatten_keys(key), legal), flatten_keys(value)
    wide = accumulation_dtype(query.dtype)
    sum_k = torch.zeros(k.shape, dtype=wide, device=k.device) if need[1] else None
    sum_v = torch.zeros(v.shape, dtype=wide, device=v.device) if need[2] else None
    flat_lse = lse.reshape(-1, heads)
    query_gradient: Tensor | None = None
    for chunk in planned_chunks(memory):
        ids, lengths = ids_of_chunk(indices, length, chunk, key.shape[0], legal)
        part = call_stage(
            stage,
            pad_query(take_rows(query, chunk), legal),
            k,
            v,
            ids,
            lengths,
            take_rows(out, chunk),
            flat_lse[chunk.start : chunk.stop],
            take_rows(dout, chunk),
            scale=scale,
            need_dq=need[0],
            dk=sum_k,
            dv=sum_v,
            rows=layout.at(chunk.start),
            options=plan.options,
        )
        if need[0]:
            query_gradient = with_rows(query_gradient, query, memory, chunk, part[..., :channels])
        del part  # or it would live beside the gradient of the next chunk
    return (
        not_needed(query) if query_gradient is None else query_gradient,
        not_needed(key) if sum_k is None else key_gradient(sum_k[..., :channels], key),
        not_needed(value) if sum_v is None else key_gradient(sum_v, value),
    )
