"""``run_fused_qk_topk`` and ``run_fused_qk_topk_with_loss``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsa_dispatch._dispatch.table import Request
from dsa_dispatch._execution.memory import MemoryPlan
from dsa_dispatch._operations import library
from dsa_dispatch._operations import validate as check
from dsa_dispatch._operations.budget import memory_of_loss, memory_of_topk, naming_what_does
from dsa_dispatch._policy.config import explicit_text


class TopK(NamedTuple):
    """A selection: ``indices [b, sq, index_topk]`` int32, valid ids first, then -1; ``length [b, sq]`` int32."""

    indices: Tensor
    length: Tensor


class TopKWithLoss(NamedTuple):
    """A selection with the indexer's loss, a 0-d tensor in fp32 (fp64 for fp64 inputs)."""

    indices: Tensor
    length: Tensor
    loss: Tensor


def needs(tensor: Tensor) -> bool:
    """Read in Python, before the op: inside an op's body ``requires_grad`` is False under inductor."""
    return torch.is_grad_enabled() and tensor.requires_grad


def link_to(*tensors: Tensor) -> Tensor:
    """A zero that depends on ``tensors`` for autograd and holds none of their memory."""
    return torch.stack([tensor[:0].sum(dtype=torch.float32) for tensor in tensors]).sum()


def request_of(
    group: Any,
    operation: str,
    topk: int,
    use_relu: bool,
    starts: Tensor | None,
    packed_seq_params: object,
    cp_size: int,
    sparse_loss: bool = True,
    extras: str = "",
) -> str:
    return Request(
        group,
        operation,
        width=topk,
        use_relu=bool(use_relu),
        sparse_loss=sparse_loss,
        bounds="causal" if starts is None else "ranges",
        layout="bshd" if packed_seq_params is None else "thd",
        context_parallel="none" if cp_size == 1 else "zigzag",
        extras=extras,
    ).text()


def run_fused_qk_topk(
    config: object,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    block_size: int | None = None,
    use_relu: bool = True,
    use_local_indexer_varlen: bool = False,
    single_packed_thd_sequence: bool = False,
    local_packed_cp_rank: int = 0,
    local_packed_cp_query_start: int = 0,
    local_packed_cp_query_len: int | None = None,
    packed_seq_params: object = None,
    cp_size: int = 1,
) -> TopK:
    """Select the ``index_topk`` best keys of every query row.

    The score of key ``j`` for row ``i`` is ``sum_h weights[i, h] * f(q[i, h] . k[j])`` with f = ReLU or identity;
    ``weights`` already carry ``hi ** -0.5 * di ** -0.5`` (DeepSeek-V3.2, lightning indexer). Ties go to the lower
    index.

    ``q [sq, b, hi, di]``, ``k [sk, b, di]`` of one float dtype, ``weights [sq, b, hi]`` of any. ``starts`` and ``ends``
    ``[sq]`` or ``[b, sq]`` int32/int64: half-open ranges of key rows, clamped; None and None is causal, aligned to the
    bottom right. ``block_size`` caps the rows scored at once. The ``local_packed_cp_*`` arguments describe the layout
    and never change a result. Returns ``TopK``; not differentiable.

    Raises ``InvalidInputError`` on bad input, ``ConfigError`` on a bad setting, ``NoBackendError`` when nobody may
    serve.
    """
    topk = check_selection(q, k, weights, index_topk, starts, ends, block_size, packed_seq_params, cp_size)
    return decide_selection(
        "run_fused_qk_topk",
        config,
        q,
        k,
        weights,
        topk,
        starts,
        ends,
        block_size,
        use_relu=use_relu,
        packed_seq_params=packed_seq_params,
        cp_size=cp_size,
    ).run()


def check_selection(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: Any,
    starts: Tensor | None,
    ends: Tensor | None,
    block_size: Any,
    packed_seq_params: object,
    cp_size: int,
    names: check.IndexerNames = check.PLAIN_NAMES,
) -> int:
    """All that a selection asks of its arguments; returns ``index_topk``."""
    check.check_indexer(q, k, weights, names)
    check.check_bounds(q, starts, ends, names)
    check.check_packing(packed_seq_params, cp_size, starts, names)
    if block_size is not None:
        check.check_count("block_size", block_size)
    return check.check_count(names.topk, index_topk)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """A selection, decided and not yet run."""

    indexer: tuple[Tensor, Tensor, Tensor]
    bounds: tuple[Tensor | None, Tensor | None]
    topk: int
    block_size: int | None
    use_relu: bool
    plan: Tensor

    def run(self) -> TopK:
        return TopK(
            *library.indexer_topk(
                *self.indexer, *self.bounds, self.topk, self.use_relu, self.block_size, self.plan
            )
        )

    def memory(self) -> MemoryPlan:
        return memory_of_topk(self.plan, *self.indexer, self.topk, self.block_size)


def decide_selection(
    operation: str,
    config: object,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    starts: Tensor | None,
    ends: Tensor | None,
    block_size: int | None,
    *,
    use_relu: bool,
    packed_seq_params: object,
    cp_size: int,
    extras: str = "",
) -> Selection:
    """The selection of arguments that were checked."""
    request = request_of("topk", operation, topk, use_relu, starts, packed_seq_params, cp_size, extras=extras)
    q, k, weights = q.detach(), k.detach(), weights.detach()
    plan = library.decide([q, k, weights], request, [], explicit_text(config))
    return Selection((q, k, weights), (starts, ends), topk, block_size, bool(use_relu), plan)


