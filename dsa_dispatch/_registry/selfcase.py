"""The operands of a self-test: the smallest shapes a capability declares, with what published kernels got wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from dsa_dispatch._call import RowLayout, StageOptions
from dsa_dispatch._capability import Capability
from dsa_dispatch._stages import Stage

FLOATS: Final = ("float32", "float64", "float16", "bfloat16")
"""In the order in which the CPU prefers them."""
SLOTS: Final = (((0, 2), 1), ((1, 1), 2), ((-1, 1), 2), ((-1, -1), 2), ((2, 1), 2))
"""Ids and length of a row: row 0 ends before a valid id, rows 1 and 2 share key 1 (row 1 twice, row 2 after a hole),
row 3 is empty, and row 4 has two keys to tell apart: every other row's gradient of the query is 0."""


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
    lower_index: bool
    """Ties go to the lower index."""
    max_keys: int | None = None
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


def smallest(what: str, allowed: Callable[[int], bool], at_least: int = 1) -> int:
    """The smallest size, of ``at_least`` where there is one, that a capability runs as it is: a self-test is not
    legalized."""
    for size in range(at_least, 1 << 16):
        if allowed(size):
            return size
    for size in range(at_least - 1, 0, -1):
        # A kernel that stops short of it is tested at its largest.
        if allowed(size):
            return size
    raise SelfTestError(f"the capability admits no {what}")


def make_case(
    capability: Capability, stage: Stage, device: torch.device, dtype_name: str, large: bool
) -> Case:
    dtype: torch.dtype = getattr(torch, dtype_name)
    grouped = stage in ("gqa_forward", "gqa_backward")
    kv_heads = smallest("count of key heads", capability.kv_heads.runs) if grouped else 1
    heads = smallest("count of heads", lambda count: capability.heads.runs(count) and count % kv_heads == 0)
    channels, v_channels = _channels(capability)
    rows, keys = (48, 96) if large else (len(SLOTS), 3)
    rows, keys = min(rows, capability.max_rows or rows), min(keys, capability.max_keys or keys)
    width = smallest("index width", lambda size: capability.width.fit(size) == size, 24 if large else 2)
    generator = torch.Generator().manual_seed(2051)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    weights_dtype = dtype_name
    if dtype_name not in capability.weights_dtypes:
        weights_dtype = next(name for name in FLOATS if name in capability.weights_dtypes)
    ids, length = _ids(rows, keys, width, capability.index_form == "prefix", generator)
    key = draw(keys, kv_heads, channels) if grouped else draw(keys, channels)
    layout = RowLayout(
        batch=1,
        rows=rows,
        keys=keys,
        bounds="ranges" if "ranges" in capability.bounds else "causal",
        layout="bshd" if "bshd" in capability.layouts else "thd",
        cu_seqlens=None if "bshd" in capability.layouts else (0, rows),
    )
    starts, ends = row_bounds(layout, generator if large else None)
    return Case(
        query=draw(rows, heads, channels),
        key=key,
        value=draw(keys, kv_heads, v_channels) if grouped else key[:, :v_channels],
        weights=draw(rows, heads, dtype=getattr(torch, weights_dtype)),
        indices=ids.to(device),
        length=length.to(device),
        starts=starts.to(device, torch.int32),
        ends=ends.to(device, torch.int32),
        rows=layout,
        options=StageOptions(deterministic=False),
        v_channels=v_channels,
        use_relu=True in capability.relu,
        sparse="sparse" in capability.losses,
        lower_index=capability.tie_rule == "lower_index",
        max_keys=capability.max_keys,
    )


def _channels(capability: Capability) -> tuple[int, int]:
    if capability.channels.pairs is not None:
        channels, v_channels = capability.channels.pairs[0]
        return channels, v_channels or channels
    step, most = capability.channels.multiple_of, capability.channels.maximum
    channels = -(-32 // step) * step
    if most is not None and channels > most:
        channels = most // step * step
    return channels, min(16, channels)


def row_bounds(layout: RowLayout, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """``starts`` and ``ends`` of the rows: what "causal" promises, or ranges of which one at least is empty."""
    rows, keys = layout.rows, layout.keys
    if layout.bounds == "causal":
        return torch.zeros(rows, dtype=torch.int64), (torch.arange(rows) + keys - rows + 1).clamp(min=0)
    if generator is None:
        starts, ends = torch.tensor([0, 0, 1, 2, 0]), torch.tensor([1, keys, keys, 2, 2])
        return starts[:rows].clamp(max=keys), ends[:rows].clamp(max=keys)
    half = max(keys // 2, 1)
    starts = torch.randint(0, half, (rows,), generator=generator)
    return starts, starts + torch.randint(0, half, (rows,), generator=generator)


def _ids(rows: int, keys: int, width: int, prefix: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids with holes, duplicates, an empty row and ids past the length. A kernel that needs a prefix is handed one, as
    the core would."""
    slots = [(list(row), count) for row, count in SLOTS]
    if rows > len(SLOTS):
        drawn = torch.randint(-1, keys, (rows, min(width, keys)), generator=generator)
        drawn[:: rows // 4] = -1
        counts = torch.randint(0, drawn.shape[1] + 1, (rows,), generator=generator)
        slots = list(zip(drawn.tolist(), counts.tolist(), strict=True))
    ids = torch.full((rows, width), -1, dtype=torch.int32)
    length = torch.zeros(rows, dtype=torch.int32)
    for row, (values, count) in enumerate(slots[:rows]):
        # Narrow kernels see the first slots, and few keys are named more than once.
        fitting = [value if value < 0 else value % keys for value in values[:width]]
        kept = [value for value in fitting[:count] if value >= 0] if prefix else fitting
        ids[row, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        length[row] = len(kept) if prefix else min(count, width)
    return ids, length
