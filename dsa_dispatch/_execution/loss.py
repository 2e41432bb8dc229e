"""Body of the indexer loss op: teacher mass and loss, chunk by chunk, so that no mass of the whole call exists."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_dispatch._contract import LossTerms, accumulation_dtype
from dsa_dispatch._dispatch.check import Legalization
from dsa_dispatch._dispatch.plan import Plan, plan_of
from dsa_dispatch._execution.legalize import (
    legal_ids,
    pad_channels,
    pad_heads,
    pad_query,
    trim_columns,
)
from dsa_dispatch._execution.memory import MemoryPlan, plan_memory, require_budget
from dsa_dispatch._execution.rows import (
    Chunk,
    flatten_keys,
    global_bounds,
    global_ids,
    put_rows,
    row_lengths,
    take_rows,
)
from dsa_dispatch._execution.run import call_stage, opaque, planned_chunks, run_planned
from dsa_dispatch._execution.topk import indexer_layout


def loss_memory(
    plan: Plan, q: Tensor, k: Tensor, query: Tensor, columns: int, block_size: int | None = None
) -> MemoryPlan:
    """The transients of a loss with ``columns`` of teacher mass a row."""
    target, loss = plan.stage("indexer_target"), plan.stage("indexer_loss")
    wide = accumulation_dtype(q.dtype).itemsize
    teacher = accumulation_dtype(query.dtype).itemsize
    copies = q.shape[1] > 1
    heads = query.shape[2]
    hi, di = loss.legalization.heads[1], loss.legalization.channels[1]
    core = (
        (
            "teacher mass",
            max(columns, target.legalization.width[1]) * (teacher + (wide if wide != teacher else 0)),
        ),
        ("ids", columns * 24 + 16),
        ("query copy", heads * target.legalization.channels[1] * query.element_size() * (1 + copies)),
        ("q copy", hi * (di + 1) * q.element_size() * (1 + copies)),
        ("gradients of the chunk", hi * (di + 1) * wide),
    )
    keys = k.shape[0] * k.shape[1]
    fixed = (
        (
            "key copies",
            2 * keys * (di * q.element_size() + target.legalization.channels[1] * query.element_size()),
        ),
        ("key gradient", 2 * keys * di * wide),
    )
    layout = indexer_layout(plan, q, k, causal=False)
    return plan_memory(plan, (target, loss), layout, core=core, fixed=fixed, block_size=block_size)


@opaque
def indexer_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    indices: Tensor | None,
    length: Tensor | None,
    lse: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    valid_rows: Tensor | None,
    scale: float,
    coefficient: float,
    per_token: bool,
    use_relu: bool,
    need_dq: bool,
    need_dk: bool,
    need_dw: bool,
    block_size: int | None,
    link: Tensor | None,
    plan: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, its factor ``coefficient / n`` and the gradients of ``sum(KL)`` in the accumulation type, unscaled.

    ``indices [b, sq, W]`` with ``length [b, sq]`` is the sparse loss; None is the dense one over ``[starts, ends)``.
    ``lse [b, sq, h]`` of the teacher's attention over exactly these keys saves the target a pass; it may be None.
    ``valid_rows [b, sq]`` bool or None. A zero-size tensor stands for a gradient that is not needed.
    ``link`` is not read: autograd finds the inputs of the saved gradients through it.
    """
    return run_planned(
        plan_of(plan),
        ("indexer_target", "indexer_loss"),
        lambda planned: _Loss(
            planned, q, k, weights, query, key, indices, length, lse, starts, ends, valid_rows
        ).run(scale, coefficient, per_token, use_relu, (need_dq, need_dk, need_dw), block_size),
    )


