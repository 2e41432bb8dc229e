"""``indexer_topk``: the frontend's scores and its selection, or both in one kernel where the GPU has that."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from dsa_backends.cudnn_dsa import frontend
from dsa_backends.cudnn_dsa.plans import PLANS, signature, workspace_of
from dsa_backends.cudnn_dsa.segments import Segment, scores_of, segments
from dsa_backends.flash_mla.slots import on_device, packed
from dsa_dispatch._call import RowLayout, StageOptions

LOWEST: Final = torch.finfo(torch.float32).min


def indexer_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    rows: RowLayout,
    topk: int,
    use_relu: bool,
    options: StageOptions,
) -> tuple[Tensor, Tensor]:
    """See ``dsa_dispatch._contract.IndexerTopK``. bf16, 16, 32 or 64 heads of 128 channels, even ``topk`` to 2048."""
    dsa = frontend.load(frontend.INDEXER_TOPK)
    q, k, w = packed(q), packed(k), packed(w)
    with on_device(q):
        parts = list(segments(rows, q.shape[0]))
        if len(parts) == 1 and parts[0].rows == q.shape[0]:
            indices = _chosen(dsa, q, k, w, starts, ends, parts[0], topk)
        else:
            indices = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
            for segment in parts:
                indices[segment.first : segment.last] = _chosen(dsa, q, k, w, starts, ends, segment, topk)
        return indices, (indices >= 0).sum(1, dtype=torch.int32)


def _chosen(
    dsa: Any, q: Tensor, k: Tensor, w: Tensor, starts: Tensor, ends: Tensor, segment: Segment, topk: int
) -> Tensor:
    """Global ids ``[rows, topk]`` of a segment, the valid ones first, then -1."""
    part = slice(segment.first, segment.last)
    first, last = starts[part, None] - segment.key, ends[part, None] - segment.key
    if segment.columns <= topk:
        # Every key of the range: there is nothing to choose, and no score to ask.
        ids = first + torch.arange(topk, dtype=torch.int32, device=q.device)
    elif segment.causal:
        ids = _best(dsa, q, k, w, segment, last, topk)
    else:
        ids = _best_in_range(dsa, q, k, w, segment, first, last, topk)
    # Whatever a selection hands over, an id outside its range would be read by the attention.
    valid = ids < last
    if segment.key == 0:
        return torch.where(valid, ids, -1)
    return torch.where(valid & (ids >= 0), ids + segment.key, -1)


def _best(dsa: Any, q: Tensor, k: Tensor, w: Tensor, segment: Segment, last: Tensor, topk: int) -> Tensor:
    if frontend.is_blackwell(q.device):
        return _fused(dsa, q, k, w, segment, topk)
    return _select(dsa, _scores(dsa, q, k, w, segment), last, topk)


def _best_in_range(
    dsa: Any, q: Tensor, k: Tensor, w: Tensor, segment: Segment, first: Tensor, last: Tensor, topk: int
) -> Tensor:
    columns = torch.arange(segment.columns, dtype=torch.int32, device=q.device)
    # A score of -inf or NaN inside the range may be chosen; what stands before the range must rank below both.
    scores = torch.nan_to_num_(_scores(dsa, q, k, w, segment), nan=LOWEST, posinf=torch.inf, neginf=LOWEST)
    scores.masked_fill_(columns < first, -torch.inf)
    ids = _select(dsa, scores, last, topk)
    # Ids are ascending, so those before the range, taken for want of others, stand in front: step over them.
    before = ((ids >= 0) & (ids < first)).sum(1, keepdim=True)
    source = torch.arange(topk, device=ids.device) + before
    return ids.gather(1, source.clamp(max=topk - 1)).masked_fill_(source >= topk, -1)


def _scores(dsa: Any, q: Tensor, k: Tensor, w: Tensor, segment: Segment) -> Tensor:
    """Scores without -0.0, which the selection ranks below +0.0 where the contract sees a tie."""
    return scores_of(dsa, q, k, w, segment).add_(0.0)


def _fused(dsa: Any, q: Tensor, k: Tensor, w: Tensor, segment: Segment, topk: int) -> Tensor:
    """Ascending ids without a score matrix, then -1. The mask is causal only, so ranges cannot come this way."""
    part = slice(segment.first, segment.last)
    keys = k[segment.key : segment.key + segment.columns]
    result = dsa.indexer_forward_top_k_wrapper(
        q[part][None],
        keys[None, :, None],
        w[part][None],
        topk,
        ratio=1,
        sm_scale=1.0,
        q_causal_offsets=segment.causal_offsets(q.device),
        return_softmax=False,
        topk_indices_global=False,
        deterministic=True,
    )
    # The set is fixed, the slots are not: an order that puts -1 last gives the prefix.
    last = torch.iinfo(torch.int32).max
    ids = result["indices"][0]
    ordered = torch.where(ids < 0, last, ids).sort(dim=1).values
    return torch.where(ordered == last, -1, ordered)


def _select(dsa: Any, scores: Tensor, last: Tensor, topk: int) -> Tensor:
    """Ascending ids of the best ``topk`` of the first ``last`` columns, ties to the lower id, then -1."""
    last = last[:, 0].contiguous()
    plan = PLANS.get(
        ("top_k", topk, signature(scores, last)),
        lambda: dsa.IndexerTopK(scores, last, topk, return_val=False, deterministic=True),
    )
    ids = torch.empty(scores.shape[0], topk, dtype=torch.int32, device=scores.device)
    plan.execute(scores, last, out_indices=ids, workspace=workspace_of(plan, scores.device))
    return ids


def provider() -> str:
    """What really runs. Raises ``BackendDeclined``."""
    frontend.load(frontend.INDEXER_TOPK)
    return frontend.title()
