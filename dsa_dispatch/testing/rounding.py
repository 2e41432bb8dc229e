"""What rounding alone does to the results of a right stage: the errors that a judge grants beside the limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._stages import Stage
from dsa_dispatch.testing import formulas
from dsa_dispatch.testing.operands import exact_results
from dsa_dispatch.testing.sizes import is_grouped

SCORE_ROUNDINGS: Final = 2
"""Units of rounding of the accumulation type, relative to a score's sum of absolute products: a half each for the
score, for it in units of log 2, and for the lse in both."""
SUM_ROUNDINGS: Final = 4
"""The same relative to the absolute terms of a sum that may cancel: products, sums and differences round a few times
each, and not all to one side."""


def allowances(
    stage: Stage, plain: Mapping[str, Tensor], ids: Tensor, host: Mapping[str, Any], dtype: str
) -> dict[str, Tensor]:
    """The absolute error, entry by entry, that rounding alone gives the results of a right stage.

    ``plain``, ``ids`` and ``host`` are those of ``exact_results``. Of a backward, ``plain`` also holds the ``out`` and
    ``lse`` that the stage is given, rounded: the error of an exact backward that uses them is allowed. Beside it stand
    the roundings, in the accumulation type, of scores and of terms that may cancel, relative to the terms.
    """
    kind: torch.dtype = getattr(torch, dtype)
    names = ("q", "k", "v", "w", "mass", "dout", "out", "lse")
    exact = {name: plain[name].detach().to("cpu", torch.float64) for name in names if name in plain}
    unit = torch.finfo(accumulation_dtype(kind)).eps
    if stage == "indexer_target":
        q, k = exact["q"], exact["k"]
        _, bound = _scores(q[:, None], k[:, None], ids, host["scale"])
        mass = formulas.teacher_mass(q, k, ids, host["scale"])
        return {"mass": mass * (_of_scores(bound, unit) + unit * SUM_ROUNDINGS).amax((1, 2))}
    if stage == "indexer_loss":
        return _of_loss(exact, ids, host, unit)
    return _of_attention(stage, exact, ids, host, unit)


def _scores(query: Tensor, keys: Tensor, ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``[T, Hkv, heads of each, W]``, with the sums of absolute products; ``query [T, Hkv, heads of each, D]``."""
    named = formulas.gathered(keys, ids)
    scores, bound = (
        scale * torch.einsum("tngd,twnd->tngw", left, right)
        for left, right in ((query, named), (query.abs(), named.abs()))
    )
    return scores, bound


def _of_scores(bound: Tensor, unit: float) -> Tensor:
    """Relative error of an exponential of scores with these sums of absolute products, ``[..., 1]``: the row's worst,
    which its sum takes on."""
    return unit * SCORE_ROUNDINGS * bound.amax(-1, keepdim=True)


def _and_mean(values: Tensor, probability: Tensor) -> Tensor:
    """Each value, and the row's mean that is taken off it."""
    return values + (probability * values).sum(-1, keepdim=True)


