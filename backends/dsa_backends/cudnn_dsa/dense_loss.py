"""The loss over every key of a row's range: scores, then the frontend's dense indexer backward."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from dsa_backends.cudnn_dsa.plans import PLANS, signature, workspace_of
from dsa_backends.cudnn_dsa.segments import Segment, scores_of, segments
from dsa_backends.cudnn_dsa.sparse_loss import BLOCK, HEAD_GROUP, MASS_FLOOR
from dsa_backends.flash_mla.slots import packed
from dsa_dispatch._call import RowLayout

CLIPPED: Final = 99.0
"""The kernel drops the gradient of a key that scores 100 or more below the lse; its probability is 0 well before."""


def dense_loss(
    dsa: Any,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    starts: Tensor,
    ends: Tensor,
    mass: Tensor,
    rows: RowLayout,
    dk: Tensor | None,
    backward: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``kl [T]``, ``dq [T, Hi, Di]``, ``dw [T, Hi]``; adds into ``dk``. ``mass [T, keys]``, by key of the item."""
    kl = torch.zeros(q.shape[0], dtype=torch.float32, device=q.device)
    dq = torch.zeros_like(q) if backward else None
    dw = torch.zeros(w.shape, dtype=torch.bfloat16, device=w.device) if backward else None
    for segment in segments(rows, q.shape[0]):
        part = slice(segment.first, segment.last)
        columns = torch.arange(segment.columns, dtype=torch.int32, device=q.device)
        valid = (columns >= starts[part, None] - segment.key) & (columns < ends[part, None] - segment.key)
        scores = _scores(dsa, q, k, w, segment).masked_fill_(~valid, -torch.inf)
        teacher = torch.where(valid, mass[part, : segment.columns], 0.0)
        total = teacher.sum(1, keepdim=True)
        lse = scores.logsumexp(1, keepdim=True)
        # A row without a key has an lse of -inf, and -inf - -inf is NaN.
        lse = torch.where(lse.isfinite(), lse, 0.0)
        target = teacher / total.clamp(min=MASS_FLOOR)
        terms = target * (target.clamp(min=MASS_FLOOR).log() - (scores - lse))
        kl[part] = torch.where(valid, terms, 0.0).sum(1)
        del target, terms
        if dq is not None and dw is not None:
            scores = torch.where(valid, torch.maximum(scores, lse - CLIPPED), -torch.inf)
            _gradients(dsa, q, k, w, segment, scores, lse[:, 0], teacher, total[:, 0], dq, dw, dk)
    return kl, dq, dw


def _scores(dsa: Any, q: Tensor, k: Tensor, w: Tensor, segment: Segment) -> Tensor:
    """The scores of all heads; more than 64 in groups, since a score is a sum over heads."""
    total = None
    for first in range(0, q.shape[1], HEAD_GROUP):
        part = slice(first, first + HEAD_GROUP)
        scores = scores_of(dsa, packed(q[:, part]), k, packed(w[:, part]), segment)
        total = scores if total is None else total.add_(scores)
    assert total is not None
    return total


def _gradients(
    dsa: Any,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    segment: Segment,
    scores: Tensor,
    lse: Tensor,
    teacher: Tensor,
    total: Tensor,
    dq: Tensor,
    dw: Tensor,
    dk: Tensor | None,
) -> None:
    part = slice(segment.first, segment.last)
    keys = slice(segment.key, segment.key + segment.columns)
    unit = torch.ones(1, dtype=torch.float32, device=q.device)
    offsets = segment.causal_offsets(q.device)
    groups = range(0, q.shape[1], HEAD_GROUP)
    clean_k = _without_nan(k[None, keys])
    for first in groups:
        heads = slice(first, first + HEAD_GROUP)
        last = first == groups[-1]
        group_q, group_w = _without_nan(q[None, part, heads]), packed(w[None, part, heads].bfloat16())
        group_dk = torch.empty(1, segment.columns, k.shape[1], dtype=torch.float32, device=k.device)
        operands = (
            group_q,
            group_w,
            clean_k,
            torch.empty_like(group_q),
            torch.empty_like(group_w),
            group_dk,
            # Both score tensors are overwritten; only the last group may spend them.
            teacher[None] if last else teacher[None].clone(),
            total[None],
            scores[None] if last else scores[None].clone(),
            lse[None],
        )
        plan = PLANS.get(
            ("dense_indexer_backward", signature(*operands)),
            functools.partial(_build, dsa, operands),
        )
        # The kernel divides by the number of rows.
        plan.execute(
            *operands,
            unit,
            loss_coeff=float(segment.rows),
            q_causal_offsets=offsets,
            workspace=workspace_of(plan, q.device),
        )
        dq[part, heads], dw[part, heads] = operands[3][0], operands[4][0]
        if dk is not None:
            dk[keys].add_(group_dk[0])


def _without_nan(tensor: Tensor) -> Tensor:
    """Every key meets every row here, with a gradient of 0 outside its range, and 0 times NaN is NaN.

    A row that may see such a key is NaN all the same: its score is, and with it its gradient.
    """
    return tensor.nan_to_num(0.0, 0.0, 0.0).contiguous()


def _build(dsa: Any, operands: tuple[Tensor, ...]) -> Any:
    q, w, k, dq, dw, dk, teacher, total, scores, lse = operands
    return dsa.DenseIndexerBackward(
        sample_index_q=q,
        sample_weights=w,
        sample_index_k=k,
        sample_d_index_q=dq,
        sample_d_weights=dw,
        sample_d_index_k=dk,
        sample_attn_score=teacher,
        sample_attn_l1norm=total,
        sample_index_score=scores,
        sample_index_lse=lse,
        block_I=BLOCK,
        ratio=1,
        has_q_causal_offsets=True,
    )
