"""What ``tilelang`` can do, as data. TileLang and the kernels are imported at first use, not here."""

from __future__ import annotations

import dataclasses
from typing import Final

from dsa_backends.tilelang_kernels.scratch import backward_rows, loss_rows, topk_rows
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

TILELANG: Final = Requirement(
    "tilelang",
    "tilelang",
    ">=0.1.11,<0.1.16",
    "pip install 'tilelang>=0.1.11,<0.1.16'. 0.1.9 and 0.1.10 merge shared memory that is in use (NaN gradients); "
    "older releases lack the warp-group products; newer ones have not been tried.",
)
HOPPER: Final[tuple[CapabilityRange, ...]] = (((9, 0), (9, 1)),)
PORTABLE: Final[tuple[CapabilityRange, ...]] = (((8, 0), (9, 1)), ((10, 0), (11, 0)), ((12, 0), (13, 0)))
SCORE_ERROR: Final = 2.0**-15
"""Relative to the sum of |w q k|: 128 products in 8 steps of a tensor core, which truncates to about 22 bits, the
weighting, and a sum of 64 heads in fp32 stay below (8 * 2**-22 + 66 * 2**-24)."""

SHARED_FORWARD: Final = 94_464
"""Bytes of the smallest form of the forward: 16 heads, two tiles of 32 keys, P. On 9.0 the kernels take up to 231,936,
which every device of that compute capability has."""
SHARED_HOPPER: Final = 231_936
SHARED_SCORES: Final = 140_000
SHARED_LOSS: Final = 61_440


def _topk_scratch(call: CallSpec) -> Scratch:
    return Scratch(topk_rows(call.keys, call.index_heads))


def _backward_scratch(call: CallSpec) -> Scratch:
    return Scratch(backward_rows(call.heads, call.width))


def _loss_scratch(call: CallSpec) -> Scratch:
    return Scratch(loss_rows(call.width, call.index_heads))


_ANY: Final = Capability(
    devices=frozenset({"cuda"}),
    compute_capabilities=PORTABLE,
    dtypes=frozenset({"bfloat16", "float16"}),
    layouts=frozenset({"bshd", "thd"}),
    context_parallel=frozenset({"none", "contiguous", "zigzag"}),
    index_form="any",
    capture_safe=True,
    score_error=SCORE_ERROR,
    verified="benchmarks/tilelang/2026-12-01-h200.json",
)
_ATTENTION: Final = dataclasses.replace(_ANY, channels=Channels(pairs=((512, 512), (576, 512)), pad=True))
_INDEXER: Final = dataclasses.replace(
    _ANY, heads=Heads(maximum=64), channels=Channels(pairs=((64, 0), (128, 0)), pad=True)
)
_HERE: Final = "dsa_backends.tilelang_kernels"
_PROVIDER: Final = f"{_HERE}.compiler:provider"

SPEC: Final = BackendSpec(
    name="tilelang",
    rank=15,
    packages=(TILELANG,),
    doc="Kernels of our own in TileLang: any head count and index width, holes anywhere; warp-specialised on Hopper. A "
    "kernel is compiled at first use (about 10 to 25 s) and kept on disk.",
    stages={
        "indexer_topk": StageSpec(
            dataclasses.replace(
                _INDEXER,
                width=IndexWidth(),
                relu=frozenset({True, False}),
                weights_dtypes=frozenset({"bfloat16", "float16", "float32"}),
                deterministic=True,
                tie_rule="lower_index",
                shared_memory=SHARED_SCORES,
                scratch=_topk_scratch,
            ),
            f"{_HERE}.indexer_topk:indexer_topk",
            provider=_PROVIDER,
        ),
        "indexer_loss": StageSpec(
            dataclasses.replace(
                _INDEXER,
                compute_capabilities=HOPPER,
                dtypes=frozenset({"bfloat16"}),
                weights_dtypes=frozenset({"bfloat16", "float16", "float32"}),
                losses=frozenset({"sparse"}),
                shared_memory=SHARED_LOSS,
                scratch=_loss_scratch,
            ),
            f"{_HERE}.indexer_loss:indexer_loss",
            provider=_PROVIDER,
        ),
        "attention_forward": StageSpec(
            dataclasses.replace(_ATTENTION, deterministic=True, shared_memory=SHARED_FORWARD),
            f"{_HERE}.attention_forward:attention_forward",
            provider=_PROVIDER,
        ),
        "attention_backward": StageSpec(
            dataclasses.replace(
                _ATTENTION,
                compute_capabilities=HOPPER,
                # dS is stored in 16 bits; in fp16 the small entries of sharp rows lose too many of them.
                dtypes=frozenset({"bfloat16"}),
                shared_memory=SHARED_HOPPER,
                scratch=_backward_scratch,
            ),
            f"{_HERE}.attention_backward:attention_backward",
            provider=_PROVIDER,
        ),
    },
)


@hookimpl
def dsa_dispatch_backends() -> list[BackendSpec]:
    return [SPEC]
