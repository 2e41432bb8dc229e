"""What ``triton`` can do, as data. The kernels and Triton itself are imported at first use, not here."""

from __future__ import annotations

import dataclasses
import os
from typing import Final

from dsa_backends.triton_kernels.scratch import (
    backward_rows,
    column_block,
    loss_rows,
    target_rows,
    topk_rows,
)
from dsa_dispatch._backend import BackendSpec, StageSpec
from dsa_dispatch._call import CallSpec
from dsa_dispatch._capability import (
    Capability,
    CapabilityRange,
    Channels,
    Heads,
    IndexWidth,
    Requirement,
    Scratch,
)
from dsa_dispatch._registry.hooks import hookimpl

COMPUTE_CAPABILITIES: Final[tuple[CapabilityRange, ...]] = (((8, 0), (11, 0)), ((12, 0), (13, 0)))

_INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Under Triton's interpreter the kernels run on the CPU. bf16 is wrong there without an error, so it is declined."""

_ITEM_BYTES: Final = {"float32": 4}

SCORE_ERROR: Final = 2.0**-15
"""Relative to the sum of |w q k|: 128 products in 8 steps of a tensor core, which truncates to about 22 bits, the
weighting, and a sum of 128 heads in fp32 stay below (8 * 2**-22 + 130 * 2**-24)."""

_VERSIONS: Final = ">=3.6,<3.10"
_HINT: Final = f"pip install 'triton{_VERSIONS}', or PyTorch's CUDA wheel, which brings its own."

VALUE_WIDTHS: Final = (64, 128, 256, 512)
TAIL_WIDTHS: Final = (0, 16, 32, 48, 64)
PAIRS: Final = tuple((value + tail, value) for value in VALUE_WIDTHS for tail in TAIL_WIDTHS)


def _item(call: CallSpec) -> int:
    return _ITEM_BYTES.get(call.dtype, 2)


def _dense_keys(call: CallSpec) -> int:
    return 0 if call.sparse_loss else call.keys


def _topk_scratch(call: CallSpec) -> Scratch:
    return Scratch(topk_rows(call.keys, call.width, column_block(call.keys)))


def _target_scratch(call: CallSpec) -> Scratch:
    return Scratch(target_rows(call.heads, _dense_keys(call)))


def _loss_scratch(call: CallSpec) -> Scratch:
    width = call.width if call.sparse_loss else call.keys
    return Scratch(loss_rows(width, call.index_channels, _dense_keys(call), deterministic=call.deterministic))


def _forward_scratch(call: CallSpec) -> Scratch:
    if call.deterministic:
        return Scratch()
    # Splits are made only while programs are fewer than multiprocessors (at most 160), up to three per one of them.
    block = 64 if call.heads > 32 else 32
    return Scratch(fixed=(("outputs of the splits", 3 * 160 * block * (call.v_channels + 1) * 4),))


def _backward_scratch(call: CallSpec) -> Scratch:
    return Scratch(
        backward_rows(
            call.heads,
            call.qk_channels,
            call.width,
            _item(call),
            pairs=True,
            deterministic=call.deterministic,
        )
    )


_ANY: Final = Capability(
    devices=frozenset({"cuda", "cpu"} if _INTERPRETED else {"cuda"}),
    compute_capabilities=COMPUTE_CAPABILITIES,
    dtypes=frozenset({"float16", "float32"} if _INTERPRETED else {"bfloat16", "float16", "float32"}),
    layouts=frozenset({"bshd", "thd"}),
    context_parallel=frozenset({"none", "contiguous", "zigzag"}),
    index_form="any",
    deterministic=True,
    tie_rule="lower_index",
    capture_safe=True,
    score_error=SCORE_ERROR,
    verified="benchmarks/triton/2026-12-01-h200-tests.json",
)
_ATTENTION: Final = dataclasses.replace(_ANY, channels=Channels(pairs=PAIRS, pad=True))
_INDEXER: Final = dataclasses.replace(
    _ANY, heads=Heads(maximum=128), channels=Channels(pairs=((64, 0), (128, 0)))
)
_HERE: Final = "dsa_backends.triton_kernels"

SPEC: Final = BackendSpec(
    name="triton",
    rank=20,
    packages=(Requirement("triton", "triton", _VERSIONS, _HINT),),
    doc="Portable Triton kernels: any head count and index width, holes anywhere, memory linear in the rows.",
    stages={
        "indexer_topk": StageSpec(
            dataclasses.replace(_INDEXER, width=IndexWidth(maximum=4096), scratch=_topk_scratch),
            f"{_HERE}.indexer_topk:indexer_topk",
        ),
        "indexer_target": StageSpec(
            dataclasses.replace(
                _ANY, channels=Channels(multiple_of=16, maximum=576, pad=True), scratch=_target_scratch
            ),
            f"{_HERE}.indexer_target:indexer_target",
        ),
        "indexer_loss": StageSpec(
            dataclasses.replace(_INDEXER, scratch=_loss_scratch), f"{_HERE}.indexer_loss:indexer_loss"
        ),
        "attention_forward": StageSpec(
            dataclasses.replace(_ATTENTION, scratch=_forward_scratch),
            f"{_HERE}.attention_forward:attention_forward",
        ),
        "attention_backward": StageSpec(
            dataclasses.replace(_ATTENTION, scratch=_backward_scratch),
            f"{_HERE}.attention_backward:attention_backward",
        ),
    },
)


@hookimpl
def dsa_dispatch_backends() -> list[BackendSpec]:
    return [SPEC]