def _of_attention(
    stage: Stage, exact: Mapping[str, Tensor], ids: Tensor, host: Mapping[str, Any], unit: float
) -> dict[str, Tensor]:
    grouped = is_grouped(stage)
    q, keys = exact["q"], exact["k"] if grouped else exact["k"][:, None]
    values = exact["v"] if grouped else keys[..., : host["v_channels"]]
    rows, heads, _ = q.shape
    shape = (rows, keys.shape[1], heads // keys.shape[1], -1)
    query, valid = q.reshape(shape), (ids >= 0)[:, None, None]
    scores, bound = _scores(query, keys, ids, host["scale"])
    probability, lse = formulas.softmax_over(scores, valid)
    rounding = _of_scores(bound, unit) + unit * SUM_ROUNDINGS
    named_values = formulas.gathered(values, ids)
    if stage.endswith("forward"):
        out = torch.einsum("tngw,twnv->tngv", probability * rounding, named_values.abs())
        return {
            "out": out.reshape(rows, heads, -1),
            "lse": rounding.expand(*lse.shape, 1).reshape(rows, heads),
        }
    dout = exact["dout"].reshape(shape)
    dp = torch.einsum("tngv,twnv->tngw", dout, named_values)
    spread = _and_mean((dp - (probability * dp).sum(-1, keepdim=True)).abs(), probability)
    terms = _and_mean(torch.einsum("tngv,twnv->tngw", dout.abs(), named_values.abs()), probability)
    # An error of a probability is multiplied with what is left of dP - delta, one of a sum with its terms.
    of_score, of_sum = _of_scores(bound, unit), unit * SUM_ROUNDINGS
    dscore = host["scale"] * probability * (of_score * spread + of_sum * terms)
    inexact = _gradients(
        stage, ids, query.abs(), keys.abs(), dout.abs(), probability * (of_score + of_sum), dscore
    )
    given = backward_with(stage, exact, ids, host, (exact["dout"] * exact["out"]).sum(-1))
    right = exact_results(stage, exact, ids, host)
    return {name: (given[name] - right[name]).abs() + inexact[name] for name in right}


def backward_with(
    stage: Stage, exact: Mapping[str, Tensor], ids: Tensor, host: Mapping[str, Any], delta: Tensor
) -> dict[str, Tensor]:
    """The gradients of a backward in fp64 that uses the lse it is given, and this ``delta [T, H]``, which should be the
    sum of ``dout * out`` over channels."""
    grouped = is_grouped(stage)
    keys = exact["k"] if grouped else exact["k"][:, None]
    values = exact["v"] if grouped else keys[..., : host["v_channels"]]
    rows, heads, _ = exact["q"].shape
    shape = (rows, keys.shape[1], heads // keys.shape[1], -1)
    query, dout, lse = (exact[name].reshape(shape) for name in ("q", "dout", "lse"))
    scores, _ = _scores(query, keys, ids, host["scale"])
    probability = torch.where((ids >= 0)[:, None, None], (scores - lse).exp(), 0.0)
    dp = torch.einsum("tngv,twnv->tngw", dout, formulas.gathered(values, ids))
    dscore = host["scale"] * probability * (dp - delta.reshape(shape))
    return _gradients(stage, ids, query, keys, dout, probability, dscore)


def _gradients(
    stage: Stage,
    ids: Tensor,
    query: Tensor,
    keys: Tensor,
    dout: Tensor,
    probability: Tensor,
    dscore: Tensor,
) -> dict[str, Tensor]:
    """By name, from the gradient of the scores, which is 0 where a slot is no key."""
    dq = torch.einsum("tngw,twnd->tngd", dscore, formulas.gathered(keys, ids)).flatten(1, 2)
    slots = ids.clamp(min=0).flatten()
    dk, dv = (
        part.new_zeros(len(keys), *part.shape[2:]).index_add_(0, slots, part.flatten(0, 1))
        for part in (
            torch.einsum("tngw,tngd->twnd", dscore, query),
            torch.einsum("tngw,tngv->twnv", probability, dout),
        )
    )
    if is_grouped(stage):
        return {"dq": dq, "dk": dk, "dv": dv}
    dk[..., : dv.shape[-1]] += dv
    return {"dq": dq, "dkv": dk[:, 0]}


def _of_loss(
    exact: Mapping[str, Tensor], ids: Tensor, host: Mapping[str, Any], unit: float
) -> dict[str, Tensor]:
    q, k, w, mass = exact["q"], exact["k"], exact["w"], exact["mass"]
    valid = ids >= 0
    named = formulas.gathered(k, ids)
    dots = torch.einsum("thd,twd->thw", q, named)
    predicted, lse = formulas.softmax_over(formulas.index_scores(q, k, w, ids, host["use_relu"]), valid)
    target = mass / mass.sum(-1, keepdim=True).clamp(min=1e-10)
    of_score = _of_scores(formulas.index_score_bound(q, k, w, ids), unit)
    # A gradient of the scores is a difference of these two, and cancels where the prediction is right.
    predicted = torch.where(valid, predicted * target.sum(-1, keepdim=True), 0.0)
    slope = of_score * predicted + unit * SUM_ROUNDINGS * (predicted + target)
    inner = slope[:, None] * w.abs()[..., None]
    if host["use_relu"]:
        inner = inner * (dots > 0)
    dk = torch.einsum("thw,thd->twd", inner, q.abs())
    logs = target * (target.clamp(min=1e-10).log().abs() + 1 + lse.nan_to_num(0.0, 0.0, 0.0).abs()[:, None])
    return {
        "kl": ((of_score + unit * SUM_ROUNDINGS) * torch.where(valid, logs, 0.0)).sum(-1),
        "dq": torch.einsum("thw,twd->thd", inner, named.abs()),
        "dw": torch.einsum("tw,thw->th", slope, torch.einsum("thd,twd->thw", q.abs(), named.abs())),
        "dk": torch.zeros_like(k).index_add_(0, ids.clamp(min=0).flatten(), dk.flatten(0, 1)),
    }
