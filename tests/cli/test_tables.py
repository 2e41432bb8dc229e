"""``matrix``, ``list``, ``doctor``, ``fingerprint`` and ``check``: what they print, and how they end."""

from __future__ import annotations

import json

import pytest
import torch
from cli.command import invoke, status
from conformance import faults

import dsa_dispatch as dsa
from dsa_dispatch._cli.matrix import PAGE
from dsa_dispatch._registry import packages
from dsa_dispatch._stages import STAGES
from dsa_dispatch.testing import FakeBackend, isolated_registry


def test_matrix_as_text_says_how_each_backend_stands_here(registry):
    done = invoke("matrix")
    assert done.exit_code == 0
    heads = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert len(heads) == len(dsa.capability_matrix().rows)
    assert "torch_dense attention_forward: ready" in heads


def test_matrix_says_of_a_rule_that_raises_what_doctor_says():
    def no_table(call):
        raise KeyError("no table")

    odd = FakeBackend("odd", ["attention_forward"], extra_check=no_table).spec
    wrong = FakeBackend("wrong", ["attention_forward"], scratch=lambda call: None).spec
    with isolated_registry(odd, wrong):
        here = {row.backend: row.here for row in dsa.capability_matrix().rows}
    assert here["odd"] == "EXTRA_CHECK extra_check (KeyError: 'no table')"
    assert here["wrong"] == "EXTRA_CHECK scratch (returned None)"


def test_every_table_can_be_read_on_80_columns(monkeypatch):
    """Nothing is cut short: no cell ends in an ellipsis, and no line but a reason to be copied is longer."""
    monkeypatch.setenv("COLUMNS", "80")
    replace = {"attention_forward": faults.forward("ignores topk_length")}
    wrong = FakeBackend("wrong", ["attention_forward"], replace=replace, self_test=True)
    with isolated_registry(wrong.spec, installed=True):
        shown = {
            name: invoke(name, *more).stdout
            for name, more in {
                "matrix": [],
                "list": [],
                "doctor": ["--no-tracebacks"],
                "check": [],
                "conformance": ["wrong", "--size", "small"],
            }.items()
        }
    assert "teacher mass" in shown["check"]
    assert "BREAKS THE CONTRACT" in shown["conformance"]
    assert max(map(len, shown["matrix"].splitlines())) <= 80
    for name, text in shown.items():
        assert "…" not in text, name


def test_a_word_that_is_copied_is_not_cut_in_the_matrix(registry):
    lines = dsa.capability_matrix().to_text(40).splitlines()
    records = {row.verified for row in dsa.capability_matrix().rows if row.verified.startswith("benchmarks/")}
    assert records
    for record in records:
        assert any(record in line for line in lines)
    assert max(len(line) for line in lines) <= 40 + max(map(len, records))


def test_matrix_as_markdown_is_the_page(registry):
    assert invoke("matrix", "--format", "markdown").stdout == PAGE + dsa.capability_matrix().to_markdown()


def test_matrix_as_json_has_a_row_per_backend_and_stage(registry):
    rows = json.loads(invoke("matrix", "--format", "json").stdout)
    expected = {(info.name, stage) for info in dsa.list_backends() for stage in info.stages}
    assert {(row["backend"], row["stage"]) for row in rows} == expected


def test_matrix_check_tells_a_right_page_from_a_stale_one(registry, tmp_path):
    page = tmp_path / "capabilities.md"
    assert invoke("matrix", "--format", "markdown", "--output", page).exit_code == 0
    right = invoke("matrix", "--check", page)
    assert (right.exit_code, right.stdout) == (0, f"{page} is up to date\n")
    for damaged in (page.read_bytes() + b"more", b"\xff"):
        page.write_bytes(damaged)
        stale = invoke("matrix", "--check", page)
        assert (stale.exit_code, stale.stderr) == (1, f"{page} is stale: run `make docs`\n")


