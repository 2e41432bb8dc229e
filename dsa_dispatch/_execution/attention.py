"""Bodies of the absorbed attention ops: chunks of rows through one planned stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from dsa_dispatch._call import RowLayout
from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._dispatch.check import Legalization
from dsa_dispatch._dispatch.plan import Plan, StagePlan, plan_of
from dsa_dispatch._execution.copies import contiguous
from dsa_dispatch._execution.legalize import legal_ids, pad_channels, pad_heads, pad_query
from dsa_dispatch._execution.memory import MemoryPlan, plan_memory, require_budget
from dsa_dispatch._execution.rows import (
    Chunk,
    copied_key_bytes,
    copied_row_bytes,
    flatten_keys,
    global_ids,
    put_rows,
    row_lengths,
    take_rows,
)
from dsa_dispatch._execution.run import call_stage, opaque, planned_chunks, run_planned
from dsa_dispatch._stages import Stage

BACKWARD_OF: Final[dict[Stage, Stage]] = {
    "attention_forward": "attention_backward",
    "gqa_forward": "gqa_backward",
}
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
    size = 4 + copied_row_bytes(indices.transpose(0, 1))
    if cleaned:
        size += width * (4 + 3 + 2 * 8)
    if legal.compact:
        size += width * (4 + 3 + 2 * 8)
    if legal.width[0] != legal.width[1]:
        size += legal.width[1] * 4
    return size


def attention_memory(
    plan: Plan,
    stage: StagePlan,
    query: Tensor,
    keys: tuple[Tensor, ...],
    indices: Tensor,
    v_channels: int,
    upstream: int = 0,
) -> MemoryPlan:
    """The transients of one attention stage: ``keys`` are ``(key,)`` or ``(key, value)``.

    ``upstream``: of a backward, the bytes of a row that are copied of the output and its gradient.
    """
    legal = stage.legalization
    batch = query.shape[1]
    size, wide = query.element_size(), accumulation_dtype(query.dtype).itemsize
    padded_heads = legal.heads[0] != legal.heads[1]
    padded_channels = legal.channels[0] != legal.channels[1]
    given = legal.heads[1] * legal.channels[1] * size
    core = [
        ("ids", id_bytes(indices, legal)),
        ("query copy", copied_row_bytes(query) + (given if padded_heads or padded_channels else 0)),
    ]
    padded_keys = [legal.channels[1] if padded_channels else 0, *(0 for _ in keys[1:])]
    fixed = [
        (
            "key copy",
            sum(
                copied_key_bytes(key) + batch * key.shape[0] * key.shape[2] * padded * size
                for key, padded in zip(keys, padded_keys, strict=True)
            ),
        )
    ]
    backward = stage.stage.endswith("backward")
    returned = (
        ("query gradient of the chunk", given)
        if backward
        else ("output of the chunk", legal.heads[1] * (v_channels * size + wide))
    )
    sliced = padded_heads or (padded_channels and backward)
    if batch > 1 or sliced:
        core.append(returned)
    if backward:
        value = legal.heads[1] * v_channels * size if padded_heads else 0
        core += [
            ("output and its gradient", upstream + 2 * value),
            ("lse", legal.heads[1] * wide if padded_heads else 0),
        ]
        widths = [legal.channels[1], *(key.shape[3] for key in keys[1:])]
        elements = [
            batch * key.shape[0] * key.shape[2] * width for key, width in zip(keys, widths, strict=True)
        ]
        fixed.append(("key gradient", sum(elements) * wide))
    return plan_memory(
        plan,
        (stage,),
        row_layout(query, keys[0]),
        core=tuple(core),
        fixed=tuple(fixed),
        # What has to be sliced or put among other items is copied in one piece too.
        handed_over=() if batch > 1 or sliced else (returned,),
    )


def attention_memories(
    plan: Plan, stage: StagePlan, query: Tensor, keys: tuple[Tensor, ...], indices: Tensor, v_channels: int
) -> tuple[MemoryPlan, ...]:
    """Of a forward and, where one is planned, of its backward: a budget too small for it is refused before the forward
    has run.

    The gradient is not known yet. That of a sum is strided, so a copy of it is counted.
    """
    memories = [attention_memory(plan, stage, query, keys, indices, v_channels)]
    backward = plan.stages.get(BACKWARD_OF[stage.stage])
    if backward is not None:
        row = query.shape[2] * v_channels * query.element_size()
        copies = 1 if query.shape[1] == 1 else 2
        memories.append(
            attention_memory(plan, backward, query, keys, indices, v_channels, upstream=row * copies)
        )
    return tuple(memories)


def copied_upstream(out: Tensor, dout: Tensor) -> int:
    return copied_row_bytes(out) + copied_row_bytes(dout)


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
    memory, *backward = attention_memories(plan, stage, query, (key,), indices, v_channels)
    require_budget(memory, *backward)
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
    """Run ``one`` over all chunks. A single chunk of one batch item has the caller's layout and is not copied."""
    rows, batch, heads, _ = query.shape
    if batch == 1 and not memory.chunked:
        (whole,) = planned_chunks(memory)
        out, lse = one(whole)
        return contiguous(out)[:, None], contiguous(lse)[None]
    # Not filled: every row belongs to one of the chunks.
    out = query.new_empty((rows, batch, heads, v_channels))
    lse = query.new_empty((batch, rows, heads), dtype=accumulation_dtype(query.dtype))
    flat_lse = lse.view(-1, heads)
    for chunk in planned_chunks(memory):
        part, part_lse = one(chunk)
        put_rows(out, chunk, part)
        flat_lse[chunk.start : chunk.stop] = part_lse
        del part, part_lse  # or it would live beside the output of the next chunk
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
    _, _, heads, channels = query.shape
    layout = row_layout(query, key)
    memory = attention_memory(plan, stage, query, (key,), indices, v_channels, copied_upstream(out, dout))
    require_budget(memory)
    kv = pad_channels(flatten_keys(key[:, :, 0]), legal)
    wide = accumulation_dtype(query.dtype)
    dkv = torch.zeros(kv.shape, dtype=wide, device=kv.device) if need_dkv else None
    flat_lse = lse.reshape(-1, heads)
    dq: Tensor | None = None
    for chunk in planned_chunks(memory):
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
            dq = with_rows(dq, query, memory, chunk, part[:, :heads, :channels])
        del part  # or it would live beside the gradient of the next chunk
    dkey = not_needed(key) if dkv is None else key_gradient(dkv[:, None, :channels], key)
    return not_needed(query) if dq is None else dq, dkey


def with_rows(
    gradient: Tensor | None, query: Tensor, memory: MemoryPlan, chunk: Chunk, part: Tensor
) -> Tensor:
    """``gradient`` (None before the first chunk) with a chunk's rows. A single chunk of one batch item is not
    copied."""
    if query.shape[1] == 1 and not memory.chunked:
        return contiguous(part)[:, None]
    if gradient is None:
        gradient = torch.empty_like(query, memory_format=torch.contiguous_format)
    put_rows(gradient, chunk, part)
    return gradient


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
    gradient = accumulated.view(batch, keys, *accumulated.shape[1:]).transpose(0, 1)
    if gradient.dtype == key.dtype and gradient.is_contiguous():
        return gradient
    return torch.empty(key.shape, dtype=key.dtype, device=key.device).copy_(gradient)
