"""What ``cudnn`` can do, as data. The frontend is imported at first use, not here."""

from __future__ import annotations

from typing import Final

from dsa_dispatch._backend import BackendSpec, StageSpec
from dsa_dispatch._call import CallSpec, ContextParallel
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

FRONTEND: Final = Requirement("nvidia-cudnn-frontend", "cudnn", ">=1.32,<1.34")
"""1.32 is the first with guards against ids outside the keys, empty rows and the wrong mask of few heads."""
PACKAGES: Final = (
    FRONTEND,
    Requirement(
        "nvidia-cutlass-dsl",
        "cutlass",
        ">=4.8",
        extras="cu13",
        path_hint="Its .pth file was not read: put <site-packages>/nvidia_cutlass_dsl/dsl_packages on PYTHONPATH.",
    ),
    Requirement("apache-tvm-ffi", "tvm_ffi", ">=0.1.11"),
)
COMPUTE_CAPABILITIES: Final[tuple[CapabilityRange, ...]] = (
    ((9, 0), (9, 1)),
    ((10, 0), (10, 1)),
    ((10, 3), (10, 4)),
    ((10, 7), (10, 8)),
)
"""A list, not a floor: 12.0 is a newer number and another architecture."""
HEAD_GROUP: Final = 64
MAX_KEYS: Final = (2**31 - 1) // 576
"""The scatter into the keys' gradient uses 32-bit offsets."""
SCORE_ERROR: Final = 2.0**-15
"""Relative to the sum of |w q k|: products of 128 bf16 channels summed in fp32, then 64 heads, as for torch_dense."""

GRADIENT_ERROR: Final = 0.012
"""Twice the contract's. The kernel takes ``rowsum(out * dout)`` from an output of 16 bits, whose rounding is most of
the error where scores are large: 0.0066 with activations scaled by 30 (benchmarks/vendor/h200.json)."""


def _attention_forward(call: CallSpec) -> Scratch:
    per_row = [
        ("ids up to the length", call.width * (4 + 1)),
        ("lse and largest score", call.heads * (4 + 4)),
    ]
    if call.heads > HEAD_GROUP:
        per_row.append(("outputs of the head groups", call.heads * (call.v_channels * 2 + 4)))
    if call.batch > 1:
        per_row.append(("query copy", min(call.heads, HEAD_GROUP) * call.qk_channels * 2))
    return Scratch(tuple(per_row), (("slots", call.width * 4),))


def _attention_backward(call: CallSpec) -> Scratch:
    per_row = [
        ("ids up to the length", call.width * (4 + 1)),
        ("row sums and lse", 2 * call.heads * 4),
    ]
    if call.batch > 1:
        per_row.append(
            ("copies of query, out and dout", call.heads * (call.qk_channels + 2 * call.v_channels) * 2)
        )
    keys = call.batch * call.keys
    fixed = (
        ("slots, sink and alignment", call.width * 4 + call.heads * (8 + 2 * 64 * 4) + 1024),
        ("key gradient in fp32 and in the inputs' type", (keys + 64) * call.qk_channels * (4 + 2)),
    )
    return Scratch(tuple(per_row), fixed)


def _indexer_topk(call: CallSpec) -> Scratch:
    """Scores and the selection's radix buffers; ranges also cost their mask, and the ids their clean-up."""
    scores = call.keys * 4 * (1 + 2)
    if call.bounds != "causal":
        scores += call.keys
    per_row = (("scores and selection", scores), ("ids and their clean-up", call.width * (3 * 4 + 8 + 3)))
    return Scratch(per_row, (("columns", call.keys * 4), ("alignment", 1024)))


def _indexer_loss(call: CallSpec) -> Scratch:
    heads, channels = call.index_heads, call.index_channels
    keys = call.batch * call.keys
    gradients = ("gradients in bf16 and fp32", heads * (channels + 2) * (2 + 4))
    fixed = [("key gradient in fp32", keys * channels * 4), ("alignment", 1024)]
    if call.sparse_loss:
        columns = call.width * (4 + 1 + 7 * 4)
        copies = (1 if call.weights_dtype == "bfloat16" else 3) * heads * (channels + 4) * 2
        per_row = (("ids, probabilities and terms", columns), ("q and weights copies", copies), gradients)
        return Scratch(per_row, (*fixed, ("slots", call.width * 4)))
    fixed.append(("keys without NaN", call.keys * channels * 2))
    per_row = (
        ("scores, probabilities and terms", call.keys * (7 * 4 + 2)),
        ("q and weights copies", heads * (channels + 2) * 2),
        gradients,
    )
    return Scratch(per_row, tuple(fixed))


