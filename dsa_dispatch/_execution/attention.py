"""Bodies of the absorbed attention ops: chunks of rows through one planned stage."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsa_dispatch._call import RowLayout
from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._dispatch.check import Legalization
from dsa_dispatch._dispatch.plan import Plan, StagePlan, plan_of
from dsa_dispatch._execution.legalize import legal_ids, pad_channels, pad_heads, pad_query
from dsa_dispatch._execution.memory import MemoryPlan, plan_memory
from dsa_dispatch._execution.rows import (
    Chunk,
    chunks,
    flatten_keys,
    global_ids,
    put_rows,
    row_lengths,
    take_rows,
    unflatten_rows,
)
from dsa_dispatch._execution.run import call_stage, opaque, run_planned

OneChunk = Callable[[Chunk], tuple[Tensor, Tensor]]


def row_layout(query: Tensor, key: Tensor) -> RowLayout:
    """Attention rows carry their keys by id, so their bounds say nothing: they are given as ranges."""
    return RowLayout(batch=query.shape[1], rows=query.shape[0], keys=key.shape[0], bounds="ranges")


def empty_outputs(query: Tensor, v_channels: int) -> tuple[Tensor, Tensor]:
    """``out [sq, b, h, v_channels]`` of zeros and ``lse [b, sq, h]`` of -inf: the answer of rows without a key."""
    rows, batch, heads, _ = query.shape
    out = query.new_zeros((rows, batch, heads, v_channels))
    lse = query.new_full((batch, rows, heads), -torch.inf, dtype=accumulation_dtype(query.dtype))
    return out, lse


def ids_of_chunk(
    indices: Tensor, length: Tensor | None, chunk: Chunk, keys: int, legal: Legalization
) -> tuple[Tensor, Tensor]:
    ids = global_ids(indices, chunk, keys, legal.sanitize)
    lengths = row_lengths(length, chunk, indices.shape[2], indices.device)
    return legal_ids(ids, lengths, legal)


def id_bytes(indices: Tensor, legal: Legalization) -> int:
    """Bytes a row of ids costs beyond the caller's: the cleaned copy with its masks, and the sort of a compaction."""
    batch, _, width = indices.shape
    cleaned = batch > 1 or indices.dtype != torch.int32 or legal.sanitize
    size = 4
    if cleaned:
        size += width * (4 + 3 + 2 * 8)
    if legal.compact:
        size += width * (4 + 3 + 2 * 8)
    if legal.width[0] != legal.width[1]:
        size += legal.width[1] * 4
    return size


def attention_memory(
    plan: Plan, stage: StagePlan, query: Tensor, key: Tensor, indices: Tensor, v_channels: int
) -> MemoryPlan:
    """The transients of one attention stage, absorbed or grouped-query."""
    legal = stage.legalization
    _, batch, heads, channels = query.shape
    size = query.element_size()
    padded = legal.heads[1] * legal.channels[1] * size
    copied = batch > 1 or legal.heads[0] != legal.heads[1] or legal.channels[0] != legal.channels[1]
    wide = accumulation_dtype(query.dtype).itemsize
    core = [
        ("ids", id_bytes(indices, legal)),
        ("output of the chunk", legal.heads[1] * (v_channels * size + wide)),
    ]
    if copied:
        core.append(("query copy", padded + (heads * channels * size if batch > 1 else 0)))
    if stage.stage.endswith("backward"):
        core += [
            ("query gradient of the chunk", padded),
            ("out, lse and their gradient", legal.heads[1] * (2 * v_channels * size + wide) if copied else 0),
        ]
    keys = key.shape[0] * batch
    key_copies = (batch > 1) + (legal.channels[0] != legal.channels[1])
    fixed = [("key copy", key_copies * keys * key.shape[2] * legal.channels[1] * size)]
    if stage.stage.endswith("backward"):
        fixed.append(("key gradient", keys * key.shape[2] * legal.channels[1] * wide))
    return plan_memory(plan, (stage,), row_layout(query, key), core=tuple(core), fixed=tuple(fixed))


@opaque
def attention_forward(
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    length: Tensor | None,
    scale: float,
    v_channels: int,
    plan: Tensor,
) -> tuple[Tensor, Tensor]:
    """``query [sq, b, h, dqk]``, ``key [sk, b, 1, dqk]``, ``indices [b, sq, W]`` -> ``out``, ``lse [b, sq, h]``."""
    return run_planned(
        plan_of(plan),
        ("attention_forward",),
        lambda planned: _forward(planned, query, key, indices, length, scale, v_channels),
    )


