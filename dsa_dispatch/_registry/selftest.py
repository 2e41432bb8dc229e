"""A stage against dense formulas in fp64: tiny before it is trusted, larger for `dsa-dispatch check`.

The tiny case is four rows over three keys, in the smallest shapes that the capability declares, with a shared key, an
empty row, a hole, and a row whose lse tells its base: each has been wrong in a published kernel. Its tolerances only
tell right from wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from dsa_dispatch._call import RowLayout, StageOptions
from dsa_dispatch._capability import Capability
from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._stages import Stage

TOLERANCE: Final = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
SLOTS: Final = ((0, -1), (1, 1), (-1, 1), (-1, -1))
"""Row 0 has a hole at the end, rows 1 and 2 share key 1 (row 1 twice, row 2 after a hole), row 3 is empty."""
SCALE: Final = 0.5


class SelfTestError(Exception):
    """The stage ran and gave a wrong answer."""


@dataclass(frozen=True, slots=True)
class Case:
    """Operands of one tiny call."""

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    indices: Tensor
    length: Tensor
    starts: Tensor
    ends: Tensor
    rows: RowLayout
    options: StageOptions
    v_channels: int
    use_relu: bool
    sparse: bool
    errors: dict[str, float] = field(default_factory=dict)
    """What was compared, and its error relative to the norm of the exact value (at least 1)."""

    def compare(self, what: str, got: Tensor, wanted: Tensor) -> None:
        got = got.detach().to("cpu", torch.float64)
        wanted = wanted.to("cpu", torch.float64)
        if got.shape != wanted.shape:
            raise SelfTestError(f"{what}: expected shape {list(wanted.shape)}, got {list(got.shape)}")
        if not torch.equal(got.isinf(), wanted.isinf()) or bool(got.isnan().any()):
            raise SelfTestError(f"{what}: infinities or NaN where there should be none, or the reverse")
        finite = wanted.isfinite()
        self.errors[what] = float((got - wanted)[finite].norm() / wanted[finite].norm().clamp(min=1.0))


def run(function: Callable[..., Any], capability: Capability, stage: Stage, device: torch.device) -> None:
    """Run ``function`` on the tiny case. Raises ``SelfTestError``, or whatever the function raises."""
    preference = ("float32", "float64", "float16", "bfloat16")
    if device.type != "cpu":
        preference = ("bfloat16", "float16", "float32", "float64")
    dtype = next(name for name in preference if name in capability.dtypes)
    for what, error in measure(function, capability, stage, device, dtype).items():
        if error > TOLERANCE[dtype]:
            raise SelfTestError(f"{what}: relative error {error:.3g} against the dense formula")


def measure(
    function: Callable[..., Any],
    capability: Capability,
    stage: Stage,
    device: torch.device,
    dtype: str,
    large: bool = False,
) -> dict[str, float]:
    """Relative error of each result of a stage. Raises ``SelfTestError`` where a result is wrong in kind."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        case = _case(capability, stage, device, dtype, large)
        _CHECKS[stage](function, case)
    return case.errors