_HERE: Final = "dsa_backends.cudnn_dsa"
_ANYWHERE: Final[frozenset[ContextParallel]] = frozenset({"none", "contiguous", "zigzag"})
_INDEXER_CHANNELS: Final = Channels(pairs=((128, 0),), pad=True)

SPEC: Final = BackendSpec(
    name="cudnn",
    # Below triton: auto does not prefer a backward with a declared error; whoever names it gets it.
    rank=10,
    packages=PACKAGES,
    doc="NVIDIA's cuDNN frontend for Hopper and data-centre Blackwell: backward, selection, loss; forward where it has "
    "one.",
    stages={
        "attention_forward": StageSpec(
            Capability(
                devices=frozenset({"cuda"}),
                compute_capabilities=COMPUTE_CAPABILITIES,
                dtypes=frozenset({"bfloat16", "float16"}),
                heads=Heads(multiple_of=HEAD_GROUP, pad=True),
                channels=Channels(pairs=((576, 512), (512, 512)), pad=True),
                width=IndexWidth(multiple_of=128, pad=True),
                layouts=frozenset({"bshd", "thd"}),
                context_parallel=_ANYWHERE,
                index_form="any",
                deterministic=True,
                capture_safe=True,
                scratch=_attention_forward,
            ),
            f"{_HERE}.attention_forward:attention_forward",
            provider=f"{_HERE}.attention_forward:provider",
        ),
        "attention_backward": StageSpec(
            Capability(
                devices=frozenset({"cuda"}),
                compute_capabilities=COMPUTE_CAPABILITIES,
                dtypes=frozenset({"bfloat16", "float16"}),
                # One head is refused, and an odd count misaligns paired fp32 loads on compute capability 10.
                heads=Heads(multiple_of=2, pad=True),
                channels=Channels(pairs=((576, 512), (512, 512)), pad=True),
                width=IndexWidth(multiple_of=128, pad=True),
                layouts=frozenset({"bshd", "thd"}),
                context_parallel=_ANYWHERE,
                index_form="any",
                capture_safe=True,
                max_keys=MAX_KEYS,
                gradient_error=GRADIENT_ERROR,
                verified="benchmarks/vendor/h200.json",
                scratch=_attention_backward,
            ),
            f"{_HERE}.attention_backward:attention_backward",
            provider=f"{_HERE}.attention_backward:provider",
        ),
        "indexer_topk": StageSpec(
            Capability(
                devices=frozenset({"cuda"}),
                compute_capabilities=COMPUTE_CAPABILITIES,
                dtypes=frozenset({"bfloat16"}),
                weights_dtypes=frozenset({"bfloat16", "float32"}),
                heads=Heads(values=frozenset({16, 32, 64}), pad=True),
                channels=_INDEXER_CHANNELS,
                width=IndexWidth(multiple_of=2, maximum=2048),
                layouts=frozenset({"bshd", "thd"}),
                context_parallel=_ANYWHERE,
                relu=frozenset({True}),
                deterministic=True,
                tie_rule="lower_index",
                capture_safe=True,
                score_error=SCORE_ERROR,
                scratch=_indexer_topk,
            ),
            f"{_HERE}.indexer_topk:indexer_topk",
            provider=f"{_HERE}.indexer_topk:provider",
        ),
        "indexer_loss": StageSpec(
            Capability(
                devices=frozenset({"cuda"}),
                compute_capabilities=COMPUTE_CAPABILITIES,
                dtypes=frozenset({"bfloat16"}),
                weights_dtypes=frozenset({"bfloat16", "float32"}),
                heads=Heads(multiple_of=HEAD_GROUP, pad=True),
                channels=_INDEXER_CHANNELS,
                width=IndexWidth(multiple_of=128, maximum=2048, pad=True),
                layouts=frozenset({"bshd", "thd"}),
                context_parallel=_ANYWHERE,
                relu=frozenset({True}),
                capture_safe=True,
                score_error=SCORE_ERROR,
                scratch=_indexer_loss,
            ),
            f"{_HERE}.indexer_loss:indexer_loss",
            provider=f"{_HERE}.indexer_loss:provider",
        ),
    },
)


@hookimpl
def dsa_dispatch_backends() -> list[BackendSpec]:
    return [SPEC]
