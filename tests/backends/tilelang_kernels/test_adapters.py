"""The adapters over kernels in torch: every claim of the contract."""

from __future__ import annotations

import dataclasses

import fake_kernels
import pytest
import torch

from dsa_backends.tilelang_kernels.attention_forward import forward_form
from dsa_backends.tilelang_kernels.spec import SPEC
from dsa_dispatch._registry import selftest
from dsa_dispatch._registry.availability import resolve_reference
from dsa_dispatch.testing.checks import softmax_checks
from dsa_dispatch.testing.judge import NotHere
from dsa_dispatch.testing.operands import Subject
from dsa_dispatch.testing.selection import selection_checks

CPU = torch.device("cpu")


def function_of(stage):
    return resolve_reference(SPEC.stages[stage].function)


def checks():
    for stage, spec in SPEC.stages.items():
        capability = dataclasses.replace(spec.capability, devices=None)
        subject = Subject(SPEC.name, stage, capability, function_of(stage), CPU)
        found = selection_checks(subject) if stage == "indexer_topk" else softmax_checks(subject)
        for name, check in found:
            if name == "many rows on one key":
                # Summed inside the kernel: the fake would only be measuring itself, for minutes.
                continue
            yield pytest.param(check, id=f"{stage}-{name}".replace(" ", "_"))


@pytest.mark.parametrize("check", list(checks()))
def test_the_contract_holds_over_kernels_in_torch(check):
    with fake_kernels.installed():
        try:
            check()
        except NotHere as reason:
            pytest.skip(str(reason))


@pytest.mark.parametrize("stage", list(SPEC.stages))
def test_the_self_test_passes_over_kernels_in_torch(stage):
    with fake_kernels.installed():
        selftest.reason_left_out(function_of(stage), SPEC.stages[stage].capability, stage, CPU)


@pytest.mark.parametrize(
    ("gpu", "heads", "kernel", "block"),
    [
        ((9, 0), 1, "hopper_few_forward", 16),
        ((9, 0), 16, "hopper_few_forward", 16),
        ((9, 0), 17, "hopper_forward", 64),
        ((9, 0), 128, "hopper_forward", 64),
        ((8, 0), 16, "portable_forward", 16),
        ((8, 0), 64, "portable_forward", 32),
        ((8, 9), 64, "portable_forward", 16),
        ((10, 0), 128, "portable_forward", 32),
        ((12, 0), 128, "portable_forward", 16),
    ],
)
def test_the_kernel_depends_on_architecture_and_heads_alone(gpu, heads, kernel, block):
    form = forward_form(gpu, heads, 64, "bfloat16")
    assert form.where.endswith(f":{kernel}")
    assert form.heads == block
