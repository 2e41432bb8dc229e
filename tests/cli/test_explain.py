"""``dsa-dispatch explain``: every form of the answer, its exit status, and what it refuses to describe."""

from __future__ import annotations

import json

import pytest
import torch
from cli.command import invoke, status

import dsa_dispatch as dsa
from dsa_dispatch._run_config import load_preset, preset_names
from dsa_dispatch.testing import FakeBackend, isolated_registry

TOPK = "run_fused_qk_topk"
WHOLE = "run_fused_dsa_attention"


def explained(*arguments):
    done = invoke("explain", *arguments, "--format", "json")
    assert done.exit_code == 0
    return json.loads(done.stdout)


def backends(document):
    return {entry["stage"]: entry["backend"] for entry in document["stages"]}


def test_text_names_the_call_the_backend_and_the_policy(registry):
    done = invoke("explain", TOPK, "--rows", 8)
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{TOPK}: batch 1, rows 8, keys 8, width 2048")
    assert "indexer_topk: torch_dense" in done.stdout
    assert "dsa_kernel_fallback = next (from default)" in done.stdout


def test_the_policy_names_the_option_that_was_typed(monkeypatch, registry):
    monkeypatch.setenv("DSA_KERNEL_FALLBACK", "next")
    options = ("explain", TOPK, "--backend", "torch_dense")
    shown = invoke(*options).stdout
    assert "dsa_kernel_backend[indexer_topk] = torch_dense (from --backend)" in shown
    assert "dsa_kernel_fallback = next (from environment)" in shown
    assert "dsa_kernel_fallback = error (from --fallback)" in invoke(*options, "--fallback", "error").stdout


def test_the_help_has_an_example_that_runs_and_the_models(monkeypatch, registry):
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoke("explain", "--help").stdout
    (example,) = [line.split("Example: ")[1] for line in shown.splitlines() if "Example: " in line]
    program, *arguments = example.split()
    assert program == "dsa-dispatch"
    assert "--model" in arguments
    assert invoke(*arguments).exit_code == 0
    for name in preset_names():
        assert name in shown


@pytest.mark.parametrize("short", ["bf16", "fp16", "fp32", "fp64"])
def test_a_type_may_be_given_as_the_tables_print_it(registry, short):
    name = explained(TOPK, "--dtype", short)["call"]["dtype"]
    assert (name[0], name[-2:]) == (short[0], short[-2:])
    assert explained(TOPK, "--dtype", name)["call"]["dtype"] == name


def test_markdown_is_a_table_per_stage(registry):
    done = invoke("explain", TOPK, "--format", "markdown")
    assert done.exit_code == 0
    assert "| stage | backend | outcome |" in done.stdout
    assert "| indexer_topk | torch_dense | chosen |" in done.stdout


def test_json_holds_the_options(registry):
    options = ("--rows", 8, "--keys", 16, "--batch", 3, "--dtype", "float16", "--tp", 4, "--deterministic")
    call = explained(WHOLE, *options, "--backend", "none")["call"]
    assert (call["rows"], call["keys"], call["batch"], call["dtype"]) == (8, 16, 3, "float16")
    assert call["heads"] == load_preset("deepseek-v3.2").model.heads // 4
    assert call["deterministic"] is True
    assert call["needs_grad"] == ["k", "key", "q", "query", "weights"]


def test_without_training_no_backward_is_decided(registry):
    assert "attention_backward" in backends(explained(WHOLE))
    assert "attention_backward" not in backends(explained(WHOLE, "--no-training"))


def test_a_whole_attention_says_of_each_stage_what_the_library_says(registry):
    document = explained(WHOLE, "--rows", 64, "--compute-capability", "9.0")
    call = dsa.CallSpec(**{name: _frozen(value) for name, value in document["call"].items()})
    device = dsa.DeviceInfo(**{name: _frozen(value) for name, value in document["device"].items()})
    expected = json.loads(dsa.explain(WHOLE, call=call, device=device).to_json())
    assert document == expected


def _frozen(value):
    return (
        (tuple if value and isinstance(value[0], int) else frozenset)(value)
        if isinstance(value, list)
        else value
    )


def test_a_model_without_a_loss_over_keys_is_a_selection_and_an_attention(registry):
    document = explained(WHOLE, "--model", "glm-5.3-flash", "--rows", 4096)
    assert list(backends(document)) == ["indexer_topk", "attention_forward", "attention_backward"]
    assert set(backends(document).values()) == {"torch_dense"}
    assert document["call"]["operation"] == WHOLE
    assert (document["call"]["keys"], document["call"]["width"]) == (4096, 2051)


def test_a_model_without_a_loss_over_keys_still_has_none(monkeypatch, capsys):
    assert status(monkeypatch, "explain", "run_fused_qk_topk_with_loss", "--model", "glm-5.3-flash") == 2
    assert "no loss over keys fits" in capsys.readouterr().err


def test_nobody_to_serve_ends_with_1():
    with isolated_registry(FakeBackend("fake", ["attention_forward"]).spec):
        done = invoke("explain", TOPK)
    assert done.exit_code == 1
    assert "indexer_topk: NO BACKEND" in done.stdout


def test_a_described_device_need_not_be_here(registry):
    document = explained("run_fused_absorbed_sparse_attention", "--compute-capability", "10.0")
    assert document["device"]["compute_capability"] == [10, 0]
    assert document["call"]["device"] == "cuda"
    assert explained(TOPK, "--device", "cuda", "--compute-capability", "9.0")["device"]["type"] == "cuda"


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--dtype", "foo"], ["dtype: got 'foo', supports bfloat16, float16, float32, float64"]),
        (["--dtype", "bfloat"], ["Did you mean 'bfloat16'?"]),
        (["--device", "xyz"], ["--device: got 'xyz', supports cpu and cuda"]),
        (["--device", "xyz", "--compute-capability", "9.0"], ["--device: got 'xyz'"]),
        (["--device", "cuda"], ["sees no CUDA device here", "--compute-capability 9.0"]),
        (["--device", "cpu", "--compute-capability", "9.0"], ["contradicts --compute-capability 9.0"]),
        (["--compute-capability", "9"], ["got '9', expected major.minor"]),
        (["--compute-capability", "9" * 5000 + ".0"], ["expected major.minor"]),
        (["--model", "glm"], ["neither a preset nor a file", "glm-5.2"]),
        (["--tp", "7"], ["tensor parallel 7 does not divide 128 heads"]),
        (["--backend", "nosuch"], ["unknown backend 'nosuch'", "torch_dense"]),
        (["--fallback", "maybe"], ["dsa_kernel_fallback: got 'maybe'"]),
    ],
    ids=lambda value: " ".join(value)[:50] if value[0].startswith("--") else "",
)
def test_what_cannot_be_meant_ends_with_2_and_one_line(monkeypatch, capsys, registry, options, parts):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert status(monkeypatch, "explain", TOPK, *options) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    for part in parts:
        assert part in output.err


def test_an_unknown_operation_is_named_with_the_nearest(monkeypatch, capsys):
    assert status(monkeypatch, "explain", "run_fused_qk_topkk") == 2
    assert "Did you mean 'run_fused_qk_topk'?" in capsys.readouterr().err


def test_output_goes_to_the_file(tmp_path, registry):
    page = tmp_path / "why.md"
    done = invoke("explain", TOPK, "--format", "markdown", "--output", page)
    assert (done.exit_code, done.stdout) == (0, "")
    assert page.read_text() == invoke("explain", TOPK, "--format", "markdown").stdout
