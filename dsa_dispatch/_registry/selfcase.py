"""The operands of a self-test: the smallest shapes a capability declares, with what published kernels got wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import torch
from torch import Tensor

from dsa_dispatch._call import CallSpec, ContextParallel, DeviceInfo, RowLayout, StageOptions
from dsa_dispatch._capability import Capability
from dsa_dispatch._dispatch.check import GROUPED_STAGES, INDEXER_STAGES, declines
from dsa_dispatch._stages import BACKWARD_STAGES, OPERATION_OF, Stage

T = TypeVar("T")
FLOATS: Final = ("float32", "float64", "float16", "bfloat16")
"""In the order in which the CPU prefers them."""
KINDS: Final[tuple[ContextParallel, ...]] = ("none", "contiguous", "zigzag")
SEARCHED: Final = 1 << 16
"""Sizes above this are not tried."""
MOST_GATHERED: Final = 1 << 24
"""Elements of keys gathered per row and head in fp64: sizes beyond the usual ones stop here."""
SLOTS: Final = (((0, 2), 1), ((1, 1), 2), ((-1, 1), 2), ((-1, -1), 2), ((2, 1), 2))
"""Ids and length of a row: row 0 ends before a valid id, rows 1 and 2 share key 1 (row 1 twice, row 2 after a hole),
row 3 is empty, and row 4 has two keys to tell apart: every other row's gradient of the query is 0."""


class SelfTestError(Exception):
    """The stage ran and gave a wrong answer."""


class SelfTestSkipped(Exception):
    """The declaration leaves no call to test the stage with; the text says why."""


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
    errors: dict[str, float] = field(default_factory=dict)
    """What was compared, and its error relative to the norm of the exact value (at least 1), beyond what the
    rounding of the stage's operands explains."""

    def compare(self, what: str, got: Tensor, wanted: Tensor, granted: Tensor | None = None) -> None:
        """``granted`` is an error that the rounding of what the stage is given explains: it does not count."""
        got = got.detach().to("cpu", torch.float64)
        wanted = wanted.to("cpu", torch.float64)
        if got.shape != wanted.shape:
            raise SelfTestError(f"{what}: expected shape {list(wanted.shape)}, got {list(got.shape)}")
        infinite = got.isinf() | wanted.isinf()
        wrong = (got.isnan() | (infinite & (got != wanted))).nonzero()
        if len(wrong):
            entry = wrong[0].tolist()
            found, right = (float(tensor[tuple(entry)]) for tensor in (got, wanted))
            raise SelfTestError(f"{what}: {found} at {entry}, expected {right}")
        error = float((got - wanted)[~infinite].norm())
        if granted is not None:
            error = max(error - float(granted.norm()), 0.0)
        self.errors[what] = error / float(wanted[~infinite].norm().clamp(min=1.0))


@dataclass(frozen=True, slots=True)
class CaseSizes:
    """Of one call of one batch item. ``width`` is the top-k of a selection."""

    heads: int
    kv_heads: int
    channels: int
    v_channels: int
    width: int
    rows: int
    keys: int


def smallest(what: str, allowed: Callable[[int], bool], at_least: int = 1) -> int:
    """The smallest size, of ``at_least`` where there is one, that a capability runs as it is: a self-test is not
    legalized."""
    for size in range(at_least, SEARCHED):
        if allowed(size):
            return size
    for size in range(at_least - 1, 0, -1):
        # A kernel that stops short of it is tested at its largest.
        if allowed(size):
            return size
    raise SelfTestSkipped(f"the capability admits no {what}")


def accepted_call(
    capability: Capability, stage: Stage, device: torch.device, dtype: str, large: bool = False
) -> tuple[CaseSizes, CallSpec]:
    """The first call, from small sizes to larger ones, that the capability does not decline. Raises
    ``SelfTestSkipped`` where none of them is accepted."""
    # Whether the device will do was settled before.
    anywhere = replace(capability, devices=None, compute_capabilities=None, shared_memory=0)
    refused = ""
    for number, sizes in enumerate(_candidates(capability, stage, large)):
        if number and sizes.rows * sizes.width * sizes.heads * sizes.channels > MOST_GATHERED:
            continue
        call = _call_of(capability, stage, device, dtype, sizes)
        found = declines(anywhere, stage, call, DeviceInfo(type=device.type, name=str(device)))
        if not found:
            return sizes, call
        refused = refused or "; ".join(str(decline) for decline in found)
    refused = refused or "no count of heads is a multiple of a count of key heads"
    raise SelfTestSkipped(f"the declaration accepts none of the small calls that were tried: {refused}")


def _candidates(capability: Capability, stage: Stage, large: bool) -> Iterator[CaseSizes]:
    """Sizes that run without padding, the usual ones first; then others, since an ``extra_check`` or a limit of
    elements may ask for more, or for less, of anything."""

    def width_of(at_least: int) -> int:
        return smallest("index width", lambda size: capability.width.fit(size) == size, at_least)

    rows, keys = (48, 96) if large else (len(SLOTS), 3)
    for channels, v_channels in _lazily(_channels(capability)):
        for width in _lazily(width_of(count) for count in (24 if large else 2, 1, 64, 512, 2048)):
            for heads, kv_heads in _lazily(_heads(capability, stage)):
                for count, held in ((rows, keys), (1, keys), (rows, max(keys, width)), (64, 64), (128, 2048)):
                    if stage == "indexer_topk":
                        # More keys than slots, so that ties stand at the cut.
                        held = max(held, width + 3)
                    yield _within_limits(
                        capability, CaseSizes(heads, kv_heads, channels, v_channels, width, count, held)
                    )


