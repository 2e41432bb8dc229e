"""What ``flashmla`` can do, as data. Whichever provider is installed is found at first use, not here."""

from __future__ import annotations

from typing import Final

import torch

from dsa_backends.flash_mla.messages import install_hint
from dsa_dispatch._backend import BackendSpec, StageSpec
from dsa_dispatch._call import CallSpec
from dsa_dispatch._capability import (
    AnyOf,
    Capability,
    CapabilityRange,
    Channels,
    Heads,
    IndexWidth,
    Requirement,
    Scratch,
)
from dsa_dispatch._registry.hooks import hookimpl

COMPUTE_CAPABILITIES: Final[tuple[CapabilityRange, ...]] = (
    ((9, 0), (9, 1)),
    ((10, 0), (10, 1)),
    ((10, 3), (10, 4)),
)
"""A list, not a floor: 12.0 is a newer number and another architecture, without these instructions."""
HEAD_GROUP: Final = 128
PROVIDERS: Final = AnyOf(
    (Requirement("flash-mla", "flash_mla"), Requirement("sglang-kernel", "sgl_kernel")),
    hint=install_hint(torch.__version__),
)


def _scratch(call: CallSpec) -> Scratch:
    per_row = [
        ("ids up to the length", call.width * (4 + 1)),
        ("lse and largest score", call.heads * (4 + 4)),
    ]
    if call.heads > HEAD_GROUP:
        per_row.append(("outputs of the head groups", call.heads * (call.v_channels * 2 + 4)))
    if call.batch > 1:
        per_row.append(("query copy", min(call.heads, HEAD_GROUP) * call.qk_channels * 2))
    return Scratch(tuple(per_row), (("slots", call.width * 4),))


SPEC: Final = BackendSpec(
    name="flashmla",
    rank=60,
    families=frozenset({"cudnn"}),
    doc="FlashMLA's sparse forward for Hopper and data-centre Blackwell, from flash_mla or sglang-kernel.",
    packages=(PROVIDERS,),
    stages={
        "attention_forward": StageSpec(
            Capability(
                devices=frozenset({"cuda"}),
                compute_capabilities=COMPUTE_CAPABILITIES,
                dtypes=frozenset({"bfloat16"}),
                heads=Heads(multiple_of=64, pad=True),
                channels=Channels(pairs=((576, 512), (512, 512)), pad=True),
                width=IndexWidth(multiple_of=128, pad=True),
                layouts=frozenset({"bshd", "thd"}),
                context_parallel=frozenset({"none", "contiguous", "zigzag"}),
                index_form="any",
                deterministic=True,
                capture_safe=True,
                verified="benchmarks/vendor/h200.json",
                scratch=_scratch,
            ),
            "dsa_backends.flash_mla.attention_forward:attention_forward",
            provider="dsa_backends.flash_mla.attention_forward:provider",
        )
    },
)


@hookimpl
def dsa_dispatch_backends() -> list[BackendSpec]:
    return [SPEC]
