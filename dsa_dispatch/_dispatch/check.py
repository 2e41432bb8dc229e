"""The one function that turns (capability, call, device) into declines, and its twin that says how to legalize.

The dispatcher, ``explain``, the matrix, the documentation and the tests all use it; nothing else rejects a call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dsa_dispatch._call import CallSpec, DeviceInfo
from dsa_dispatch._capability import Capability, Heads, IndexWidth
from dsa_dispatch._decline import Decline, DeclineCode
from dsa_dispatch._dispatch import rules
from dsa_dispatch._stages import BACKWARD_STAGES, Stage

INDEXER_STAGES: frozenset[Stage] = frozenset({"indexer_topk", "indexer_loss"})
INDEXED_STAGES: frozenset[Stage] = frozenset(
    {"attention_forward", "attention_backward", "gqa_forward", "gqa_backward"}
)
"""Stages whose ids come from the caller."""
GROUPED_STAGES: frozenset[Stage] = frozenset({"gqa_forward", "gqa_backward"})


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes of a call that one stage looks at, with the names its declines use for them."""

    heads: int
    heads_name: str
    qk_channels: int
    v_channels: int | None
    channels_name: str
    width_name: str


def shapes_of(stage: Stage, call: CallSpec) -> Shapes:
    if stage in INDEXER_STAGES:
        return Shapes(call.index_heads, "q.heads", call.index_channels, None, "q.channels", "index_topk")
    value = None if stage == "indexer_target" else call.v_channels
    channels_name = "query.channels" if value is None else "query.channels/v_channels"
    return Shapes(call.heads, "query.heads", call.qk_channels, value, channels_name, "topk_indices.width")


@dataclass(frozen=True, slots=True)
class Legalization:
    """Exact rewriting of a stage's operands: ``(found, given to the kernel)`` per size, and clean-up of ids."""

    heads: tuple[int, int]
    channels: tuple[int, int]
    width: tuple[int, int]
    sanitize: bool = False
    """Ids outside the keys become -1."""
    compact: bool = False
    """Valid ids are moved to the front of their row."""

    @property
    def pad_ratio(self) -> float:
        """How much more arithmetic the kernel does than was asked for."""
        ratio = 1.0
        for found, given in (self.heads, self.channels, self.width):
            ratio *= given / found if found else 1.0
        return ratio

    def steps(self) -> tuple[str, ...]:
        """In words, for plans and explanations."""
        padded = [
            f"{name} {found}→{given}"
            for name, (found, given) in (
                ("heads", self.heads),
                ("channels", self.channels),
                ("width", self.width),
            )
            if given != found
        ]
        if padded:
            padded[-1] += f" ({self.pad_ratio:.2f}× work)"
        if self.sanitize:
            padded.append("ids outside the keys to -1")
        if self.compact:
            padded.append("holes compacted")
        return tuple(padded)


def legalize(capability: Capability, stage: Stage, call: CallSpec) -> Legalization:
    """How the operands are rewritten for a call that ``declines`` accepts."""
    shapes = shapes_of(stage, call)
    heads = (capability.heads.fit(shapes.heads) or shapes.heads) if _may_pad_heads(stage) else shapes.heads
    channels = capability.channels.fit(shapes.qk_channels, shapes.v_channels) or shapes.qk_channels
    width = _width_rule(capability, stage).fit(call.width)
    foreign_ids = stage in INDEXED_STAGES
    return Legalization(
        heads=(shapes.heads, heads),
        channels=(shapes.qk_channels, channels),
        width=(call.width, call.width if width is None or not has_width(stage, call) else width),
        sanitize=foreign_ids and capability.index_form != "any",
        compact=foreign_ids and capability.index_form == "prefix",
    )


def kernel_call(call: CallSpec, stage: Stage, legal: Legalization) -> CallSpec:
    """The call as the kernel of a stage sees it."""
    changes: dict[str, Any] = {"width": legal.width[1]}
    if stage in INDEXER_STAGES:
        changes |= {"index_heads": legal.heads[1], "index_channels": legal.channels[1]}
    else:
        changes |= {"heads": legal.heads[1], "qk_channels": legal.channels[1]}
    if stage == "indexer_target" and call.teacher_dtype:
        changes["dtype"] = call.teacher_dtype
    return dataclasses.replace(call, **changes)


def _may_pad_heads(stage: Stage) -> bool:
    # A zero head has a uniform softmax, which would enter the teacher's mass; and a group of query heads cannot grow
    # without its key head.
    return stage != "indexer_target" and stage not in GROUPED_STAGES


def _width_rule(capability: Capability, stage: Stage) -> IndexWidth:
    """A wider selection is cut back to what was asked, which keeps the best keys only where they come first."""
    if stage == "indexer_topk" and not capability.sorted:
        return dataclasses.replace(capability.width, pad=False)
    return capability.width


