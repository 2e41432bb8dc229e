"""A stage against dense formulas in fp64: tiny before it is trusted, larger for `dsa-dispatch check`.

The tiny case is five rows over three keys, in the smallest shapes that the capability declares, with a shared key, an
empty row, a hole, a valid id past its row's length, accumulators that are not empty, a tie at the cut, and a row whose
lse tells its base: each has been wrong in a published kernel. Its tolerances only tell right from wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from dsa_dispatch._capability import Capability
from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._registry.selfcase import FLOATS, Case, SelfTestError, SelfTestSkipped, make_case
from dsa_dispatch._stages import Stage

LOGGER = logging.getLogger("dsa_dispatch")
TOLERANCE: Final = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
SCALE: Final = 0.5
STALE: Final = 1.0
"""What accumulators hold before a call, since a stage adds to what an earlier chunk left there."""


def reason_left_out(
    function: Callable[..., Any], capability: Capability, stage: Stage, device: torch.device
) -> str:
    """Run ``function`` on the tiny case. Raises ``SelfTestError``, or whatever the function raises.

    Where the declaration accepts no small call the test is left out: why is logged and returned; else "".
    """
    preference = FLOATS
    if device.type != "cpu":
        preference = ("bfloat16", "float16", "float32", "float64")
    dtype = next((name for name in preference if name in capability.dtypes), "")
    try:
        if not dtype:
            raise SelfTestSkipped("the capability admits no dtype")
        errors = measure(function, capability, stage, device, dtype)
    except SelfTestSkipped as skipped:
        LOGGER.warning("The self-test of %s on %s is left out: %s", stage, device, skipped)
        return str(skipped)
    for what, error in errors.items():
        if error > TOLERANCE[dtype]:
            raise SelfTestError(f"{what}: relative error {error:.3g} against the dense formula")
    return ""


def measure(
    function: Callable[..., Any],
    capability: Capability,
    stage: Stage,
    device: torch.device,
    dtype: str,
    large: bool = False,
) -> dict[str, float]:
    """Relative error of each result of a stage. Raises ``SelfTestError`` where a result is wrong in kind,
    ``SelfTestSkipped`` where the declaration accepts no small call."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        case = make_case(capability, stage, device, dtype, large)
        _CHECKS[stage](function, case)
    return case.errors


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.float64)


