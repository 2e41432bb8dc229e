"""A right backend passes behind whatever it declares: limits of one, one layout alone, small tensors, few types."""

from __future__ import annotations

import pytest
import torch
from conformance import faults

from dsa_backends.torch_dense.spec import SPEC
from dsa_dispatch import Capability, Channels, Heads, IndexWidth
from dsa_dispatch._registry import selftest
from dsa_dispatch._registry.availability import resolve_reference
from dsa_dispatch._stages import STAGES
from dsa_dispatch.errors import ConfigError
from dsa_dispatch.testing import BackendConformance, FakeBackend, conformance_checks, isolated_registry
from dsa_dispatch.testing.accepted import accepted_calls

NARROW = {
    "one key": {"max_keys": 1},
    "one row": {"max_rows": 1},
    "one row, one key": {"max_rows": 1, "max_keys": 1},
    "two keys": {"max_keys": 2},
    "one row of one head": {"max_rows": 1, "heads": Heads(maximum=1)},
    "one slot": {"width": IndexWidth(maximum=1)},
    "three slots": {"width": IndexWidth(maximum=3)},
    "contiguous context parallelism": {"context_parallel": frozenset({"contiguous"})},
    "zigzag context parallelism": {"context_parallel": frozenset({"zigzag"})},
    "packed sequences": {"layouts": frozenset({"thd"})},
    "causal rows": {"bounds": frozenset({"causal"})},
    "causal rows, packed": {"bounds": frozenset({"causal"}), "layouts": frozenset({"thd"})},
    "ranges": {"bounds": frozenset({"ranges"})},
    "few elements": {"max_elements": 700},
    "dense losses": {"losses": frozenset({"dense"})},
    "a prefix of ids": {"index_form": "prefix"},
    "wide tiles": {"width": IndexWidth(multiple_of=64, pad=True), "heads": Heads(multiple_of=16, pad=True)},
    "wide channels": {"channels": Channels(pairs=((576, 512),))},
}


@pytest.mark.parametrize("narrow", NARROW)
def test_a_right_backend_passes_behind_a_narrow_declaration(narrow):
    # Two types of four: which types are declared is no part of what is narrow here.
    dtypes = frozenset({"float64", "bfloat16"})
    fake = FakeBackend("narrow", STAGES, self_test=True, dtypes=dtypes, **NARROW[narrow])
    with isolated_registry(fake.spec, installed=True):
        for check in conformance_checks("narrow", size="small"):
            check.run()


@pytest.mark.parametrize("stage", ["attention_forward", "attention_backward"])
@pytest.mark.parametrize("narrow", ["one row of one head", "one key", "wide channels"])
def test_fp64_through_exponentials_of_base_2_stays_inside_the_limits(stage, narrow):
    function = getattr(faults, stage.partition("_")[2])("", base_two=True)
    fake = FakeBackend("candidate", [stage], replace={stage: function}, deterministic=False, **NARROW[narrow])
    with isolated_registry(fake.spec, installed=True):
        for check in conformance_checks("candidate"):
            check.run()


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("narrow", ["one row, one key", "one slot", "three slots", "one row of one head"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_self_test_keeps_within_the_declared_limits(stage, narrow, large):
    capability = Capability(**NARROW[narrow])
    right = resolve_reference(SPEC.stages[stage].function)

    def limited(*args, rows, **rest):
        assert len(args[0]) <= (capability.max_rows or len(args[0]))
        assert rows.keys <= (capability.max_keys or rows.keys)
        return right(*args, rows=rows, **rest)

    errors = selftest.measure(limited, capability, stage, torch.device("cpu"), "float64", large)
    assert max(errors.values()) < selftest.TOLERANCE["float64"]


def test_a_limit_of_one_leaves_no_call_with_two_batch_items():
    labels = {case.label for case in accepted_calls(Capability(max_keys=1), "indexer_topk", "cpu")}
    assert "keys 1" in labels
    assert "batch 2" not in labels


def test_a_contiguous_layout_is_judged_and_not_asked_of_operations_that_cannot_name_it():
    only = Capability(context_parallel=frozenset({"contiguous"}))
    assert not any(case.runs for case in accepted_calls(only, "indexer_topk", "cpu"))
    assert any(case.runs for case in accepted_calls(Capability(), "indexer_topk", "cpu"))


def test_dtypes_and_size_restrict_what_is_run():
    class Tests(BackendConformance):
        backend = "torch_dense"
        dtypes = ("float32",)
        size = "small"

    with isolated_registry(installed=True):
        names = {check.name for check in Tests.checks() if check.stage == "attention_forward"}
        every = {
            check.name for check in conformance_checks("torch_dense") if check.stage == "attention_forward"
        }
    assert {"values float32", "accepts dtype float32"} <= names
    assert not [name for name in names if "float64" in name or "float16" in name]
    assert {"holes float16", "lse bfloat16", "deterministic bfloat16, holes"} <= every
    assert {"beyond a tile, width 67", "holes", "lse", "large scores"} <= names
    assert "beyond a tile, width 2051" in every - names


@pytest.mark.parametrize("wrong", [{"dtypes": ["bflot16"]}, {"size": "tiny"}])
def test_an_unknown_type_or_size_is_named(wrong, registry):
    with pytest.raises(ConfigError, match=r"bflot16|tiny"):
        conformance_checks("torch_dense", **wrong)