def _lazily(values: Iterable[T]) -> Iterator[T]:
    """Each value once, in order, as late as it is wanted."""
    seen = set()
    for value in values:
        if value not in seen:
            seen.add(value)
            yield value


def _within_limits(capability: Capability, sizes: CaseSizes) -> CaseSizes:
    """The same with as few rows and keys as the declared limits ask for, at least one of each."""
    rows, keys = sizes.rows, sizes.keys
    rows, keys = min(rows, capability.max_rows or rows), min(keys, capability.max_keys or keys)
    if capability.max_elements is not None:
        widest = max(sizes.channels, sizes.v_channels)
        rows = min(rows, capability.max_elements // max(sizes.heads * widest, sizes.width))
        keys = min(keys, capability.max_elements // (sizes.kv_heads * widest))
    return replace(sizes, rows=max(rows, 1), keys=max(keys, 1))


def _heads(capability: Capability, stage: Stage) -> Iterator[tuple[int, int]]:
    """Query heads with key heads that divide them."""
    grouped = stage in GROUPED_STAGES
    key_counts = [n for n in range(1, 129) if capability.kv_heads.runs(n)] if grouped else [1]
    for least in (1, 2, 8, 16, 64, 128):
        for kv_heads in key_counts:
            count = next(
                (n for n in range(kv_heads, SEARCHED, kv_heads) if n >= least and capability.heads.runs(n)), 0
            )
            if count:
                yield count, kv_heads
    if not grouped:
        yield smallest("count of heads", capability.heads.runs), 1


def _channels(capability: Capability) -> Iterator[tuple[int, int]]:
    if capability.channels.pairs is not None:
        yield from ((channels, v or channels) for channels, v in capability.channels.pairs)
        return
    step, most = capability.channels.multiple_of, capability.channels.maximum
    for least in (32, 1, 64, 128, 512):
        channels = -(-least // step) * step
        if most is not None and channels > most:
            channels = most // step * step
        if channels:
            yield channels, min(16, channels)
            yield channels, channels


def _call_of(
    capability: Capability, stage: Stage, device: torch.device, dtype: str, sizes: CaseSizes
) -> CallSpec:
    needed = {"query", "key", "value"} if stage in GROUPED_STAGES else {"query", "key"}
    weights = dtype
    if stage in INDEXER_STAGES and dtype not in capability.weights_dtypes:
        weights = next((name for name in FLOATS if name in capability.weights_dtypes), dtype)
    return CallSpec(
        operation=OPERATION_OF[stage],
        device=device.type,
        dtype=dtype,
        rows=sizes.rows,
        keys=sizes.keys,
        width=sizes.width,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        qk_channels=sizes.channels,
        v_channels=sizes.v_channels,
        index_heads=sizes.heads,
        index_channels=sizes.channels,
        weights_dtype=weights,
        use_relu=True in capability.relu,
        sparse_loss="sparse" in capability.losses,
        bounds="ranges" if "ranges" in capability.bounds else "causal",
        layout="bshd" if "bshd" in capability.layouts else "thd",
        context_parallel=next((kind for kind in KINDS if kind in capability.context_parallel), "none"),
        needs_grad=frozenset(needed) if stage in BACKWARD_STAGES else frozenset(),
    )


def make_case(
    capability: Capability, stage: Stage, device: torch.device, dtype_name: str, large: bool
) -> Case:
    dtype: torch.dtype = getattr(torch, dtype_name)
    sizes, call = accepted_call(capability, stage, device, dtype_name, large)
    rows, keys = sizes.rows, sizes.keys
    generator = torch.Generator().manual_seed(2051)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    ids, length = _ids(rows, keys, sizes.width, capability.index_form == "prefix", generator)
    grouped = stage in GROUPED_STAGES
    key = draw(keys, sizes.kv_heads, sizes.channels) if grouped else draw(keys, sizes.channels)
    layout = RowLayout(
        batch=1,
        rows=rows,
        keys=keys,
        bounds=call.bounds,
        layout=call.layout,
        context_parallel=call.context_parallel,
        cu_seqlens=None if call.layout == "bshd" else (0, rows),
    )
    starts, ends = row_bounds(layout, generator if large else None)
    return Case(
        query=draw(rows, sizes.heads, sizes.channels),
        key=key,
        value=draw(keys, sizes.kv_heads, sizes.v_channels) if grouped else key[:, : sizes.v_channels],
        weights=draw(rows, sizes.heads, dtype=getattr(torch, call.weights_dtype)),
        indices=ids.to(device),
        length=length.to(device),
        starts=starts.to(device, torch.int32),
        ends=ends.to(device, torch.int32),
        rows=layout,
        options=StageOptions(deterministic=False),
        v_channels=sizes.v_channels,
        use_relu=call.use_relu,
        sparse=call.sparse_loss,
        lower_index=capability.tie_rule == "lower_index",
    )


def row_bounds(layout: RowLayout, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """``starts`` and ``ends`` of the rows: what "causal" promises, or ranges of which one at least is empty."""
    rows, keys = layout.rows, layout.keys
    if layout.bounds == "causal":
        return torch.zeros(rows, dtype=torch.int64), (torch.arange(rows) + keys - rows + 1).clamp(min=0)
    if generator is None:
        repeats = -(-rows // len(SLOTS))
        starts = torch.tensor([0, 0, 1, 2, 0]).repeat(repeats)
        ends = torch.tensor([1, keys, keys, 2, 2]).repeat(repeats)
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
