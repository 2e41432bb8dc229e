"""Body of the selection op."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_dispatch._call import RowLayout
from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._dispatch.plan import Plan, plan_of
from dsa_dispatch._execution.legalize import pad_channels, pad_heads, pad_query, trim_columns
from dsa_dispatch._execution.memory import MemoryPlan, plan_memory
from dsa_dispatch._execution.rows import (
    chunks,
    flatten_keys,
    global_bounds,
    item_offsets,
    take_rows,
)
from dsa_dispatch._execution.run import call_stage, opaque, run_planned
from dsa_dispatch.errors import InvalidInputError


def indexer_layout(plan: Plan, q: Tensor, k: Tensor, causal: bool) -> RowLayout:
    call = plan.call
    return RowLayout(
        batch=q.shape[1],
        rows=q.shape[0],
        keys=k.shape[0],
        bounds="causal" if causal else "ranges",
        layout=call.layout,
        context_parallel=call.context_parallel,
    )


def topk_memory(plan: Plan, q: Tensor, k: Tensor, topk: int, block_size: int | None = None) -> MemoryPlan:
    """The transients of a selection."""
    stage = plan.stage("indexer_topk")
    legal = stage.legalization
    size = q.element_size()
    core = [("selected ids of the chunk", legal.width[1] * 4 + 4)]
    if q.shape[1] > 1 or legal.pad_ratio > 1:
        core.append(("q and weights copy", 2 * legal.heads[1] * (legal.channels[1] + 1) * size))
    copies = (q.shape[1] > 1) + (legal.channels[0] != legal.channels[1])
    keys = k.shape[0] * k.shape[1]
    rows = q.shape[0] * q.shape[1]
    fixed = (("key copy", copies * keys * legal.channels[1] * size), ("bounds", rows * (2 * 4 + 6 * 8)))
    layout = RowLayout(batch=q.shape[1], rows=q.shape[0], keys=k.shape[0])
    return plan_memory(plan, (stage,), layout, core=tuple(core), fixed=fixed, block_size=block_size)


@opaque
def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    topk: int,
    use_relu: bool,
    block_size: int | None,
    plan: Tensor,
) -> tuple[Tensor, Tensor]:
    """``q [sq, b, hi, di]``, ``k [sk, b, di]``, ``weights [sq, b, hi]`` -> ``indices [b, sq, topk]``, ``length [b,
    sq]``."""
    return run_planned(
        plan_of(plan),
        ("indexer_topk",),
        lambda planned: _select(planned, q, k, weights, starts, ends, topk, use_relu, block_size),
    )


def _select(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    topk: int,
    use_relu: bool,
    block_size: int | None,
) -> tuple[Tensor, Tensor]:
    rows, batch, _, _ = q.shape
    keys = k.shape[0]
    indices = torch.full((batch, rows, topk), -1, dtype=torch.int32, device=q.device)
    length = torch.zeros((batch, rows), dtype=torch.int32, device=q.device)
    if not (q.numel() and k.numel()):
        return indices, length
    stage = plan.stage("indexer_topk")
    legal = stage.legalization
    memory = topk_memory(plan, q, k, topk, block_size)
    layout = indexer_layout(plan, q, k, causal=starts is None)
    flat_k = pad_channels(flatten_keys(k), legal)
    first, last = global_bounds(starts, ends, rows, batch, keys, q.device)
    if plan.policy.debug_checks:
        reject_nan_scores(q, k, weights, first, last, use_relu, memory.chunk)
    for chunk in chunks(memory.rows, memory.chunk):
        ids, lengths = call_stage(
            stage,
            pad_query(take_rows(q, chunk), legal),
            flat_k,
            pad_heads(take_rows(weights, chunk)[..., None], legal)[..., 0],
            first[chunk.start : chunk.stop],
            last[chunk.start : chunk.stop],
            rows=layout.at(chunk.start),
            topk=legal.width[1],
            use_relu=use_relu,
            options=plan.options,
        )
        ids, lengths = trim_columns(ids, legal), lengths.clamp(max=topk)
        if batch > 1:
            offsets = item_offsets(chunk, rows, keys, ids.device)[:, None]
            ids = torch.where(ids >= 0, ids - offsets, -1)
        indices.view(-1, topk)[chunk.start : chunk.stop] = ids
        length.view(-1)[chunk.start : chunk.stop] = lengths
    return indices, length


def reject_nan_scores(
    q: Tensor, k: Tensor, weights: Tensor, first: Tensor, last: Tensor, use_relu: bool, rows: int
) -> None:
    """Raise ``InvalidInputError`` when a key that a row may choose scores NaN (``debug_checks``)."""
    sq, batch, heads, _ = q.shape
    dtype = accumulation_dtype(q.dtype)
    for item in range(batch):
        key = k[:, item].to(dtype)
        ids = torch.arange(k.shape[0], device=k.device) + item * k.shape[0]
        for low in range(0, sq, rows):
            part = slice(low, min(low + rows, sq))
            flat = slice(item * sq + part.start, item * sq + part.stop)
            allowed = (ids >= first[flat, None]) & (ids < last[flat, None])
            score = torch.zeros(allowed.shape, dtype=dtype, device=q.device)
            for head in range(heads):
                dot = q[part, item, head].to(dtype) @ key.T
                score += (dot.relu() if use_relu else dot) * weights[part, item, head].to(dtype)[:, None]
            bad = (score.isnan() & allowed).any(dim=1)
            if bool(bad.any()):
                row = low + int(bad.nonzero()[0])
                raise InvalidInputError(
                    f"NaN indexer score in row {row} of batch item {item} (debug_checks): q, k or weights hold NaN or "
                    f"overflow. Which keys such a row selects is open; look at what produced the inputs."
                )