def _forward(
    plan: Plan,
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    length: Tensor | None,
    scale: float,
    v_channels: int,
) -> tuple[Tensor, Tensor]:
    if not (query.numel() and key.numel() and indices.numel()):
        return empty_outputs(query, v_channels)
    stage = plan.stage("attention_forward")
    legal = stage.legalization
    heads = query.shape[2]
    layout = row_layout(query, key)
    memory = attention_memory(plan, stage, query, key, indices, v_channels)
    kv = pad_channels(flatten_keys(key[:, :, 0]), legal)

    def one(chunk: Chunk) -> tuple[Tensor, Tensor]:
        ids, lengths = ids_of_chunk(indices, length, chunk, key.shape[0], legal)
        out, lse = call_stage(
            stage,
            pad_query(take_rows(query, chunk), legal),
            kv,
            ids,
            lengths,
            scale=scale,
            v_channels=v_channels,
            rows=layout.at(chunk.start),
            options=plan.options,
        )
        return out[:, :heads], lse[:, :heads]

    return assemble(query, memory, v_channels, one)


def assemble(query: Tensor, memory: MemoryPlan, v_channels: int, one: OneChunk) -> tuple[Tensor, Tensor]:
    """Run ``one`` over all chunks. A single chunk is not copied where its layout is already the caller's."""
    rows, batch, heads, _ = query.shape
    if memory.chunk >= memory.rows:
        out, lse = one(Chunk(0, memory.rows))
        return unflatten_rows(out.contiguous(), rows, batch), lse.contiguous().view(batch, rows, heads)
    out, lse = empty_outputs(query, v_channels)
    flat_lse = lse.view(-1, heads)
    for chunk in chunks(memory.rows, memory.chunk):
        part, part_lse = one(chunk)
        put_rows(out, chunk, part)
        flat_lse[chunk.start : chunk.stop] = part_lse
    return out, lse


@opaque
def attention_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    length: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    v_channels: int,
    need_dq: bool,
    need_dkv: bool,
    plan: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of query and key, in their shapes and dtypes; a zero-size tensor stands for one that is not needed."""
    return run_planned(
        plan_of(plan),
        ("attention_backward",),
        lambda planned: _backward(
            planned, dout, query, key, indices, length, out, lse, scale, v_channels, need_dq, need_dkv
        ),
    )


def _backward(
    plan: Plan,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    length: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    v_channels: int,
    need_dq: bool,
    need_dkv: bool,
) -> tuple[Tensor, Tensor]:
    if not (query.numel() and key.numel() and indices.numel()):
        return zeros(query, need_dq), zeros(key, need_dkv)
    stage = plan.stage("attention_backward")
    legal = stage.legalization
    rows, batch, heads, channels = query.shape
    layout = row_layout(query, key)
    memory = attention_memory(plan, stage, query, key, indices, v_channels)
    kv = pad_channels(flatten_keys(key[:, :, 0]), legal)
    wide = accumulation_dtype(query.dtype)
    dkv = torch.zeros(kv.shape, dtype=wide, device=kv.device) if need_dkv else None
    flat_lse = lse.reshape(-1, heads)
    dq: Tensor | None = None
    for chunk in chunks(memory.rows, memory.chunk):
        ids, lengths = ids_of_chunk(indices, length, chunk, key.shape[0], legal)
        part = call_stage(
            stage,
            pad_query(take_rows(query, chunk), legal),
            kv,
            ids,
            lengths,
            pad_heads(take_rows(out, chunk), legal),
            pad_heads(flat_lse[chunk.start : chunk.stop, :, None], legal)[..., 0],
            pad_heads(take_rows(dout, chunk), legal),
            scale=scale,
            v_channels=v_channels,
            need_dq=need_dq,
            dkv=dkv,
            rows=layout.at(chunk.start),
            options=plan.options,
        )
        if need_dq:
            part = part[:, :heads, :channels]
            if memory.chunk >= memory.rows:
                dq = unflatten_rows(part.contiguous(), rows, batch)
            else:
                dq = torch.empty_like(query, memory_format=torch.contiguous_format) if dq is None else dq
                put_rows(dq, chunk, part)
    dkey = not_needed(key) if dkv is None else key_gradient(dkv[:, None, :channels], key)
    return not_needed(query) if dq is None else dq, dkey


def not_needed(tensor: Tensor) -> Tensor:
    """What stands for the gradient of ``tensor``: a new one each time, since outputs of an op must not alias."""
    return tensor.new_empty(0)


def zeros(tensor: Tensor, needed: bool) -> Tensor:
    if not needed:
        return not_needed(tensor)
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)


def key_gradient(accumulated: Tensor, key: Tensor) -> Tensor:
    """``[b * sk, heads, D]`` in the accumulation type to ``[sk, b, heads, D]`` in the key's."""
    keys, batch = key.shape[:2]
    return unflatten_rows(accumulated.to(key.dtype).contiguous(), keys, batch)