class _Loss:
    """One loss under one plan: operands flattened once, then chunk by chunk."""

    def __init__(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        query: Tensor,
        key: Tensor,
        indices: Tensor | None,
        length: Tensor | None,
        lse: Tensor | None,
        starts: Tensor | None,
        ends: Tensor | None,
        valid_rows: Tensor | None,
    ) -> None:
        self.plan = plan
        self.q, self.k, self.weights, self.query, self.key = q, k, weights, query, key
        self.indices, self.length, self.lse, self.valid_rows = indices, length, lse, valid_rows
        self.starts, self.ends = starts, ends

    def run(
        self,
        scale: float,
        coefficient: float,
        per_token: bool,
        use_relu: bool,
        need: tuple[bool, bool, bool],
        block_size: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k, weights = self.q, self.k, self.weights
        rows, batch = q.shape[:2]
        wide = accumulation_dtype(q.dtype)
        # A new tensor for each, needed or not: outputs of an op must not alias.
        dq, dk, dw = (
            tensor.new_zeros(tensor.shape if wanted else (0,), dtype=wide)
            for tensor, wanted in zip((q, k, weights), need, strict=True)
        )
        factor = self._factor(coefficient, per_token, rows * batch, wide)
        columns = self.k.shape[0] if self.indices is None else self.indices.shape[2]
        if not (q.numel() and k.numel() and self.query.numel() and columns):
            return q.new_zeros((), dtype=wide), factor, dq, dk, dw
        memory = loss_memory(self.plan, q, k, self.query, columns, block_size)
        require_budget(memory)
        legal = self.plan.stage("indexer_loss").legalization
        self.flat_k = pad_channels(flatten_keys(k), legal)
        self.flat_key = pad_channels(
            flatten_keys(self.key[:, :, 0]), self.plan.stage("indexer_target").legalization
        )
        self.first, self.last = global_bounds(self.starts, self.ends, rows, batch, k.shape[0], q.device)
        if self.valid_rows is not None:
            # An invalid row is made an empty one, which every backend must give loss and gradients 0.
            self.last = torch.where(self.valid_rows.reshape(-1), self.last, self.first)
        total_dk = torch.zeros(self.flat_k.shape, dtype=wide, device=k.device) if need[1] else None
        kl = torch.empty(memory.rows, dtype=wide, device=q.device)
        for chunk in planned_chunks(memory):
            terms = self._chunk(chunk, scale, use_relu, need, total_dk)
            kl[chunk.start : chunk.stop] = terms.kl
            if terms.dq is not None:
                put_rows(dq, chunk, terms.dq[:, : q.shape[2], : q.shape[3]])
            if terms.dw is not None:
                put_rows(dw, chunk, terms.dw[:, : q.shape[2]])
            del terms  # or they would live beside the gradients of the next chunk
        if total_dk is not None:
            dk = total_dk[:, : k.shape[2]].view(batch, k.shape[0], k.shape[2]).transpose(0, 1).contiguous()
        return kl.sum() * factor, factor, dq, dk, dw

    def _factor(self, coefficient: float, per_token: bool, rows: int, dtype: torch.dtype) -> Tensor:
        """``coefficient``, over the number of valid rows (at least 1) unless the loss is per token."""
        if per_token:
            return torch.full((), coefficient, dtype=dtype, device=self.q.device)
        if self.valid_rows is None:
            return torch.full((), coefficient / max(1, rows), dtype=dtype, device=self.q.device)
        return coefficient / self.valid_rows.sum().clamp(min=1).to(dtype)

    def _chunk(
        self,
        chunk: Chunk,
        scale: float,
        use_relu: bool,
        need: tuple[bool, bool, bool],
        dk: Tensor | None,
    ) -> LossTerms:
        plan = self.plan
        target, loss = plan.stage("indexer_target"), plan.stage("indexer_loss")
        layout = indexer_layout(plan, self.q, self.k, causal=self._causal()).at(chunk.start)
        first, last = self.first[chunk.start : chunk.stop], self.last[chunk.start : chunk.stop]
        ids, lengths = self._ids(chunk)
        target_ids, target_lengths = _legal(target.legalization, ids, lengths)
        mass = call_stage(
            target,
            pad_query(take_rows(self.query, chunk), target.legalization),
            self.flat_key,
            indices=target_ids,
            length=target_lengths,
            starts=first,
            ends=last,
            lse=None if self.lse is None else take_rows(self.lse.transpose(0, 1), chunk),
            scale=scale,
            rows=layout,
            options=plan.options,
        )
        loss_ids, loss_lengths = _legal(loss.legalization, ids, lengths)
        mass = mass if ids is None else trim_columns(mass, target.legalization)
        mass = mass.to(accumulation_dtype(self.q.dtype))
        if loss_ids is not None and loss_ids.shape[1] != mass.shape[1]:
            mass = torch.nn.functional.pad(mass, (0, loss_ids.shape[1] - mass.shape[1]))
        terms: LossTerms = call_stage(
            loss,
            pad_query(take_rows(self.q, chunk), loss.legalization),
            self.flat_k,
            pad_heads(take_rows(self.weights, chunk)[..., None], loss.legalization)[..., 0],
            indices=loss_ids,
            length=loss_lengths,
            starts=first,
            ends=last,
            mass=mass,
            rows=layout,
            use_relu=use_relu,
            need_dq=need[0],
            need_dw=need[2],
            dk=dk,
            options=plan.options,
        )
        return terms

    def _causal(self) -> bool:
        return self.starts is None and self.valid_rows is None

    def _ids(self, chunk: Chunk) -> tuple[Tensor | None, Tensor | None]:
        if self.indices is None:
            return None, None
        ids = global_ids(self.indices, chunk, self.k.shape[0], sanitize=False)
        lengths = row_lengths(self.length, chunk, self.indices.shape[2], ids.device)
        if self.valid_rows is not None:
            lengths = lengths * take_rows(self.valid_rows.transpose(0, 1), chunk)
        return ids, lengths.to(torch.int32)


def _legal(
    legal: Legalization, ids: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if ids is None or lengths is None:
        return None, None
    return legal_ids(ids, lengths, legal)
