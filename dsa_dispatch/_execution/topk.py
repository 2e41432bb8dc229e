"""Body of the selection op."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_dispatch._call import RowLayout
from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._dispatch.plan import Plan, plan_of
from dsa_dispatch._execution.legalize import pad_channels, pad_heads, pad_query, trim_columns
from dsa_dispatch._execution.memory import MemoryPlan, plan_memory, require_budget
from dsa_dispatch._execution.rows import (
    copied_key_bytes,
    copied_row_bytes,
    flatten_keys,
    global_bounds,
    item_offsets,
    take_rows,
)
from dsa_dispatch._execution.run import call_stage, opaque, planned_chunks, run_planned
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


def topk_memory(
    plan: Plan, q: Tensor, k: Tensor, weights: Tensor, topk: int, block_size: int | None = None
) -> MemoryPlan:
    """The transients of a selection."""
    stage = plan.stage("indexer_topk")
    legal = stage.legalization
    rows, batch, _, channels = q.shape
    size, given = q.element_size(), legal.heads[1] * legal.channels[1]
    padded_heads, padded_channels = (found != want for found, want in (legal.heads, legal.channels))
    core = [
        ("selected ids of the chunk", legal.width[1] * (4 if batch == 1 else 4 + 4 + 1) + 3 * 4),
        ("q copy", copied_row_bytes(q) + (given * size if padded_heads or padded_channels else 0)),
        (
            "weights copy",
            copied_row_bytes(weights) + (legal.heads[1] * weights.element_size() if padded_heads else 0),
        ),
    ]
    keys = batch * k.shape[0]
    fixed = [
        ("key copy", copied_key_bytes(k) + (keys * legal.channels[1] * size if padded_channels else 0)),
        ("bounds", batch * rows * (2 * 4 + 6 * 8)),
    ]
    if plan.policy.debug_checks:
        wide = accumulation_dtype(q.dtype).itemsize
        core.append(("debug_checks: scores", k.shape[0] * 2 * wide + channels * wide))
        fixed.append(("debug_checks: keys", k.shape[0] * (channels * wide + 2 * 8)))
    layout = RowLayout(batch=batch, rows=rows, keys=k.shape[0])
    return plan_memory(plan, (stage,), layout, core=tuple(core), fixed=tuple(fixed), block_size=block_size)


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
    memory = topk_memory(plan, q, k, weights, topk, block_size)
    require_budget(memory)
    layout = indexer_layout(plan, q, k, causal=starts is None)
    flat_k = pad_channels(flatten_keys(k), legal)
    first, last = global_bounds(starts, ends, rows, batch, keys, q.device)
    if plan.policy.debug_checks:
        reject_nan_scores(q, k, weights, first, last, use_relu, memory.chunk)
    for chunk in planned_chunks(memory):
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
            offsets = item_offsets(chunk, rows, keys, ids.device).to(torch.int32)
            # In int32, which holds every global id: an int64 detour would cost five times the ids.
            ids = (ids - offsets[:, None]).masked_fill_(ids < 0, -1)
        indices.view(-1, topk)[chunk.start : chunk.stop] = ids
        length.view(-1)[chunk.start : chunk.stop] = lengths
        del ids, lengths  # or they would live beside the ids of the next chunk
    return indices, length


def reject_nan_scores(
    q: Tensor, k: Tensor, weights: Tensor, first: Tensor, last: Tensor, use_relu: bool, rows: int
) -> None:
    """Raise ``InvalidInputError`` when a key that a row may choose scores NaN (``debug_checks``)."""
    sq, batch = q.shape[:2]
    keys = k.shape[0]
    for item in range(batch):
        key = k[:, item].to(accumulation_dtype(q.dtype))
        for low in range(0, sq, rows):
            part = slice(low, min(low + rows, sq))
            flat = slice(item * sq + part.start, item * sq + part.stop)
            bounds = first[flat] - item * keys, last[flat] - item * keys
            bad = _nan_rows(q[part, item], key, weights[part, item], *bounds, use_relu)
            if bool(bad.any()):
                row = low + int(bad.nonzero()[0])
                raise InvalidInputError(
                    f"NaN indexer score in row {row} of batch item {item} (debug_checks): q, k or weights hold NaN or "
                    f"overflow. Which keys such a row selects is open; look at what produced the inputs."
                )


def _nan_rows(
    q: Tensor, key: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, use_relu: bool
) -> Tensor:
    """``[T]`` bool: rows of ``q [T, Hi, Di]`` with a NaN score inside their range of ``key [sk, Di]``."""
    dtype = key.dtype
    score = torch.zeros((q.shape[0], key.shape[0]), dtype=dtype, device=q.device)
    dot = torch.empty_like(score)
    for head in range(q.shape[1]):
        torch.mm(q[:, head].to(dtype), key.T, out=dot)
        if use_relu:
            dot.relu_()
        score += dot.mul_(weights[:, head, None].to(dtype))
    del dot
    ids = torch.arange(key.shape[0], device=q.device)
    bad = score.isnan().logical_and_(ids >= starts[:, None])
    return bad.logical_and_(ids < ends[:, None]).any(dim=1)
