"""The signatures of the seven stages: all that a backend has to write.

Shapes: ``T`` query rows of this call (a slice of the flattened ``batch * rows``), ``S = batch * keys`` key rows, ``H``
attention heads, ``Hi`` indexer heads, ``Hkv`` key/value heads, ``W`` index width. Ids are int32 and global into ``S``.

What holds for every stage:

* A key is valid in a slot when ``0 <= id < S`` and the slot is below the row's ``length``. Every other slot is no key:
  nothing is read or written through it, and it contributes nothing even when that memory holds NaN. A capability with
  ``index_form`` "holes" or "prefix" gets its ids cleaned first.
* A slot is a key of its own: a key named twice counts twice, in the output, the lse and the gradients.
* A row without a valid key gives output 0, lse -inf, mass 0, loss 0 and gradients 0, never NaN.
* Inputs are not modified and not kept. Tensors may be strided in their first dimension; the last one is contiguous.
  Ids, lengths and bounds are contiguous.
* Sums run in fp32 at least (fp64 when the inputs are fp64). ``scale`` is applied after the dot product, in that type.
* Accumulators (``dk``, ``dv``, ``dkv``; fp32, or fp64 for fp64 inputs) are **added into**, never overwritten, since the
  core may call a stage once per chunk of rows. ``None`` means that this gradient is not needed.
* ``rows`` and ``options`` are host data. No stage is called with ``T``, ``S`` or ``W`` of zero.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dsa_dispatch._call import RowLayout, StageOptions


class LossTerms(NamedTuple):
    """What ``indexer_loss`` returns. Gradients are those of ``sum(kl)``, unscaled, in the accumulation type."""

    kl: Tensor
    """``[T]``, KL divergence of each row."""
    dq: Tensor | None
    """``[T, Hi, Di]``"""
    dw: Tensor | None
    """``[T, Hi]``"""


class IndexerTopK(Protocol):
    """Select keys. ``score[t, j] = sum_h w[t, h] * f(q[t, h] . k[j])``, f = ReLU or identity, no other scale.

    ``q [T, Hi, Di]``, ``k [S, Di]``, ``w [T, Hi]`` (any float type), ``starts``/``ends [T]`` int32: the half-open
    range of global key ids that row ``t`` may choose from, already clamped to its own batch item.
    Returns ``indices [T, topk]`` int32 (global, valid ones first, then -1) and ``length [T]`` int32.
    Order of preference: higher score, then lower id; -0.0 equals +0.0; a score of -inf is the lowest, still selectable.
    """

    def __call__(
        self,
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
    ) -> tuple[Tensor, Tensor]: ...


class IndexerTarget(Protocol):
    """The teacher: ``mass[t, c] = sum_h softmax_c(scale * query[t, h] . key[id(t, c)])`` over the row's keys.

    Sparse form: ``indices [T, W]`` and ``length [T]``; column ``c`` is slot ``c``.
    Dense form (``indices is None``): column ``c`` of ``rows.keys`` columns is key ``c`` of the row's own batch item,
    valid inside ``[starts, ends)``.
    ``query [T, H, Dqk]``, ``key [S, Dqk]``; ``lse [T, H]`` (natural logarithm over exactly this support) saves a pass
    and may be None. Returns ``mass [T, W or rows.keys]`` in fp32 (fp64), 0 where there is no key, not normalised.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        *,
        indices: Tensor | None,
        length: Tensor | None,
        starts: Tensor,
        ends: Tensor,
        lse: Tensor | None,
        scale: float,
        rows: RowLayout,
        options: StageOptions,
    ) -> Tensor: ...


class IndexerLoss(Protocol):
    """KL divergence of the indexer from the teacher, with gradients made in the forward.

    With ``T = mass / max(sum_c mass, 1e-10)``, ``P = softmax_c(score)`` over the row's keys:
    ``kl[t] = sum_c T (log max(T, 1e-10) - log P)`` and ``d sum(kl) / d score = P * sum_c T - T``, then through ``w``,
    the ReLU (derivative 0 at 0), ``q`` and ``k``. A row whose mass is all zero has loss and gradients 0.
    Columns as in ``IndexerTarget``. ``dk [S, Di]`` is an accumulator or None.
    """

    def __call__(
        self,
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
    ) -> LossTerms: ...


class AttentionForward(Protocol):
    """Absorbed sparse attention: the value is ``kv[:, :v_channels]``.

    ``p[t, h, c] = softmax_c(scale * q[t, h] . kv[id(t, c)])``, ``out[t, h] = sum_c p[t, h, c] * kv[id(t, c),
    :v_channels]``. ``q [T, H, Dqk]``, ``kv [S, Dqk]``, ``indices [T, W]`` int32, ``length [T]`` int32.
    Returns ``out [T, H, v_channels]`` in q's dtype and ``lse [T, H]``, the natural logarithm of the summed
    exponentials of the scaled scores, in fp32 (fp64 for fp64 inputs).
    """

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        length: Tensor,
        *,
        scale: float,
        v_channels: int,
        rows: RowLayout,
        options: StageOptions,
    ) -> tuple[Tensor, Tensor]: ...


class AttentionBackward(Protocol):
    """Gradients of ``AttentionForward``; ``out`` and ``lse`` may come from another backend.

    ``dout [T, H, v_channels]``. Returns ``dq [T, H, Dqk]`` in q's dtype (None unless ``need_dq``) and adds the
    gradient of the keys into ``dkv [S, Dqk]`` (None when not needed).
    """

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        length: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        *,
        scale: float,
        v_channels: int,
        need_dq: bool,
        dkv: Tensor | None,
        rows: RowLayout,
        options: StageOptions,
    ) -> Tensor | None: ...


class GqaForward(Protocol):
    """Grouped-query sparse attention; query head ``h`` reads key/value head ``h // (H // Hkv)``.

    ``q [T, H, D]``, ``k [S, Hkv, D]``, ``v [S, Hkv, Dv]``; ids are shared by the heads. Returns ``out [T, H, Dv]``,
    ``lse [T, H]``.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        length: Tensor,
        *,
        scale: float,
        rows: RowLayout,
        options: StageOptions,
    ) -> tuple[Tensor, Tensor]: ...


class GqaBackward(Protocol):
    """Gradients of ``GqaForward``: returns ``dq`` or None, adds into ``dk [S, Hkv, D]`` and ``dv [S, Hkv, Dv]``."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        length: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        *,
        scale: float,
        need_dq: bool,
        dk: Tensor | None,
        dv: Tensor | None,
        rows: RowLayout,
        options: StageOptions,
    ) -> Tensor | None: ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32
