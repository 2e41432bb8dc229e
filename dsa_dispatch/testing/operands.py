"""Operands of one call of a stage, the call itself, and what it must give."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from dsa_dispatch._call import Bounds, RowLayout, StageOptions
from dsa_dispatch._capability import Capability
from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._dispatch.check import INDEXED_STAGES
from dsa_dispatch._stages import Stage
from dsa_dispatch.testing import formulas
from dsa_dispatch.testing.extent import FULL, Extent
from dsa_dispatch.testing.guards import Guarded, between_nan, guard
from dsa_dispatch.testing.sizes import (
    Sizes,
    coarsest_dtype,
    is_grouped,
    native_sizes,
    plainest,
    preferred_dtype,
)


def scale_for(channels: int) -> float:
    """Scores spread alike at every width, a little over 1; never ``channels ** -0.5``, which a kernel might assume."""
    return 0.3 * math.sqrt(32 / channels)


_POSITIONAL: Final[dict[Stage, tuple[str, ...]]] = {
    "indexer_topk": ("q", "k", "w", "starts", "ends"),
    "indexer_target": ("q", "k"),
    "indexer_loss": ("q", "k", "w"),
    "attention_forward": ("q", "k", "indices", "length"),
    "attention_backward": ("q", "k", "indices", "length", "out", "lse", "dout"),
    "gqa_forward": ("q", "k", "v", "indices", "length"),
    "gqa_backward": ("q", "k", "v", "indices", "length", "out", "lse", "dout"),
}
_KEYWORDS: Final[dict[Stage, tuple[str, ...]]] = {
    "indexer_target": ("indices", "length", "starts", "ends", "lse"),
    "indexer_loss": ("indices", "length", "starts", "ends", "mass"),
}
_HOST: Final[dict[Stage, tuple[str, ...]]] = {
    "indexer_topk": ("topk", "use_relu"),
    "indexer_target": ("scale",),
    "indexer_loss": ("use_relu", "need_dq", "need_dw"),
    "attention_forward": ("scale", "v_channels"),
    "attention_backward": ("scale", "v_channels", "need_dq"),
    "gqa_forward": ("scale",),
    "gqa_backward": ("scale", "need_dq"),
}
ACCUMULATORS: Final[dict[Stage, dict[str, str]]] = {
    "indexer_loss": {"dk": "k"},
    "attention_backward": {"dkv": "k"},
    "gqa_backward": {"dk": "k", "dv": "v"},
}
"""Gradients that are added into a buffer of the core, and the tensor whose shape they have."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One stage of one backend on one device."""

    backend: str
    stage: Stage
    capability: Capability
    function: Callable[..., Any]
    device: torch.device
    extent: Extent = FULL
    in_dtype: str = ""
    """The type of its calls; "" is the one in which faults show most sharply."""
    deterministic: bool = False
    """Whether its calls ask for equal bits."""
    of_sizes: Sizes | None = None
    """The sizes of a plain call, where a rule declines the smallest that the other fields declare."""

    @property
    def dtype(self) -> str:
        return self.in_dtype or preferred_dtype(self.capability)

    @property
    def sizes(self) -> Sizes:
        return self.of_sizes or native_sizes(self.capability, self.stage, self.extent)

    def in_types(self) -> tuple[Subject, ...]:
        """The same in every declared type, the one in which faults show most sharply first."""
        first = preferred_dtype(self.capability)
        names = [first, *sorted(self.capability.dtypes - {first})]
        return tuple(dataclasses.replace(self, in_dtype=name) for name in names)

    def sharp_and_coarse(self) -> tuple[Subject, ...]:
        """The same in two types, for what is too slow in each: a coarse type often has a path of its own."""
        names = dict.fromkeys((preferred_dtype(self.capability), coarsest_dtype(self.capability)))
        return tuple(dataclasses.replace(self, in_dtype=name) for name in names)