def test_list_shows_who_is_registered_and_what_is_missing():
    missing = FakeBackend(
        "elsewhere", packages=(dsa.Requirement("nobody-has-this", "nobody_has_this", ">=2"),)
    ).spec
    with isolated_registry(missing, installed=True):
        shown = invoke("list")
        document = json.loads(invoke("list", "--json").stdout)
    assert shown.exit_code == 0
    assert "torch_dense" in shown.stdout
    assert "presets: " in shown.stdout
    entries = {entry["name"]: entry for entry in document["backends"]}
    assert entries["torch_dense"]["installed"] is True
    assert entries["elsewhere"]["installed"] is False
    assert entries["elsewhere"]["missing"] == [
        "NOT_INSTALLED package nobody-has-this: got not installed, supports >=2."
    ]
    assert entries["elsewhere"]["install"] == ["pip install 'nobody-has-this>=2'"]
    for line in (f"elsewhere: {entries['elsewhere']['missing'][0]}", "  pip install 'nobody-has-this>=2'"):
        assert line in shown.stdout.splitlines(), "one line each, to be copied"
    assert "quickstart" in document["presets"]


def test_each_backend_of_ours_that_needs_packages_is_installed_by_a_command(monkeypatch, registry):
    monkeypatch.setattr(packages, "_found", lambda distribution, module: (False, ""))
    entries = json.loads(invoke("list", "--json").stdout)["backends"]
    absent = {entry["name"]: entry["install"] for entry in entries if not entry["installed"]}
    assert {"triton", "tilelang", "cudnn", "flashmla"} <= absent.keys()
    for name, install in absent.items():
        assert install[0].startswith("pip install "), name


def test_list_and_doctor_name_the_plugins_that_have_a_part_in_decisions(registry):
    class Both:
        @dsa.hookimpl
        def dsa_dispatch_order(self, call, candidates):
            return None

        @dsa.hookimpl
        def dsa_dispatch_on_decision(self, decision):
            pass

    title = f"{__name__}:{Both.__qualname__}"
    lines = [
        f"policy plugin {title} of this process: may reorder the backends that auto asks",
        f"observer plugin {title} of this process: is told of every new decision",
    ]
    assert json.loads(invoke("list", "--json").stdout)["plugins"] == []
    assert not any(line.startswith(("policy", "observer")) for line in invoke("list").stdout.splitlines())
    registry.snapshot.plugins.register(Both())
    for command in ("list", "doctor"):
        assert [line for line in invoke(command).stdout.splitlines() if line in lines] == lines
    assert json.loads(invoke("list", "--json").stdout)["plugins"] == [
        {"role": role, "plugin": title, "distribution": "this process"} for role in ("policy", "observer")
    ]


def test_doctor_tests_every_stage_and_names_the_environment():
    with isolated_registry(FakeBackend("fake", ["attention_forward"], self_test=True).spec, installed=True):
        done = invoke("doctor")
    assert done.exit_code == 0
    assert "Import and self-test" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if " fake " in line and " cpu " in line]
    assert "ready" in row
    assert "DSA_KERNEL_BACKEND" in done.stdout


def test_doctor_says_once_what_all_stages_of_a_backend_miss():
    names = [f"package-{number}-that-nobody-has" for number in range(3)]
    packages = tuple(dsa.Requirement(name, name.replace("-", "_")) for name in names)
    with isolated_registry(FakeBackend("bare", packages=packages).spec, installed=True):
        lines = invoke("doctor").stdout.splitlines()
    assert sum("NOT_INSTALLED" in line and " bare " in line for line in lines) == len(STAGES)
    (reason,) = [line for line in lines if line.startswith("bare: ")]
    assert all(name in reason for name in names)
    assert lines.count("  pip install " + " ".join(f"'{name}'" for name in names)) == 1


def test_doctor_shows_the_traceback_of_a_failure_unless_told_not_to():
    def fails(**_):
        raise RuntimeError("no such kernel image")

    spec = FakeBackend(
        "broken", ["attention_forward"], replace={"attention_forward": fails}, self_test=True
    ).spec
    with isolated_registry(spec):
        shown, without = invoke("doctor"), invoke("doctor", "--no-tracebacks")
    assert "SELF_TEST_FAILED" in shown.stdout
    assert "Traceback (most recent call last)" in shown.stdout
    assert "Traceback (most recent call last)" not in without.stdout


def test_doctor_refuses_a_variable_that_nothing_reads(monkeypatch, capsys, registry):
    monkeypatch.setenv("DSA_KERNEL_BACKED", "torch_dense")
    assert status(monkeypatch, "doctor") == 2
    assert "Did you mean 'DSA_KERNEL_BACKEND'?" in capsys.readouterr().err


