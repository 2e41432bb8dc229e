"""The loss over chosen slots: probabilities from the score recompute, gradients from the indexer backward."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from dsa_backends.cudnn_dsa.plans import PLANS, signature, workspace_of
from dsa_backends.flash_mla.slots import ids_within_length, packed

HEAD_GROUP: Final = 64
BLOCK: Final = 128
REACH: Final = 40.0
"""The recompute hands over probabilities alone, which underflow 87 below the best score. So it is given scores divided
by a power of two, exact in bf16, that brings them within this bound; the logarithm times that power is the true one,
with an error of the power times 2**-22: less than the fp32 rounding of scores of that size."""
SMALLEST: Final = torch.finfo(torch.float32).tiny
MASS_FLOOR: Final = 1e-10


def sparse_loss(
    dsa: Any,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    length: Tensor,
    mass: Tensor,
    dk: Tensor | None,
    backward: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``kl [T]``, ``dq [T, Hi, Di]``, ``dw [T, Hi]``; adds into ``dk``."""
    ids = ids_within_length(indices, length)
    valid = (ids >= 0) & (ids < k.shape[0])
    # The recompute knows -1 alone: an id past the keys would score as a key of zeros.
    ids = torch.where(valid, ids, -1)
    log_p = _log_probabilities(dsa, q, k, w, ids, valid)
    target = mass / mass.sum(1, keepdim=True).clamp(min=MASS_FLOOR)
    target = torch.where(valid, target, 0.0)
    terms = target * (target.clamp(min=MASS_FLOOR).log() - log_p.clamp(min=-torch.finfo(torch.float32).max))
    kl = torch.where(valid, terms, 0.0).sum(1)
    if not backward:
        return kl, None, None
    # Below the clamp the kernel takes a slot for clipped and drops its gradient.
    predicted = torch.where(valid, log_p.exp().clamp(min=SMALLEST), 0.0)
    dq, dw = _gradients(dsa, q, k, w, ids, target, predicted, dk)
    return kl, dq, dw


def _log_probabilities(dsa: Any, q: Tensor, k: Tensor, w: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
    """``log P`` of the slots; -inf where there is no key."""
    power = _power_within_reach(q, k, w)
    cooled = w.float() / power
    if w.dtype == torch.bfloat16:
        heads, weights = q, cooled.bfloat16()
    else:
        # The recompute reads bf16 weights: the second half of the heads carries what rounding the first left over.
        coarse = cooled.bfloat16()
        heads = torch.cat((q, q), dim=1)
        weights = torch.cat((coarse, (cooled - coarse.float()).bfloat16()), dim=1)
    operands = (heads[None], k[None], weights[None], ids[None])
    predicted = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)[None]
    plan = PLANS.get(
        ("sparse_score", signature(*operands)),
        lambda: dsa.SparseIndexerScoreRecompute(
            sample_q_indexer=operands[0],
            sample_k_indexer=operands[1],
            sample_weights=operands[2],
            sample_topk_indices=operands[3],
            sample_out=predicted,
            topk_indices_global=True,
        ),
    )
    plan.execute(*operands, predicted)
    logits = predicted[0].clamp_(min=SMALLEST).log_().mul_(power).masked_fill_(~valid, -torch.inf)
    return logits.log_softmax(1)


def _power_within_reach(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """``[T, 1]``: the power of two, at least 1, that divides every possible score of the row to within ``REACH``."""
    lengths = torch.linalg.vector_norm(q, dim=2, dtype=torch.float32)
    longest = torch.linalg.vector_norm(k, dim=1, dtype=torch.float32).nan_to_num(0.0, 0.0, 0.0).amax()
    bound = (lengths * w.float().abs()).sum(1, keepdim=True) * longest
    # A row of NaN stays one whatever it is divided by; the others' keys must not be lost to it.
    power: Tensor = (bound / REACH).nan_to_num(1.0, 1.0, 1.0).clamp(min=1.0).log2().ceil().exp2()
    return power


def _gradients(
    dsa: Any,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    ids: Tensor,
    target: Tensor,
    predicted: Tensor,
    dk: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Head by head the gradient depends on the probabilities of all, and on nothing else of the others: groups of 64
    are exact."""
    dq, dw = torch.empty_like(q), torch.empty(w.shape, dtype=torch.bfloat16, device=w.device)
    rows = q.shape[0]
    unit = torch.ones(1, dtype=torch.float32, device=q.device)
    one_group = q.shape[1] == HEAD_GROUP
    for first in range(0, q.shape[1], HEAD_GROUP):
        part = slice(first, first + HEAD_GROUP)
        group_dq = dq[None] if one_group else torch.empty_like(q[None, :, part].contiguous())
        group_dw = (
            dw[None] if one_group else torch.empty(1, rows, HEAD_GROUP, dtype=dw.dtype, device=dw.device)
        )
        group_dk = torch.empty(1, *k.shape, dtype=torch.float32, device=k.device)
        operands = (
            packed(q[None, :, part]),
            packed(w[None, :, part].bfloat16()),
            k[None],
            group_dq,
            group_dw,
            group_dk,
            # Overwritten by the kernel, and a later group needs it again.
            target[None] if one_group else target[None].clone(),
            predicted[None],
            ids[None],
        )
        plan = PLANS.get(
            ("indexer_backward", signature(*operands)),
            functools.partial(_build, dsa, operands),
        )
        # The kernel divides by the number of rows.
        plan.execute(*operands, unit, loss_coeff=float(rows), workspace=workspace_of(plan, q.device))
        if not one_group:
            dq[:, part], dw[:, part] = group_dq[0], group_dw[0]
        if dk is not None:
            dk.add_(group_dk[0])
    return dq, dw


def _build(dsa: Any, operands: tuple[Tensor, ...]) -> Any:
    q, w, k, dq, dw, dk, target, predicted, ids = operands
    return dsa.IndexerBackward(
        sample_index_q=q,
        sample_weights=w,
        sample_index_k=k,
        sample_d_index_q=dq,
        sample_d_weights=dw,
        sample_d_index_k=dk,
        sample_attn_score=target,
        sample_index_score=predicted,
        sample_topk_indices=ids,
        block_I=BLOCK,
        topk_indices_global=True,
    )