@dataclass(frozen=True, slots=True)
class Operands:
    """``given`` is what the stage is handed; ``ids`` is which key each slot names, -1 for none (global, int64).

    Keys of all attention stages are called ``k``; an absorbed value is a prefix of them. ``plain`` are the operands
    without the poison that ``given`` may hold.
    """

    stage: Stage
    sizes: Sizes
    dtype: str
    given: dict[str, Tensor | None]
    plain: dict[str, Tensor]
    ids: Tensor
    rows: RowLayout
    host: dict[str, Any]
    options: StageOptions = field(default_factory=StageOptions)
    accumulators: dict[str, Guarded | None] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    """What the accumulators held before the call."""
    gradient_error: float = 0.0
    """What the capability declares."""

    def call(self, function: Callable[..., Any]) -> dict[str, Tensor]:
        """Run the stage as the core does, and name its results. Accumulators are reported less what they held."""
        names = _POSITIONAL[self.stage]
        keywords = {name: self.given[name] for name in _KEYWORDS.get(self.stage, ())}
        keywords |= {name: self.host[name] for name in _HOST[self.stage]}
        sums = {name: None if made is None else made.tensor for name, made in self.accumulators.items()}
        device = self.plain["q"].device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            got = function(
                *[self.given[name] for name in names],
                **keywords,
                **sums,
                rows=self.rows,
                options=self.options,
            )
        results = self._named(got)
        for name, made in self.accumulators.items():
            if made is not None:
                results[name] = made.tensor - self.before[name]
        return results

    def _named(self, got: Any) -> dict[str, Tensor]:
        if self.stage == "indexer_topk":
            return {"indices": got[0], "length": got[1]}
        if self.stage == "indexer_target":
            return {"mass": got}
        if self.stage == "indexer_loss":
            found = {"kl": got.kl, "dq": got.dq, "dw": got.dw}
            return {name: tensor for name, tensor in found.items() if tensor is not None}
        if self.stage.endswith("forward"):
            return {"out": got[0], "lse": got[1]}
        return {} if got is None else {"dq": got}

    def exact(self, ids: Tensor | None = None) -> dict[str, Tensor]:
        """The results in fp64, all gradients among them. ``ids`` stand for those of a backend with a fault."""
        return exact_results(self.stage, self.plain, self.ids if ids is None else ids, self.host)

    def rows_of(self, first: int, last: int) -> Operands:
        """The same operands for a chunk of rows; accumulators are shared, as the core shares them."""
        per_row = ("q", "w", "indices", "length", "starts", "ends", "out", "lse", "dout", "mass")
        part = slice(first, last)
        given = {
            name: tensor[part] if name in per_row and tensor is not None else tensor
            for name, tensor in self.given.items()
        }
        plain = {name: tensor[part] if name in per_row else tensor for name, tensor in self.plain.items()}
        rows = self.rows.at(self.rows.first_row + first)
        return dataclasses.replace(self, given=given, plain=plain, ids=self.ids[part], rows=rows)


def exact_results(
    stage: Stage, plain: Mapping[str, Tensor], ids: Tensor, host: Mapping[str, Any]
) -> dict[str, Tensor]:
    names = ("q", "k", "v", "w")
    wide = {name: plain[name].detach().to("cpu", torch.float64).clone() for name in names if name in plain}
    q, k = wide["q"].requires_grad_(), wide["k"].requires_grad_()
    if stage == "indexer_target":
        return {"mass": formulas.teacher_mass(q, k, ids, host["scale"]).detach()}
    if stage == "indexer_loss":
        w, mass = wide["w"].requires_grad_(), plain["mass"].to("cpu", torch.float64)
        kl = formulas.divergence(q, k, w, ids, mass, host["use_relu"])
        dq, dk, dw = torch.autograd.grad(kl.sum(), (q, k, w))
        return {"kl": kl.detach(), "dq": dq, "dw": dw, "dk": dk}
    if is_grouped(stage):
        v = wide["v"].requires_grad_()
        out, lse = formulas.attention(q, k, v, ids, host["scale"])
        inputs = {"dq": q, "dk": k, "dv": v}
    else:
        out, lse = formulas.attention(q, k[:, None], k[:, None, : host["v_channels"]], ids, host["scale"])
        inputs = {"dq": q, "dkv": k}
    if stage.endswith("forward"):
        return {"out": out.detach(), "lse": lse.detach()}
    dout = plain["dout"].to("cpu", torch.float64)
    return dict(zip(inputs, torch.autograd.grad(out, tuple(inputs.values()), dout), strict=True))


@dataclass(frozen=True, slots=True)
class Ids:
    """Slots as a caller may write them, ``[T, W]`` int64 global, and how many count, ``[T]``."""

    slots: Tensor
    length: Tensor

    def named(self, keys: int) -> Tensor:
        """-1 in every slot that is no key."""
        width = self.slots.shape[1]
        valid = (self.slots >= 0) & (self.slots < keys) & (torch.arange(width) < self.length[:, None])
        return torch.where(valid, self.slots, -1)