def test_fingerprint_depends_on_the_registry_and_shows_settings_with_their_source(monkeypatch, registry):
    monkeypatch.setenv("DSA_KERNEL_FALLBACK", "error")
    first = json.loads(invoke("fingerprint", "--json").stdout)
    assert first["torch"] == torch.__version__
    assert first["settings"]["dsa_kernel_fallback"] == ["error", "environment"]
    shown = invoke("fingerprint")
    assert f"registry: {first['registry']}" in shown.stdout
    assert "dsa_kernel_fallback = error (from environment)" in shown.stdout
    assert first["settings"]["memory_budget"][0].isdecimal(), "what the default comes to on this device"
    dsa.register_backend(FakeBackend("another").spec)
    assert json.loads(invoke("fingerprint", "--json").stdout)["registry"] != first["registry"]


def test_check_compares_every_stage_of_the_backend_that_is_named(registry):
    done = invoke("check", "torch_dense", "--json")
    assert done.exit_code == 0
    results = json.loads(done.stdout)
    (info,) = [info for info in dsa.list_backends() if info.name == "torch_dense"]
    assert {result["stage"] for result in results} == set(info.stages)
    assert {result["backend"] for result in results} == {"torch_dense"}
    assert all(result["passed"] and result["error"] <= result["limit"] for result in results)


def test_a_declaration_that_accepts_no_small_call_is_skipped_with_the_reason_and_is_no_failure():
    large = dsa.Decline(dsa.DeclineCode.EXTRA_CHECK, "rows", "few", "many")
    narrow = FakeBackend("narrow", ["attention_forward"], self_test=True, extra_check=lambda call: large).spec
    with isolated_registry(narrow, installed=True):
        doctor, table, document = invoke("doctor"), invoke("check"), invoke("check", "--json")
        alone = invoke("check", "narrow")
    why = "the declaration accepts none of the small calls that were tried: EXTRA_CHECK rows"
    assert (doctor.exit_code, table.exit_code, document.exit_code) == (0, 0, 0)
    (row,) = [line for line in doctor.stdout.splitlines() if " narrow " in line]
    assert "ready, self-test skipped" in row
    assert f"narrow attention_forward on cpu: self-test skipped: {why}" in doctor.stdout
    assert f"narrow attention_forward on cpu in float32: skipped: {why}" in table.stdout
    assert "WRONG" not in table.stdout
    mine = [result for result in json.loads(document.stdout) if result["backend"] == "narrow"]
    assert mine
    for result in mine:
        assert (result["passed"], result["error"]) == (None, None)
        assert result["note"].startswith(f"skipped: {why}")
    assert alone.exit_code == 1, "nothing of the backend that was named was compared"


def test_check_ends_with_1_when_a_backend_is_wrong():
    replace = {"attention_forward": faults.forward("ignores topk_length")}
    wrong = FakeBackend("wrong", ["attention_forward"], replace=replace)
    with isolated_registry(wrong.spec, installed=True):
        table, document = invoke("check", "wrong"), invoke("check", "wrong", "--json")
    assert (table.exit_code, document.exit_code) == (1, 1)
    assert table.stdout.count("WRONG") == len(json.loads(document.stdout))
    for result in json.loads(document.stdout):
        assert result["note"] in table.stdout
    assert not any(result["passed"] for result in json.loads(document.stdout))


@pytest.mark.parametrize(
    "command", [["check"], ["conformance"], ["explain", "run_fused_qk_topk", "--backend"]]
)
def test_an_unknown_backend_ends_with_2_and_the_known_names(monkeypatch, capsys, registry, command):
    assert status(monkeypatch, *command, "nosuch") == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: UnknownBackendError: ")
    assert "unknown backend 'nosuch'" in output.err
    assert "torch_dense" in output.err
    assert output.out == ""


def test_a_named_backend_that_cannot_be_checked_is_no_success():
    absent = FakeBackend(
        "absent", ["attention_forward"], packages=(dsa.Requirement("no-such", "no_such_module"),)
    )
    with isolated_registry(absent.spec, installed=True):
        result = invoke("check", "absent")
    assert result.exit_code == 1
    assert "absent attention_forward not checked: NOT_INSTALLED package no-such" in result.output