def _case(capability: Capability, stage: Stage, device: torch.device, dtype_name: str, large: bool) -> Case:
    dtype: torch.dtype = getattr(torch, dtype_name)
    grouped = stage in ("gqa_forward", "gqa_backward")
    if capability.heads.values is not None:
        heads = min(capability.heads.values)
    else:
        heads = capability.heads.fit(capability.heads.minimum) or capability.heads.minimum
        heads = -(-heads // capability.heads.multiple_of) * capability.heads.multiple_of
    kv_heads = 1
    if grouped:
        kv_heads = (
            min(capability.kv_heads.values) if capability.kv_heads.values else capability.kv_heads.minimum
        )
        heads = max(heads, kv_heads)
    if capability.channels.pairs is not None:
        channels, v_channels = capability.channels.pairs[0]
    else:
        step = capability.channels.multiple_of
        channels, v_channels = -(-32 // step) * step, 16
    v_channels = v_channels or channels
    rows, keys = (48, 96) if large else (4, 3)
    width = capability.width.multiple_of
    while width < (24 if large else 2) or (capability.width.power_of_two and width & (width - 1)):
        width += capability.width.multiple_of
    generator = torch.Generator().manual_seed(2051)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    ids, length = _ids(rows, keys, width, capability.index_form == "prefix", generator)
    starts, ends = torch.tensor([0, 0, 1, 2]), torch.tensor([1, 3, 3, 2])
    if large:
        starts = torch.randint(0, keys // 2, (rows,), generator=generator)
        ends = starts + torch.randint(0, keys // 2, (rows,), generator=generator)
    key = draw(keys, kv_heads, channels) if grouped else draw(keys, channels)
    return Case(
        query=draw(rows, heads, channels),
        key=key,
        value=draw(keys, kv_heads, v_channels) if grouped else key[:, :v_channels],
        weights=draw(rows, heads),
        indices=ids.to(device),
        length=length.to(device),
        starts=starts.to(device, torch.int32),
        ends=ends.to(device, torch.int32),
        rows=RowLayout(batch=1, rows=rows, keys=keys, bounds="ranges"),
        options=StageOptions(deterministic=False),
        v_channels=v_channels,
        use_relu=True in capability.relu,
        sparse="sparse" in capability.losses,
    )


def _ids(rows: int, keys: int, width: int, prefix: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids with holes, duplicates and an empty row. A kernel that needs a prefix is handed one, as the core would."""
    slots = [list(row) for row in SLOTS]
    if rows > len(SLOTS):
        drawn = torch.randint(-1, keys, (rows, min(width, keys)), generator=generator)
        drawn[:: rows // 4] = -1
        slots = drawn.tolist()
    ids = torch.full((rows, width), -1, dtype=torch.int32)
    length = torch.zeros(rows, dtype=torch.int32)
    for row, values in enumerate(slots):
        kept = [value for value in values if value >= 0] if prefix else values
        ids[row, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        length[row] = len(kept)
    return ids, length


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
    keys, values = _gathered(case, case.key, ids), _gathered(case, case.value, ids)
    out = torch.einsum("thw,twhd->thd", probability, values)
    dout = _exact(case.query)[..., :1] * torch.linspace(-1, 1, values.shape[3], dtype=torch.float64)
    dscore = torch.einsum("thd,twhd->thw", dout, values) - (dout * out).sum(-1)[..., None]
    dscore = dscore * probability * SCALE
    dq = torch.einsum("thw,twhd->thd", dscore, keys)
    dk = torch.einsum("thw,thd->twhd", dscore, _exact(case.query))
    dv = torch.einsum("thw,thd->twhd", probability, dout)
    wide = accumulation_dtype(case.query.dtype)
    device = case.query.device
    sum_k = torch.zeros(case.key.shape, dtype=wide, device=device)
    sum_v = torch.zeros(case.value.shape, dtype=wide, device=device)
    accumulators = {"dk": sum_k, "dv": sum_v} if case.key.dim() == 3 else {"dkv": sum_k}
    got = function(
        *_operands(case),
        case.indices,
        case.length,
        out.to(device, case.query.dtype),
        lse.to(device, wide),
        dout.to(device, case.query.dtype),
        scale=SCALE,
        need_dq=True,
        rows=case.rows,
        options=case.options,
        **accumulators,
        **_width(case),
    )
    case.compare("dq", got, dq)
    case.compare("key gradient", sum_k, _scattered(case.key, ids, dk, None if case.key.dim() == 3 else dv))
    if case.key.dim() == 3:
        case.compare("value gradient", sum_v, _scattered(case.value, ids, dv, None))


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
    """Small integers: every product and sum is exact, so the order is known, ties included."""
    keys = case.key.shape[0]
    values = [1 + (key > 0) if keys == 3 else key * key % 7 for key in range(keys)]
    q = torch.zeros_like(case.query)
    q[:, :, 0] = 1
    k = torch.zeros_like(case.key)
    k[:, 0] = torch.tensor(values, dtype=k.dtype, device=k.device)
    width = case.indices.shape[1]
    ids, length = function(
        q,
        k,
        torch.ones_like(case.weights),
        case.starts,
        case.ends,
        rows=case.rows,
        topk=width,
        use_relu=case.use_relu,
        options=case.options,
    )
    bounds = zip(case.starts.tolist(), case.ends.tolist(), strict=True)
    for row, (start, end) in enumerate(bounds):
        wanted = sorted(range(start, end), key=lambda key: (-values[key], key))[:width]
        chosen, count = ids[row].tolist(), len(wanted)
        if int(length[row]) != count or any(slot != -1 for slot in chosen[count:]):
            raise SelfTestError(f"selection of row {row}: expected {count} ids and then -1, got {chosen}")
        if set(chosen[:count]) != set(wanted):
            raise SelfTestError(
                f"selection of row {row}: expected {sorted(wanted)}, got {sorted(chosen[:count])}"
            )
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
    dk = torch.zeros(case.key.shape, dtype=wide, device=case.key.device)
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
    case.compare("k gradient", dk, _scattered(case.key, ids, per_slot, None))


_CHECKS: Final[dict[Stage, Callable[[Callable[..., Any], Case], None]]] = {
    "indexer_topk": _selection,
    "indexer_target": _target,
    "indexer_loss": _loss,
    "attention_forward": _forward,
    "attention_backward": _backward,
    "gqa_forward": _forward,
    "gqa_backward": _backward,
}