def clean_ids(sizes: Sizes, generator: torch.Generator) -> Ids:
    """Distinct keys of the row's own batch item; nothing after them where there are fewer keys than slots."""
    width, count = sizes.width, min(sizes.width, sizes.keys)
    slots = torch.full((sizes.batch * sizes.rows, width), -1)
    for row in range(len(slots)):
        first = row // sizes.rows * sizes.keys
        slots[row, :count] = first + torch.randperm(sizes.keys, generator=generator)[:count]
    return Ids(slots, torch.full((len(slots),), count))


def given_ids(ids: Ids, keys: int, form: str) -> tuple[Tensor, Tensor]:
    """The slots in the form the core hands to a backend that declares ``form``."""
    if form == "any":
        return ids.slots.to(torch.int32), ids.length.to(torch.int32)
    if form == "holes":
        inside = (ids.slots >= 0) & (ids.slots < keys)
        return torch.where(inside, ids.slots, -1).to(torch.int32), ids.length.to(torch.int32)
    named = ids.named(keys)
    order = (named < 0).to(torch.uint8).argsort(dim=1, stable=True)
    return named.gather(1, order).to(torch.int32), (named >= 0).sum(1).to(torch.int32)


def make(
    subject: Subject,
    *,
    ids: Callable[[Sizes, torch.Generator], Ids] = clean_ids,
    dtype: str | None = None,
    sizes: Sizes | None = None,
    sparse: bool | None = None,
    bounds: Bounds | None = None,
    amplify: float = 1.0,
    poison: bool = False,
    deterministic: bool | None = None,
    need: Mapping[str, bool] | None = None,
    adjust: Callable[[dict[str, Tensor]], None] | None = None,
    seed: int = 11,
    **host: Any,
) -> Operands:
    """Random operands for a stage, the same on every machine.

    ``poison`` fills keys that no slot names with NaN; the keys always lie between rows of NaN. ``amplify`` multiplies
    the queries. ``need`` says, by the gradient's name, which are not needed. ``adjust`` may change the drawn operands
    before anything is derived from them.
    """
    stage, capability, device = subject.stage, subject.capability, subject.device
    sizes = sizes or subject.sizes
    dtype = dtype or subject.dtype
    generator = torch.Generator().manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)
    wide = accumulation_dtype(kind)
    total, keys = sizes.batch * sizes.rows, sizes.batch * sizes.keys

    def draw(*shape: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * factor).to(kind)

    grouped = is_grouped(stage)
    plain = {"q": draw(total, sizes.heads, sizes.qk, factor=amplify)}
    plain["k"] = draw(keys, sizes.kv_heads, sizes.qk) if grouped else draw(keys, sizes.qk)
    if grouped:
        plain["v"] = draw(keys, sizes.kv_heads, sizes.v)
    wanted = ids(sizes, generator)
    indexed = stage in INDEXED_STAGES
    bounds = bounds or ("ranges" if indexed or "ranges" in capability.bounds else "causal")
    starts, ends = row_bounds(sizes, generator, bounds)
    loss_stage = stage in ("indexer_target", "indexer_loss")
    dense = loss_stage and not ("sparse" in capability.losses if sparse is None else sparse)
    if loss_stage and not dense:
        # What was selected lies inside the row's range.
        starts, ends, wanted = _selected_from(sizes, wanted, bounds)
    named = wanted.named(keys)
    if dense:
        columns = torch.arange(sizes.keys) + torch.arange(total)[:, None] // sizes.rows * sizes.keys
        named = torch.where((columns >= starts[:, None]) & (columns < ends[:, None]), columns, -1)
    form = "any" if stage == "indexer_topk" else capability.index_form
    slots, length = given_ids(wanted, keys, form)
    if form == "prefix" and not dense:
        named = Ids(slots.long(), length.long()).named(keys)
    if stage in ("indexer_topk", "indexer_loss"):
        plain["w"] = torch.randn(total, sizes.heads, generator=generator).to(
            _weights_dtype(capability, dtype)
        )
    plain["mass"] = (torch.rand(named.shape, generator=generator).double() * (named >= 0)).to(wide)
    if adjust is not None:
        adjust(plain)
    used: dict[str, Any] = {
        "scale": scale_for(sizes.qk),
        "v_channels": sizes.v,
        "topk": sizes.width,
        "use_relu": True in capability.relu,
        "need_dq": (need or {}).get("dq", True),
        "need_dw": (need or {}).get("dw", True),
        **host,
    }
    if stage.endswith("backward"):
        forward: Stage = "gqa_forward" if grouped else "attention_forward"
        plain["dout"] = draw(total, sizes.heads, sizes.v)
        for name, tensor in exact_results(forward, plain, named, used).items():
            plain[name] = tensor.to(kind if name == "out" else wide)
    # Copies: what a backend does to its inputs must not reach the operands that it is judged by.
    given: dict[str, Tensor | None] = {name: tensor.to(device, copy=True) for name, tensor in plain.items()}
    given |= {
        "starts": starts.to(device, torch.int32),
        "ends": ends.to(device, torch.int32),
        "lse": given.get("lse"),
    }
    given |= (
        dict.fromkeys(("indices", "length"))
        if dense
        else {"indices": slots.to(device, copy=True), "length": length.to(device, copy=True)}
    )
    for name in ("k", "v"):
        if name in plain:
            tensor = plain[name].clone()
            if poison:
                unnamed = torch.ones(keys, dtype=torch.bool)
                unnamed[named[named >= 0]] = False
                tensor[unnamed] = torch.nan
            given[name] = between_nan(tensor.to(device))
    accumulators: dict[str, Guarded | None] = {}
    before = {}
    for name, source in ACCUMULATORS.get(stage, {}).items():
        if (need or {}).get(name, True):
            # Multiples of 1/8, so that taking them off again loses nothing the tolerance would notice.
            held = torch.randint(-8, 9, plain[source].shape, generator=generator).to(device, wide) / 8
            accumulators[name], before[name] = guard(held), held
        else:
            accumulators[name] = None
    return Operands(
        stage=stage,
        sizes=sizes,
        dtype=dtype,
        given=given,
        plain={name: tensor.to(device) for name, tensor in plain.items()},
        ids=named,
        rows=RowLayout(
            batch=sizes.batch,
            rows=sizes.rows,
            keys=sizes.keys,
            bounds=bounds,
            layout="bshd" if indexed or "bshd" in capability.layouts else "thd",
            context_parallel="none" if indexed else plainest(capability.context_parallel),
        ),
        host=used,
        options=StageOptions(deterministic=subject.deterministic if deterministic is None else deterministic),
        accumulators=accumulators,
        before=before,
        gradient_error=capability.gradient_error,
    )