def run_fused_qk_topk_with_loss(
    config: object,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor | None,
    ends: Tensor | None,
    block_size: int | None,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    loss_coeff: float,
    pg_collection: Any = None,
    query_valid_rows: Tensor | None = None,
    calculate_per_token_loss: bool = False,
    use_relu: bool = True,
    use_local_indexer_varlen: bool = False,
    single_packed_thd_sequence: bool = False,
    local_packed_cp_rank: int = 0,
    local_packed_cp_query_start: int = 0,
    local_packed_cp_query_len: int | None = None,
    packed_seq_params: object = None,
    cp_size: int = 1,
    sparse_loss: bool = True,
) -> TopKWithLoss:
    """``run_fused_qk_topk`` with the KL divergence of the indexer from the attention it stands in for.

    The teacher is the attention of ``query [sq, b, h, dqk]`` over ``key [sk, b, 1, dqk]`` with ``softmax_scale``,
    summed
    over heads and normalised per row; it gets no gradient. The support is the selection (``sparse_loss``) or every key
    of the row. The loss is ``loss_coeff`` times the sum over rows, divided by the number of valid rows unless
    ``calculate_per_token_loss``. ``query_valid_rows`` bool ``[sq]``, ``[1, sq]`` or ``[b, sq]`` leaves rows out.
    Differentiable once, with respect to ``q``, ``k`` and ``weights``. Errors as in ``run_fused_qk_topk``.
    """
    topk = check_selection(q, k, weights, index_topk, starts, ends, block_size, packed_seq_params, cp_size)
    check.check_teacher(q, k, query, key)
    check.check_single_rank(pg_collection)
    both = decide_with_loss(
        "run_fused_qk_topk_with_loss",
        config,
        q,
        k,
        weights,
        topk,
        starts,
        ends,
        block_size,
        query,
        key,
        check.check_scale(softmax_scale),
        check.check_coefficient(loss_coeff),
        valid=check.check_valid_rows(q, query_valid_rows),
        per_token=calculate_per_token_loss,
        use_relu=use_relu,
        packed_seq_params=packed_seq_params,
        cp_size=cp_size,
        sparse_loss=sparse_loss,
    )

    def run() -> TopKWithLoss:
        indices, length = both.select()
        return TopKWithLoss(indices, length, both.loss(indices, length, None))

    return naming_what_does(run, both.memories)


def decide_with_loss(
    operation: str,
    config: object,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    starts: Tensor | None,
    ends: Tensor | None,
    block_size: int | None,
    query: Tensor,
    key: Tensor,
    scale: float,
    coefficient: float,
    *,
    valid: Tensor | None,
    per_token: bool,
    use_relu: bool,
    packed_seq_params: object,
    cp_size: int,
    sparse_loss: bool,
    extras: str = "",
) -> SelectionWithLoss:
    """Both decisions for arguments that were checked, so that a missing backend is reported before anything runs."""
    if key.shape[2] != 1:
        extras = ",".join(filter(None, (extras, "per_head_keys")))
    policy = explicit_text(config)
    need = (needs(q), needs(k), needs(weights))
    arguments = (topk, use_relu, starts, packed_seq_params, cp_size, bool(sparse_loss), extras)
    query, key = query.detach(), key.detach()
    plain = [q.detach(), k.detach(), weights.detach()]
    selection_plan = library.decide(plain, request_of("topk", operation, *arguments), [], policy)
    loss_plan = library.decide(
        [*plain, query, key], request_of("loss", operation, *arguments), list(need), policy
    )
    q_plain, k_plain, weights_plain = plain
    selection = Selection(
        (q_plain, k_plain, weights_plain), (starts, ends), topk, block_size, bool(use_relu), selection_plan
    )
    return SelectionWithLoss(
        selection, (q, k, weights), (query, key), valid, scale, coefficient,
        bool(per_token), bool(sparse_loss), need, loss_plan,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SelectionWithLoss:
    """A selection and its loss, decided and not yet run; ``valid [b, sq]`` bool."""

    selection: Selection
    indexer: tuple[Tensor, Tensor, Tensor]
    teacher: tuple[Tensor, Tensor]
    valid: Tensor | None
    scale: float
    coefficient: float
    per_token: bool
    sparse_loss: bool
    need: tuple[bool, bool, bool]
    loss_plan: Tensor

    def select(self) -> TopK:
        return self.selection.run()

    def memories(self) -> tuple[MemoryPlan, MemoryPlan]:
        q, k, _ = self.indexer
        columns = self.selection.topk if self.sparse_loss else k.shape[0]
        block_size = self.selection.block_size
        loss = memory_of_loss(self.loss_plan, q, k, self.teacher[0], columns, block_size)
        return self.selection.memory(), loss

    def loss(self, indices: Tensor, length: Tensor, lse: Tensor | None) -> Tensor:
        """``lse [b, sq, h]`` of the teacher's attention over the selection, where it has been computed already."""
        support = (indices, length, lse) if self.sparse_loss else (None, None, None)
        link = link_to(*self.indexer) if any(self.need) else None
        loss, *_ = library.indexer_loss(
            *self.indexer, *self.teacher, *support, *self.selection.bounds, self.valid, self.scale,
            self.coefficient, self.per_token, self.selection.use_relu, *self.need, self.selection.block_size, link,
            self.loss_plan,
        )  # fmt: skip
        result: Tensor = loss
        return result
