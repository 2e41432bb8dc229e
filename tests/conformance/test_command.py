"""``dsa-dispatch conformance NAME`` and the mixin: what passes, what fails, and what was not checked."""

from __future__ import annotations

import dataclasses
import json

import pytest
from conformance import faults
from typer.testing import CliRunner

from dsa_dispatch._cli import app
from dsa_dispatch._registry.registry import PluginFailure
from dsa_dispatch.errors import UnknownBackendError
from dsa_dispatch.testing import (
    BackendConformance,
    ConformanceError,
    FakeBackend,
    conformance_checks,
    isolated_registry,
)


def fake(fault="", **changes):
    replace = {"attention_forward": faults.forward(fault)}
    return FakeBackend("candidate", ["attention_forward"], replace=replace, deterministic=False, **changes)


def invoke(backend, *options):
    with isolated_registry(backend.spec, installed=True):
        return CliRunner().invoke(app, ["conformance", "candidate", *options])


def test_a_right_backend_ends_with_0_and_a_table():
    done = invoke(fake())
    assert done.exit_code == 0
    assert "Conformance of candidate" in done.output
    assert "attention_forward" in done.output
    assert "FAILED" not in done.output


def test_a_wrong_backend_ends_with_1_and_names_the_fault():
    done = invoke(fake("ignores topk_length"))
    assert done.exit_code == 1
    assert "BREAKS THE CONTRACT" in done.output
    assert "FAILED [length] candidate attention_forward on cpu: length: " in done.output
    assert "length is ignored" in done.output


def test_a_stage_that_cannot_run_here_is_not_passed():
    done = invoke(fake(devices=frozenset({"xpu"})))
    assert done.exit_code == 1
    assert "NOT CHECKED HERE" in done.output
    assert "needs xpu, which this machine does not have" in done.output


def test_a_failing_self_test_is_said_once_and_not_for_every_value():
    done = invoke(fake("base-2 lse", self_test=True))
    assert done.exit_code == 1
    assert done.output.count("SELF_TEST_FAILED") == 2
    assert "nor was any other declared call, so that nothing ran here" in done.output
    assert "DECLINED [accepts dtype bfloat16, dtype float16, " in done.output


def test_json_holds_every_check():
    done = invoke(fake("ignores topk_length"), "--json")
    results = {entry["check"]: entry["result"] for entry in json.loads(done.stdout)}
    assert results["length"] == "failed"
    assert results["duplicates"] == results["values float32"] == "passed"


def test_an_unknown_name_lists_the_known_ones(registry):
    done = CliRunner().invoke(app, ["conformance", "candidat"])
    assert isinstance(done.exception, UnknownBackendError)
    assert "torch_dense" in str(done.exception)


def test_the_mixin_checks_what_did_not_come_with_this_library():
    class Tests(BackendConformance):
        pass

    with isolated_registry(fake().spec, installed=True):
        assert {check.backend for check in Tests.checks()} == {"candidate"}


@pytest.mark.parametrize(("named", "words"), [("", "install the plugin"), ("candidate", "unknown backend")])
def test_a_plugin_that_is_not_installed_is_one_failing_test(named, words):
    class Tests(BackendConformance):
        backend = named

    with isolated_registry(installed=True):
        (check,) = [check for check in Tests.checks() if check.name == "is registered"]
        with pytest.raises(ConformanceError, match=words):
            check.run()


def test_a_plugin_that_failed_beside_one_that_was_found_is_a_failing_test():
    class Tests(BackendConformance):
        pass

    class Named(BackendConformance):
        backend = "candidate"

    broken = PluginFailure(
        "fastattn", "fast-attn 1.0", "import", "OSError: no driver", "Traceback: no driver"
    )
    with isolated_registry(fake().spec, installed=True) as runtime:
        runtime.update(lambda snapshot: dataclasses.replace(snapshot, failures=(broken,)))
        (check,) = [check for check in Tests.checks() if check.name == "is registered"]
        with pytest.raises(ConformanceError, match="was not registered, so it is not checked") as failed:
            check.run()
        assert {found.backend for found in Tests.checks()} == {"plugin", "candidate"}
        assert "is registered" not in {found.name for found in Named.checks()}
    assert "'fastattn' of fast-attn 1.0 failed at import: OSError: no driver" in str(failed.value)


def test_a_hyphen_for_an_underscore_is_answered_with_the_name(registry):
    done = CliRunner().invoke(app, ["conformance", "torch-dense"])
    assert "Did you mean 'torch_dense'?" in str(done.exception)


def test_one_type_given_as_text_is_that_type():
    with isolated_registry(fake().spec, installed=True):
        as_text, as_list = (
            conformance_checks("candidate", dtypes=given) for given in ("float32", ["float32"])
        )
    assert [str(check) for check in as_text] == [str(check) for check in as_list]