def has_width(stage: Stage, call: CallSpec) -> bool:
    """Whether the stage works on selected ids; a dense loss works on all keys."""
    return call.sparse_loss or stage not in ("indexer_target", "indexer_loss")


def declines(capability: Capability, stage: Stage, call: CallSpec, device: DeviceInfo) -> tuple[Decline, ...]:
    """Every reason why this stage cannot serve the call; () when it can. Pure."""
    extra = rules.extra_decline(capability, call)
    found = (
        *_device_declines(capability, stage, call, device),
        *_shape_declines(capability, stage, call),
        *_layout_declines(capability, stage, call),
        *_promise_declines(capability, stage, call),
        *_limit_declines(capability, stage, call, device),
        *((extra,) if extra is not None else ()),
    )
    if found:
        return found
    # Only a call that is accepted so far has a form that the kernel would see.
    fault = rules.scratch_fault(capability, kernel_call(call, stage, legalize(capability, stage, call)))
    return (fault.decline,) if fault is not None else ()


def _listed(values: Iterable[object]) -> str:
    return ", ".join(sorted(str(value) for value in values)) or "none"


def _device_declines(
    capability: Capability, stage: Stage, call: CallSpec, device: DeviceInfo
) -> Iterator[Decline]:
    if capability.devices is not None and device.type not in capability.devices:
        yield Decline(DeclineCode.DEVICE, "device", device.type, _listed(capability.devices))
    elif device.type == "cuda" and capability.compute_capabilities is not None:
        have = device.compute_capability
        ranges = capability.compute_capabilities
        if have is None or not any(low <= have < high for low, high in ranges):
            found = f"{have[0]}.{have[1]} ({device.name})" if have else "unknown"
            wanted = ", ".join(f"{low[0]}.{low[1]} up to below {high[0]}.{high[1]}" for low, high in ranges)
            yield Decline(DeclineCode.COMPUTE_CAPABILITY, "device", found, wanted)
    dtype = (call.teacher_dtype or call.dtype) if stage == "indexer_target" else call.dtype
    if dtype not in capability.dtypes:
        yield Decline(
            DeclineCode.DTYPE,
            "dtype",
            dtype,
            _listed(capability.dtypes),
            f"Cast the inputs to {sorted(capability.dtypes)[0]}.",
        )


def _shape_declines(capability: Capability, stage: Stage, call: CallSpec) -> Iterator[Decline]:
    shapes = shapes_of(stage, call)
    if not _heads_fit(capability.heads, stage, shapes.heads):
        hint = "" if stage in INDEXER_STAGES else _tensor_parallel_hint(capability, stage, call)
        takes = capability.heads if _may_pad_heads(stage) else replace(capability.heads, pad=False)
        yield Decline(DeclineCode.HEADS, shapes.heads_name, str(shapes.heads), str(takes), hint)
    if stage in GROUPED_STAGES and not capability.kv_heads.runs(call.kv_heads):
        yield Decline(DeclineCode.HEADS, "key.heads", str(call.kv_heads), str(capability.kv_heads))
    if capability.channels.fit(shapes.qk_channels, shapes.v_channels) is None:
        got = str(shapes.qk_channels)
        got += f"/{shapes.v_channels}" if shapes.v_channels is not None else ""
        hint = _channels_hint(capability, stage, shapes)
        yield Decline(DeclineCode.CHANNELS, shapes.channels_name, got, str(capability.channels), hint)
    width = _width_rule(capability, stage)
    if has_width(stage, call) and width.fit(call.width) is None:
        hint = _width_hint(width, stage, call.width)
        yield Decline(DeclineCode.INDEX_WIDTH, shapes.width_name, str(call.width), str(width), hint)
    if stage in INDEXER_STAGES:
        if call.weights_dtype not in capability.weights_dtypes:
            yield Decline(
                DeclineCode.DTYPE, "weights.dtype", call.weights_dtype, _listed(capability.weights_dtypes)
            )
        if call.use_relu not in capability.relu:
            yield Decline(DeclineCode.EXTRA_CHECK, "use_relu", str(call.use_relu), _listed(capability.relu))
    if stage in ("indexer_target", "indexer_loss"):
        kind = "sparse" if call.sparse_loss else "dense"
        if kind not in capability.losses:
            yield Decline(DeclineCode.EXTRA_CHECK, "loss", kind, _listed(capability.losses))


def _heads_fit(heads: Heads, stage: Stage, count: int) -> bool:
    return heads.fit(count) is not None if _may_pad_heads(stage) else heads.runs(count)


