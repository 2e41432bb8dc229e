"""Calls are derived from every declared value and from one step outside every boundary."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from unittest import SkipTest

import pytest

import dsa_backends
from dsa_backends.torch_dense.attention_forward import attention_forward
from dsa_dispatch import (
    Capability,
    Channels,
    Decline,
    DeclineCode,
    DeviceInfo,
    Heads,
    IndexWidth,
    Requirement,
)
from dsa_dispatch._dispatch.check import declines
from dsa_dispatch.errors import BackendDeclined
from dsa_dispatch.testing import ConformanceError, FakeBackend, conformance_checks, isolated_registry
from dsa_dispatch.testing.accepted import accepted_calls
from dsa_dispatch.testing.cases import declined_calls
from dsa_dispatch.testing.judge import DeclinedHere

SPECS = {
    module.name: importlib.import_module(f"dsa_backends.{module.name}.spec").SPEC
    for module in pkgutil.iter_modules(dsa_backends.__path__)
    if importlib.util.find_spec(f"dsa_backends.{module.name}.spec") is not None
}
HOPPER = DeviceInfo("cuda", "a Hopper GPU", (9, 0), 80 << 30, 227 << 10)


@pytest.mark.parametrize("name", SPECS)
def test_declared_data_of_our_backends_accept_and_decline_what_they_say(name):
    for stage, provided in SPECS[name].stages.items():
        capability = provided.capability
        device = HOPPER if capability.devices == {"cuda"} else DeviceInfo()
        for case in accepted_calls(capability, stage, device.type):
            assert declines(capability, stage, case.call, device) == (), (stage, case.label)
        for case in declined_calls(capability, stage, device):
            codes = [decline.code for decline in declines(capability, stage, case.call, case.device)]
            assert codes == [case.code], (stage, case.label)


NARROW = Capability(
    devices=frozenset({"cuda"}),
    compute_capabilities=(((9, 0), (10, 0)), ((10, 3), (10, 4))),
    dtypes=frozenset({"bfloat16"}),
    heads=Heads(values=frozenset({64, 128}), pad=True),
    channels=Channels(pairs=((512, 512), (576, 512))),
    width=IndexWidth(multiple_of=64, maximum=2048),
    max_rows=100,
    shared_memory=1 << 16,
)


def test_one_call_for_every_declared_value():
    labels = {case.label for case in accepted_calls(NARROW, "attention_forward", "cuda")}
    assert labels >= {
        *(
            "dtype bfloat16",
            "heads 64",
            "heads 128",
            "heads 63, padded",
            "channels 512/512",
            "channels 576/512",
        ),
        *("width 64", "width 128", "width 2048", "ids int64", "batch 2", "rows 100"),
    }


def test_one_call_a_step_outside_every_boundary_with_its_code():
    code = DeclineCode
    outside = {case.label: case.code for case in declined_calls(NARROW, "attention_forward", HOPPER)}
    assert outside == {
        "device cpu": code.DEVICE,
        "compute capability 8.9": code.COMPUTE_CAPABILITY,
        "compute capability 10.0": code.COMPUTE_CAPABILITY,
        "compute capability 10.2": code.COMPUTE_CAPABILITY,
        "compute capability 10.4": code.COMPUTE_CAPABILITY,
        **dict.fromkeys(("dtype float16", "dtype float32", "dtype float64"), code.DTYPE),
        "heads 129": code.HEADS,
        **dict.fromkeys(
            ("channels 511/512", "channels 513/512", "channels 575/512", "channels 577/512"), code.CHANNELS
        ),
        **dict.fromkeys(
            ("channels 512/511", "channels 512/513", "channels 576/511", "channels 576/513"), code.CHANNELS
        ),
        **dict.fromkeys(("width 63", "width 65", "width 2049"), code.INDEX_WIDTH),
        **dict.fromkeys(("extra explicit_values", "extra key_positions", "extra mask"), code.LAYOUT),
        "deterministic": code.DETERMINISM,
        "graph capture": code.GRAPH_CAPTURE,
        "rows 101": code.LIMIT,
        "shared memory": code.LIMIT,
    }


def test_heads_by_rule_are_tried_below_between_and_above():
    powers = Capability(heads=Heads(power_of_two=True, minimum=16, maximum=128))
    accepted = {case.label for case in accepted_calls(powers, "attention_forward", "cpu")}
    declined = {case.label for case in declined_calls(powers, "attention_forward", DeviceInfo())}
    assert accepted >= {"heads 16", "heads 32", "heads 64", "heads 128"}
    assert declined >= {"heads 15", "heads 48", "heads 129"}


def no_64(call):
    """A rule that takes back what the fields declare."""
    if call.heads == 64:
        return Decline(DeclineCode.EXTRA_CHECK, "query.heads", "64", "anything else")
    return None


def no_wide(call):
    """A rule over what a field leaves open."""
    if call.width > 64:
        return Decline(DeclineCode.EXTRA_CHECK, "width", str(call.width), "up to 64")
    return None


def test_a_declared_value_that_a_rule_takes_back_is_told_with_its_reason():
    fake = FakeBackend(
        "fickle", ["attention_forward"], heads=Heads(values=frozenset({16, 64})), extra_check=no_64
    )
    with isolated_registry(fake.spec, installed=True):
        checks = {check.name: check for check in conformance_checks("fickle")}
        checks["accepts heads 16"].run()
        with pytest.raises(DeclinedHere, match="heads 64 is declared, declined: EXTRA_CHECK"):
            checks["accepts heads 64"].run()


def test_sizes_that_a_rule_takes_back_are_not_sampled():
    narrow = FakeBackend("narrow", ["attention_forward"], extra_check=no_wide)
    with isolated_registry(narrow.spec, installed=True):
        names = {check.name for check in conformance_checks("narrow")}
    assert "beyond a tile, rows 67" in names
    assert not names & {"beyond a tile, width 67", "accepts width 67", "beyond a tile, width 2051"}


def test_a_backend_for_another_device_or_without_its_package_is_not_passed():
    elsewhere = FakeBackend("elsewhere", ["attention_forward"], devices=frozenset({"xpu"}))
    absent = FakeBackend(
        "absent", ["attention_forward"], packages=(Requirement("no-such-package", "no_such"),)
    )
    for fake, reason in ((elsewhere, "needs xpu"), (absent, "NOT_INSTALLED package no-such-package")):
        with isolated_registry(fake.spec, installed=True):
            (check,) = conformance_checks(fake.spec.name)
            with pytest.raises(SkipTest, match=reason):
                check.run()


BUSY = Decline(DeclineCode.RUNTIME, "driver", "busy", "a free one")


def test_the_call_that_is_judged_is_run_on_this_backend():
    """A backend that declines at run time would leave the reference to give the right answer."""
    fake = FakeBackend("shy", ["gqa_forward"], declines=BUSY)
    with isolated_registry(fake.spec, installed=True):
        checks = {check.name: check for check in conformance_checks("shy")}
        with pytest.raises(ConformanceError, match=r"base is declared, but was not served.*nothing ran"):
            checks["accepts base"].run()


def test_what_a_backend_declines_at_run_time_is_told_and_fails_only_where_nothing_ran():
    def picky(q, kv, indices, length, **rest):
        if q.shape[1] == 3:
            raise BackendDeclined(BUSY)
        return attention_forward(q, kv, indices, length, **rest)

    fake = FakeBackend("picky", ["attention_forward"], replace={"attention_forward": picky})
    with isolated_registry(fake.spec, installed=True):
        checks = {check.name: check for check in conformance_checks("picky")}
        checks["accepts heads 4"].run()
        for name in ("accepts base", "accepts heads 3", "accepts ids int64"):
            with pytest.raises(DeclinedHere, match="is declared, declined: RUNTIME driver: got busy"):
                checks[name].run()
        with pytest.raises(DeclinedHere, match="holes: declined: RUNTIME driver: got busy"):
            checks["holes"].run()
