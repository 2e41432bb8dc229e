"""The indexer's loss with its gradients, in the sparse form (slots) and the dense form (ranges)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_backends.torch_dense._buffers import Buffer, BufferPlan, in_blocks
from dsa_backends.torch_dense._kl import kl_buffers, kl_rows
from dsa_backends.torch_dense._precision import stage_body
from dsa_backends.torch_dense._rows import key_numbers, mark_range, range_buffers, segments
from dsa_backends.torch_dense._slots import (
    blocks,
    gather,
    key_buffers,
    mark_slots,
    scatter_add,
    scatter_buffers,
    slot_buffers,
    slot_numbers,
    used_width,
)
from dsa_dispatch._call import RowLayout, StageOptions
from dsa_dispatch._contract import LossTerms, accumulation_dtype


def sparse_plan(
    *, width: int, heads: int, channels: int, dtype: torch.dtype, device_type: str, deterministic: bool
) -> BufferPlan:
    acc = accumulation_dtype(dtype)
    rows = (
        *slot_buffers(width),
        *key_buffers("keys, then dk", width, channels, dtype, acc),
        Buffer("query", heads * channels, acc),
        Buffer("weights", heads, acc),
        Buffer("head scores", heads * width, acc),
        Buffer("relu is open", heads * width, torch.bool),
        Buffer("scores", width, acc),
        *kl_buffers(width, acc),
        Buffer("dw", heads, acc),
        Buffer("dq", heads * channels, acc),
    )
    loose = scatter_buffers(width, device_type, deterministic)
    return in_blocks(BufferPlan(rows, (slot_numbers(width),), loose), device_type, deterministic)


def dense_plan(*, keys: int, channels: int, dtype: torch.dtype) -> BufferPlan:
    """One head at a time, its scores computed twice, so nothing has a size of rows × keys × heads."""
    acc = accumulation_dtype(dtype)
    rows = (
        *range_buffers(keys),
        Buffer("query", channels, acc),
        Buffer("weight", 1, acc),
        Buffer("head scores", keys, acc),
        Buffer("relu is open", keys, torch.bool),
        Buffer("scores", keys, acc),
        *kl_buffers(keys, acc),
        Buffer("dw", 1, acc),
        Buffer("dq", channels, acc),
    )
    fixed = (key_numbers(keys), Buffer("keys", keys * channels, acc), Buffer("dk", keys * channels, acc))
    return BufferPlan(rows, fixed)


@stage_body
def indexer_loss(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    *,
    indices: Tensor | None,
    length: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    mass: Tensor,
    rows: RowLayout,
    use_relu: bool,
    need_dq: bool,
    need_dw: bool,
    dk: Tensor | None,
    options: StageOptions,
) -> LossTerms:
    """See ``dsa_dispatch._contract.IndexerLoss``."""
    acc = accumulation_dtype(q.dtype)
    terms = LossTerms(
        torch.zeros(q.shape[0], dtype=acc, device=q.device),
        torch.zeros(q.shape, dtype=acc, device=q.device) if need_dq else None,
        torch.zeros(w.shape, dtype=acc, device=q.device) if need_dw else None,
    )
    if indices is None:
        _dense(terms, q, k, w, starts, ends, mass, rows, use_relu, dk)
    else:
        assert length is not None
        _sparse(terms, q, k, w, indices, length, mass, use_relu, dk, options)
    return terms


def _sparse(
    terms: LossTerms,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    length: Tensor,
    mass: Tensor,
    use_relu: bool,
    dk: Tensor | None,
    options: StageOptions,
) -> None:
    count, heads, channels = q.shape
    workspace = sparse_plan(
        width=indices.shape[1],
        heads=heads,
        channels=channels,
        dtype=q.dtype,
        device_type=q.device.type,
        deterministic=options.deterministic,
    ).allocate(count, q.device)
    for block in blocks(count, workspace.rows):
        width = used_width(length[block], indices.shape[1])
        if width == 0:
            continue
        n = block.stop - block.start
        absent, safe = mark_slots(workspace, indices[block, :width], length[block], k.shape[0])
        keys = gather(workspace, "keys, then dk", k, absent, safe)
        query = workspace.take("query", n, heads, channels).copy_(q[block])
        weights = workspace.take("weights", n, 1, heads).copy_(w[block].unsqueeze(1))
        per_head = workspace.take("head scores", n, heads, width)
        torch.bmm(query, keys.transpose(1, 2), out=per_head)
        per_head.masked_fill_(absent.unsqueeze(1), 0)
        opened = _apply_relu(per_head, workspace.take("relu is open", n, heads, width), use_relu)
        scores = workspace.take("scores", n, 1, width)
        torch.bmm(weights, per_head, out=scores)
        gradient = kl_rows(workspace, scores[:, 0], mass[block, :width], absent, terms.kl[block])
        if terms.dw is not None:
            dw = torch.bmm(per_head, gradient.unsqueeze(-1), out=workspace.take("dw", n, heads, 1))
            terms.dw[block] = dw[..., 0]
        if terms.dq is None and dk is None:
            continue
        ds = torch.mul(weights.transpose(1, 2), gradient.unsqueeze(1), out=per_head)
        _close(ds, opened)
        if terms.dq is not None:
            terms.dq[block] = torch.bmm(ds, keys, out=workspace.take("dq", n, heads, channels))
        if dk is not None:
            torch.bmm(ds.transpose(1, 2), query, out=keys)
            scatter_add(dk, safe, keys, absent, options.deterministic)


def _dense(
    terms: LossTerms,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    starts: Tensor,
    ends: Tensor,
    mass: Tensor,
    rows: RowLayout,
    use_relu: bool,
    dk: Tensor | None,
) -> None:
    count, heads, channels = q.shape
    workspace = dense_plan(keys=rows.keys, channels=channels, dtype=q.dtype).allocate(count, q.device)
    for segment in segments(rows, count):
        n = segment.count
        absent = mark_range(workspace, segment, starts, ends)
        keys = workspace.take("keys", rows.keys, channels)
        query = workspace.take("query", n, channels)
        weight = workspace.take("weight", n, 1)
        per_head = workspace.take("head scores", n, rows.keys)
        flags = workspace.take("relu is open", n, rows.keys)
        scores = workspace.take("scores", n, rows.keys).zero_()
        keys.copy_(k[segment.keys])
        for head in range(heads):
            torch.mm(query.copy_(q[segment.rows, head]), keys.t(), out=per_head)
            _apply_relu(per_head, flags, use_relu)
            scores.add_(per_head.mul_(weight.copy_(w[segment.rows, head : head + 1])))
        gradient = kl_rows(workspace, scores, mass[segment.rows], absent, terms.kl[segment.rows])
        if terms.dq is None and terms.dw is None and dk is None:
            continue
        # A key out of a row's range has gradient 0 there, and 0 * NaN must not spoil the row; a row that sees
        # such a key has NaN in its gradient already. Likewise a query and the keys it does not see.
        _zero_unless_finite(keys)
        for head in range(heads):
            _zero_unless_finite(query.copy_(q[segment.rows, head]))
            torch.mm(query, keys.t(), out=per_head)
            per_head.masked_fill_(absent, 0)
            opened = _apply_relu(per_head, flags, use_relu)
            if terms.dw is not None:
                # The product lies in the memory of kl_rows' probabilities, which are spent.
                product = torch.mul(per_head, gradient, out=workspace.take("probabilities", n, rows.keys))
                terms.dw[segment.rows, head] = torch.sum(product, 1, out=workspace.take("dw", n))
            if terms.dq is None and dk is None:
                continue
            weight.copy_(w[segment.rows, head : head + 1])
            ds = torch.mul(gradient, weight, out=per_head)
            _close(ds, opened)
            if terms.dq is not None:
                dq = torch.mm(ds, keys, out=workspace.take("dq", n, channels))
                terms.dq[segment.rows, head] = dq
            if dk is not None:
                torch.mm(ds.t(), query, out=workspace.take("dk", rows.keys, channels))
                dk[segment.keys].add_(workspace.take("dk", rows.keys, channels))


def _zero_unless_finite(values: Tensor) -> None:
    values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _apply_relu(scores: Tensor, flags: Tensor, use_relu: bool) -> Tensor | None:
    """ReLU in place, and where its input was positive; None without a ReLU."""
    if not use_relu:
        return None
    torch.gt(scores, 0, out=flags)
    scores.relu_()
    return flags


def _close(gradient: Tensor, opened: Tensor | None) -> None:
    """Clear the gradient where the ReLU was shut: its derivative at 0 is 0."""
    if opened is not None:
        gradient.masked_fill_(opened.logical_not_(), 0)