def _weights_dtype(capability: Capability, dtype: str) -> torch.dtype:
    name = dtype if dtype in capability.weights_dtypes else sorted(capability.weights_dtypes)[0]
    kind: torch.dtype = getattr(torch, name)
    return kind


def row_bounds(sizes: Sizes, generator: torch.Generator, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Ranges of global ids, each inside its row's batch item. Causal ones follow from the sizes; of the others the last
    row of every item has no key."""
    total = sizes.batch * sizes.rows
    row = torch.arange(total)
    first = row // sizes.rows * sizes.keys
    if bounds == "causal":
        return first, first + (sizes.keys - sizes.rows + row % sizes.rows + 1).clamp(min=0)
    starts = torch.randint(0, max(sizes.keys // 3, 1), (total,), generator=generator)
    ends = sizes.keys - torch.randint(0, max(sizes.keys // 3, 1), (total,), generator=generator)
    if sizes.rows > 1:
        ends[sizes.rows - 1 :: sizes.rows] = starts[sizes.rows - 1 :: sizes.rows]
    return first + starts, first + torch.maximum(ends, starts)


def _selected_from(sizes: Sizes, ids: Ids, bounds: Bounds) -> tuple[Tensor, Tensor, Ids]:
    """Bounds that hold the ids of a sparse loss: whole batch items, or causal ones and no id beyond them."""
    starts, ends = row_bounds(sizes, torch.Generator(), "causal")
    if bounds == "ranges":
        return starts, starts + sizes.keys, ids
    inside = (ids.slots >= 0) & (ids.slots < sizes.batch * sizes.keys)
    beyond = inside & (ids.slots >= ends[:, None])
    return starts, ends, Ids(torch.where(beyond, -1, ids.slots), ids.length)
