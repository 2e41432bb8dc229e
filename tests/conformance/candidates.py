"""A backend of one stage with at most one fault, and what the suite finds wrong with it."""

from __future__ import annotations

from conformance import faults

from dsa_dispatch import Heads
from dsa_dispatch.testing import ConformanceError, FakeBackend, conformance_checks, isolated_registry

HEADS = Heads(values=frozenset({3, 16, 32}))
KERNELS = {
    "attention_forward": faults.forward,
    "attention_backward": faults.backward,
    "indexer_topk": faults.selection,
    "indexer_target": faults.target,
    "indexer_loss": faults.loss,
    "gqa_forward": faults.grouped,
}


def failures(stage, fault, **changes):
    """Name of every failing check to its message."""
    types = frozenset({"float64", "float32", "bfloat16"})
    declared = {"dtypes": types, "heads": HEADS, "deterministic": False, "score_error": 2.0**-15, **changes}
    fake = FakeBackend("candidate", [stage], replace={stage: KERNELS[stage](fault)}, **declared)
    found = {}
    with isolated_registry(fake.spec, installed=True):
        for check in conformance_checks("candidate"):
            try:
                check.run()
            except ConformanceError as error:
                found[check.name] = str(error)
    return found


def run_check(stage, kernel, check, **declared):
    """Run the one check of that name on a backend that is ``kernel`` alone."""
    fake = FakeBackend("candidate", [stage], replace={stage: kernel}, **declared)
    with isolated_registry(fake.spec, installed=True):
        checks = {found.name: found for found in conformance_checks("candidate")}
        checks[check].run()
