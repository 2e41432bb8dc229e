"""The adapters over a frontend with the real one's signatures and misbehaviours: every claim of the contract."""

from __future__ import annotations

import dataclasses

import fake_frontend
import pytest
import torch

from dsa_backends.cudnn_dsa.spec import SPEC
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
        # The CPU has no slow path of its own here: the fake runs anywhere.
        capability = dataclasses.replace(spec.capability, devices=None)
        subject = Subject(SPEC.name, stage, capability, function_of(stage), CPU)
        found = selection_checks(subject) if stage == "indexer_topk" else softmax_checks(subject)
        for name, check in found:
            if name == "many rows on one key":
                # Summed inside the kernel: the fake would only be measuring itself, for minutes.
                continue
            yield pytest.param(check, id=f"{stage}-{name}".replace(" ", "_"))


@pytest.mark.parametrize("check", list(checks()))
def test_the_contract_holds_over_a_frontend_that_misbehaves_as_the_real_one(check):
    with fake_frontend.installed():
        try:
            check()
        except NotHere as reason:
            pytest.skip(str(reason))


SLOTS = [
    case
    for case in checks()
    if case.id.startswith("attention_backward-")
    and any(word in case.id for word in ("length", "holes", "outside"))
]


@pytest.mark.parametrize("check", SLOTS)
def test_ids_past_a_length_reach_the_backward_of_hopper_as_they_are(check):
    with fake_frontend.installed(hopper=True):
        check()


@pytest.mark.parametrize("stage", list(SPEC.stages))
def test_the_self_test_passes_over_the_fake(stage):
    with fake_frontend.installed():
        selftest.reason_left_out(function_of(stage), SPEC.stages[stage].capability, stage, CPU)