def _probabilities(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row, head and slot: probabilities and validity; per row and head: lse; per row: the gathered ids."""
    ids = case.indices.cpu().long()
    slots = torch.arange(ids.shape[1])
    valid = (ids >= 0) & (slots < case.length.cpu()[:, None])
    ids = ids.clamp(min=0)
    key = _exact(case.key)
    if key.dim() == 3:
        key = key.repeat_interleave(case.query.shape[1] // key.shape[1], dim=1)[ids]
        score = torch.einsum("thd,twhd->thw", _exact(case.query), key) * SCALE
    else:
        score = torch.einsum("thd,twd->thw", _exact(case.query), key[ids]) * SCALE
    score = score.masked_fill(~valid[:, None], -torch.inf)
    lse = score.logsumexp(dim=2)
    probability = torch.where(valid[:, None], (score - lse[..., None]).exp(), 0.0)
    return probability.nan_to_num(), valid, lse, ids


def _gathered(case: Case, tensor: Tensor, ids: Tensor) -> Tensor:
    """``[rows, slots, heads, D]`` of keys or values, one head each for the query's."""
    exact = _exact(tensor)
    if exact.dim() == 2:
        exact = exact[:, None]
    return exact.repeat_interleave(case.query.shape[1] // exact.shape[1], dim=1)[ids]


def _forward(function: Callable[..., Any], case: Case) -> None:
    out, lse = function(
        *_operands(case),
        case.indices,
        case.length,
        scale=SCALE,
        rows=case.rows,
        options=case.options,
        **_width(case),
    )
    probability, _, exact_lse, ids = _probabilities(case)
    wanted = torch.einsum("thw,twhd->thd", probability, _gathered(case, case.value, ids))
    case.compare("out", out, wanted)
    case.compare("lse (natural logarithm)", lse, exact_lse)


def _operands(case: Case) -> tuple[Tensor, ...]:
    return (case.query, case.key, case.value) if case.key.dim() == 3 else (case.query, case.key)


def _width(case: Case) -> dict[str, int]:
    return {} if case.key.dim() == 3 else {"v_channels": case.v_channels}


def _backward(function: Callable[..., Any], case: Case) -> None:
    probability, _, lse, ids = _probabilities(case)
    values = _gathered(case, case.value, ids)
    out = torch.einsum("thw,twhd->thd", probability, values)
    dout = _exact(case.query)[..., :1] * torch.linspace(-1, 1, values.shape[3], dtype=torch.float64)
    wide = accumulation_dtype(case.query.dtype)
    device = case.query.device
    given_out, given_dout = (tensor.to(device, case.query.dtype) for tensor in (out, dout))
    given_lse = lse.to(device, wide)
    sum_k = torch.full(case.key.shape, STALE, dtype=wide, device=device)
    sum_v = torch.full(case.value.shape, STALE, dtype=wide, device=device)
    accumulators = {"dk": sum_k, "dv": sum_v} if case.key.dim() == 3 else {"dkv": sum_k}
    got = function(
        *_operands(case),
        case.indices,
        case.length,
        given_out,
        given_lse,
        given_dout,
        scale=SCALE,
        need_dq=True,
        rows=case.rows,
        options=case.options,
        **accumulators,
        **_width(case),
    )
    taken = probability * (lse - _exact(given_lse)).nan_to_num().exp()[..., None]
    found = [got, sum_k - STALE, sum_v - STALE]
    wanted = _gradients(case, ids, probability, out, _exact(given_dout))
    # What an exact backward makes of the rounded out and lse: where gradients cancel, that is most of an error.
    rounded = _gradients(case, ids, taken, _exact(given_out), _exact(given_dout))
    names = ("dq", "key gradient", "value gradient")[: len(wanted)]
    for what, result, exact, of_rounded in zip(names, found, wanted, rounded, strict=False):
        case.compare(what, result, exact, of_rounded - exact)


def _gradients(case: Case, ids: Tensor, probability: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Of query and key, and of a value that is a tensor of its own."""
    keys, values = _gathered(case, case.key, ids), _gathered(case, case.value, ids)
    dscore = torch.einsum("thd,twhd->thw", dout, values) - (dout * out).sum(-1)[..., None]
    dscore = dscore * probability * SCALE
    dq = torch.einsum("thw,twhd->thd", dscore, keys)
    dk = torch.einsum("thw,thd->twhd", dscore, _exact(case.query))
    dv = torch.einsum("thw,thd->twhd", probability, dout)
    if case.key.dim() == 3:
        return dq, _scattered(case.key, ids, dk, None), _scattered(case.value, ids, dv, None)
    return dq, _scattered(case.key, ids, dk, dv)


def _scattered(key: Tensor, ids: Tensor, gradient: Tensor, value_gradient: Tensor | None) -> Tensor:
    """Per-slot gradients ``[rows, slots, heads, D]`` summed into the keys' shape; a value's go to its prefix."""
    if value_gradient is not None:
        gradient = gradient.clone()
        gradient[..., : value_gradient.shape[3]] += value_gradient
    kv_heads = key.shape[1] if key.dim() == 3 else 1
    rows, slots, heads, channels = gradient.shape
    grouped = gradient.view(rows, slots, kv_heads, heads // kv_heads, channels).sum(3)
    total = torch.zeros(key.shape[0], *grouped.shape[2:], dtype=torch.float64)
    total.index_add_(0, ids.reshape(-1), grouped.flatten(0, 1))
    return total.view(key.shape)


def _selection(function: Callable[..., Any], case: Case) -> None:
    """Small integers: every product and sum is exact, so the order is known, ties included.

    There are more keys than slots where the limits allow it, so that ties stand at the cut.
    """
    rows, heads, channels = case.query.shape
    width, device = case.indices.shape[1], case.query.device
    layout, starts, ends = case.rows, case.starts.cpu(), case.ends.cpu()
    values = [1 + (key % 3 == 2) for key in range(layout.keys)]
    q = case.query.new_zeros(rows, heads, channels)
    q[:, :, 0] = 1
    k = case.key.new_zeros(layout.keys, channels)
    k[:, 0] = torch.tensor(values, dtype=k.dtype, device=device)
    ids, length = function(
        q,
        k,
        torch.ones_like(case.weights),
        starts.to(device, torch.int32),
        ends.to(device, torch.int32),
        rows=layout,
        topk=width,
        use_relu=case.use_relu,
        options=case.options,
    )
    if ids.shape != (rows, width) or ids.dtype != torch.int32 or length.shape != (rows,):
        raise SelfTestError(
            f"selection: expected int32 {[rows, width]} with lengths {[rows]}, got {ids.dtype} {list(ids.shape)} with "
            f"{list(length.shape)}"
        )
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        wanted = sorted(range(start, end), key=lambda key: (-values[key], key))[:width]
        slots, count = ids[row].tolist(), len(wanted)
        chosen = slots[:count]
        if int(length[row]) != count or any(slot != -1 for slot in slots[count:]):
            raise SelfTestError(f"selection of row {row}: expected {count} ids and then -1, got {slots}")
        same = set(chosen) == set(wanted)
        if not case.lower_index and not same:
            inside = len(set(chosen)) == count and all(start <= key < end for key in chosen)
            best = sorted(values[key] for key in wanted)
            same = inside and sorted(values[key] for key in chosen) == best
        if not same:
            raise SelfTestError(f"selection of row {row}: expected {sorted(wanted)}, got {sorted(chosen)}")
    case.errors["selection"] = 0.0


def _teacher(case: Case) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Mass in fp64 with its validity, and the arguments that name the support."""
    if case.sparse:
        probability, valid, _, _ = _probabilities(case)
        return probability.sum(1), valid, {"indices": case.indices, "length": case.length}
    columns = torch.arange(case.key.shape[0])
    valid = (columns >= case.starts.cpu()[:, None]) & (columns < case.ends.cpu()[:, None])
    score = torch.einsum("thd,sd->ths", _exact(case.query), _exact(case.key)) * SCALE
    probability = score.masked_fill(~valid[:, None], -torch.inf).softmax(-1).nan_to_num()
    return probability.sum(1), valid, {"indices": None, "length": None}


def _target(function: Callable[..., Any], case: Case) -> None:
    mass, _, support = _teacher(case)
    got = function(
        case.query,
        case.key,
        **support,
        starts=case.starts,
        ends=case.ends,
        lse=None,
        scale=SCALE,
        rows=case.rows,
        options=case.options,
    )
    case.compare("teacher mass", got, mass)


def _loss(function: Callable[..., Any], case: Case) -> None:
    mass, valid, support = _teacher(case)
    wide = accumulation_dtype(case.query.dtype)
    dk = torch.full(case.key.shape, STALE, dtype=wide, device=case.key.device)
    terms = function(
        case.query,
        case.key,
        case.weights,
        **support,
        starts=case.starts,
        ends=case.ends,
        mass=mass.to(case.query.device, wide),
        rows=case.rows,
        use_relu=case.use_relu,
        need_dq=True,
        need_dw=True,
        dk=dk,
        options=case.options,
    )
    columns = torch.arange(case.key.shape[0]).expand(case.query.shape[0], -1)
    ids = case.indices.cpu().long().clamp(min=0) if case.sparse else columns
    dot = torch.einsum("thd,twd->thw", _exact(case.query), _exact(case.key)[ids])
    active = dot.clamp(min=0) if case.use_relu else dot
    score = torch.einsum("thw,th->tw", active, _exact(case.weights)).masked_fill(~valid, -torch.inf)
    predicted = score.softmax(-1).nan_to_num()
    teacher = mass / mass.sum(-1, keepdim=True).clamp(min=1e-10)
    divergence = teacher * (teacher.clamp(min=1e-10).log() - score.log_softmax(-1))
    case.compare("loss", terms.kl, torch.where(valid, divergence, 0.0).nan_to_num().sum(-1))
    slope = predicted * teacher.sum(-1, keepdim=True) - teacher
    case.compare("weights gradient", terms.dw, torch.einsum("tw,thw->th", slope, active))
    gate = (dot > 0).double() if case.use_relu else torch.ones_like(dot)
    inner = slope[:, None] * _exact(case.weights)[..., None] * gate
    case.compare("q gradient", terms.dq, torch.einsum("thw,twd->thd", inner, _exact(case.key)[ids]))
    per_slot = torch.einsum("thw,thd->twhd", inner, _exact(case.query)).sum(2, keepdim=True)
    case.compare("k gradient", dk - STALE, _scattered(case.key, ids, per_slot, None))


_CHECKS: Final[dict[Stage, Callable[[Callable[..., Any], Case], None]]] = {
    "indexer_topk": _selection,
    "indexer_target": _target,
    "indexer_loss": _loss,
    "attention_forward": _forward,
    "attention_backward": _backward,
    "gqa_forward": _forward,
    "gqa_backward": _backward,
}