def _tensor_parallel_hint(capability: Capability, stage: Stage, call: CallSpec) -> str:
    """The fewest ranks that split the heads into a count this stage takes; key heads split with them."""
    key_heads = call.kv_heads if stage in GROUPED_STAGES else 0
    for ranks in range(2, call.heads + 1):
        if call.heads % ranks or key_heads % ranks:
            continue
        keys_fit = not key_heads or capability.kv_heads.runs(key_heads // ranks)
        if keys_fit and _heads_fit(capability.heads, stage, call.heads // ranks):
            return f"Use tensor parallel {ranks} ({call.heads // ranks} heads a rank) or another backend."
    return "Use another backend."


def _channels_hint(capability: Capability, stage: Stage, shapes: Shapes) -> str:
    """Zero channels change no score: scale and weights are given, and an absorbed value keeps its prefix."""
    wider = replace(capability.channels, pad=True).fit(shapes.qk_channels, shapes.v_channels)
    if wider is None:
        return "Use another backend."
    both = "q and k" if stage in INDEXER_STAGES else "query and key"
    return f"Append zero channels to {both} up to {wider}, or use another backend."


def _width_hint(width: IndexWidth, stage: Stage, found: int) -> str:
    """A slot of -1 is no key, so a given selection may be widened; a wider ``index_topk`` selects more keys."""
    wider = replace(width, pad=True).fit(found)
    if wider is None:
        return "Use another backend."
    if stage in INDEXED_STAGES:
        return f"Append -1 to topk_indices up to {wider} columns, or use another backend."
    return f"Select {wider} keys a row, or use another backend."


def _layout_declines(capability: Capability, stage: Stage, call: CallSpec) -> Iterator[Decline]:
    if call.extras:
        # No stage signature carries them, so no backend can be asked: it would compute without the mask.
        yield Decline(
            DeclineCode.LAYOUT,
            "inputs",
            _listed(call.extras),
            "causal or ranged rows of absorbed keys only",
        )
    if stage in INDEXED_STAGES:
        return
    if call.layout not in capability.layouts:
        code = DeclineCode.PACKED if call.layout == "thd" else DeclineCode.LAYOUT
        yield Decline(code, "layout", call.layout, _listed(capability.layouts))
    if call.bounds not in capability.bounds:
        yield Decline(DeclineCode.LAYOUT, "bounds", call.bounds, _listed(capability.bounds))
    if call.context_parallel not in capability.context_parallel:
        yield Decline(
            DeclineCode.CONTEXT_PARALLEL,
            "context_parallel",
            call.context_parallel,
            _listed(capability.context_parallel),
        )


def _promise_declines(capability: Capability, stage: Stage, call: CallSpec) -> Iterator[Decline]:
    if call.deterministic and not capability.deterministic:
        yield Decline(
            DeclineCode.DETERMINISM, "deterministic", "True", "False", "Set deterministic=False to allow it."
        )
    if call.deterministic and stage == "indexer_topk" and capability.tie_rule != "lower_index":
        yield Decline(DeclineCode.TIE_RULE, "deterministic", "True", f"ties in {capability.tie_rule} order")
    if call.capturing and not capability.capture_safe:
        yield Decline(
            DeclineCode.GRAPH_CAPTURE,
            "CUDA graph",
            "capturing",
            "eager launches",
            "It reads device memory on the host.",
        )
    if (
        stage in BACKWARD_STAGES
        and not capability.partial_gradients
        and len(call.needs_grad) < _inputs(stage)
    ):
        yield Decline(DeclineCode.GRAD, "needs_grad", _listed(call.needs_grad), "all inputs at once")


def _inputs(stage: Stage) -> int:
    return 3 if stage == "gqa_backward" else 2


def largest_operand(stage: Stage, call: CallSpec) -> int:
    """Elements of the largest tensor that the caller hands over or gets back for a stage, before any padding."""
    rows, keys = call.batch * call.rows, call.batch * call.keys
    per_row = [call.width] if has_width(stage, call) else []
    if stage in INDEXER_STAGES:
        return max(
            rows * max(call.index_heads * call.index_channels, *per_row, 0), keys * call.index_channels
        )
    # An absorbed value is a prefix of the key; a grouped one, and with it the output, may be wider.
    channels = max(call.qk_channels, call.v_channels if stage in GROUPED_STAGES else 0)
    return max(rows * max(call.heads * channels, *per_row, 0), keys * call.kv_heads * channels)


def _limit_declines(
    capability: Capability, stage: Stage, call: CallSpec, device: DeviceInfo
) -> Iterator[Decline]:
    for name, found, limit in (
        ("rows", call.batch * call.rows, capability.max_rows),
        ("keys", call.batch * call.keys, capability.max_keys),
        ("elements", largest_operand(stage, call), capability.max_elements),
    ):
        if limit is not None and found > limit:
            yield Decline(DeclineCode.LIMIT, name, str(found), f"up to {limit}")
    if device.type == "cuda" and capability.shared_memory > device.shared_memory:
        yield Decline(
            DeclineCode.LIMIT,
            "shared memory",
            f"{device.shared_memory} bytes on {device.name}",
            f"{capability.shared_memory} bytes or more",
        )
