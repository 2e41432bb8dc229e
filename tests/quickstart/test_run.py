"""The job as a person runs it: what it prints, what it returns, and what it says when it cannot run."""

from __future__ import annotations

import io
import json

import pytest
import torch
from quickstart import small
from rich.console import Console

import dsa_dispatch as dsa
from dsa_dispatch._quickstart import run
from dsa_dispatch._run_config import load_preset
from dsa_dispatch.errors import ConfigError, NoBackendError, UnknownBackendError
from dsa_dispatch.testing import FakeBackend

STAGES = ["indexer_topk", "indexer_target", "indexer_loss", "attention_forward", "attention_backward"]


def screen(width=120):
    return Console(file=io.StringIO(), width=width)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "sentence.txt"
    path.write_text(small.SENTENCE * 200)
    return path


def test_it_shows_the_backend_per_stage_the_losses_the_speed_and_a_sample(text, registry):
    console = screen()
    report = run(small.CONFIG, text=text, console=console)
    shown = console.file.getvalue()
    assert [entry.stage for entry in report.backends] == STAGES
    assert {entry.backend for entry in report.backends} == {"torch_dense"}
    for part in (*STAGES, "torch_dense", "tokens/s", "held-out text", "indexer against attention", "3/3"):
        assert part in shown
    assert f"{report.first_loss:.3f}" in shown
    assert f"{report.held_out_after:.3f}" in shown
    assert report.continuation.strip().split("\n")[0].split()[0] in shown


def test_the_report_counts_what_ran(text, registry):
    report = run(small.CONFIG, text=text, console=screen())
    runs = {entry.stage: entry.runs for entry in report.backends}
    passes = 1 + 3 + 1 + small.RECIPE.new_tokens  # held out, steps, held out, one per new token
    assert runs["indexer_topk"] == 2 * passes
    assert runs["attention_forward"] == 3 * passes
    assert runs["indexer_loss"] == runs["indexer_target"] == 2 * 3
    assert runs["attention_backward"] == 3 * 3
    assert report.steps == len(report.records) == 3
    assert report.text == "sentence.txt"
    assert report.decisions > report.decisions_anew > 0


def test_runs_of_before_are_not_counted(text, registry):
    first, second = (run(small.CONFIG, text=text, console=screen()) for _ in range(2))
    assert first.backends == second.backends
    assert second.decisions_anew == 0, "the second run finds every decision in the table"


def test_json_is_one_document_on_standard_output_and_progress_goes_elsewhere(text, capsys):
    report = run(small.CONFIG, text=text, json=True)
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document["last_loss"] == report.last_loss
    assert document["backends"][0] == {
        "stage": "indexer_topk",
        "backend": "torch_dense",
        "provider": "",
        "runs": report.backends[0].runs,
    }
    assert len(document["records"]) == 3
    assert "training" in output.err


def test_the_shipped_quickstart_runs_on_the_standard_library(registry):
    report = run(load_preset("quickstart"), steps=2, console=screen())
    assert report.text.startswith("Python standard library")
    assert report.steps == 2
    assert report.held_out_after < report.held_out_before
    assert report.continuation


def test_the_caller_overrides_backend_fallback_and_steps(text, registry):
    config = small.CONFIG.model_copy(update={"kernels": {"dsa_kernel_backend": "none"}})
    dsa.register_backend(FakeBackend("mine").spec)
    report = run(config, text=text, backend="mine", steps=1, console=screen())
    assert {entry.backend for entry in report.backends} == {"mine"}
    assert report.steps == 1
    assert {entry.backend for entry in run(config, text=text, steps=1, console=screen()).backends} == {
        "torch_dense"
    }


def test_error_as_fallback_reaches_the_kernels(text, registry):
    dsa.register_backend(FakeBackend("partial", stages=("attention_forward",)).spec)
    with pytest.raises(NoBackendError, match="partial"):
        run(small.CONFIG, text=text, backend="partial", fallback="error", console=screen())


def test_an_unknown_backend_is_named(text):
    with pytest.raises(UnknownBackendError, match=r"torch_dnse.*torch_dense"):
        run(small.CONFIG, text=text, backend="torch_dnse", console=screen())


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "device 'cuda': torch .* sees 0 CUDA devices. Use --device cpu"),
        ("cuda:3", "device 'cuda:3': torch .* sees 0 CUDA devices"),
        ("graphics", "device 'graphics' is no device name; use 'cpu', 'cuda' or 'cuda:1'"),
        ("meta", "device 'meta': this job runs on 'cpu' and 'cuda'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_any_work(device, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=message):
        run(small.CONFIG, device=device, console=screen())


def test_a_model_preset_says_that_it_only_describes_shapes():
    with pytest.raises(ConfigError, match=r"'glm-5\.2' has no training section.*Run the preset 'quickstart'"):
        run(load_preset("glm-5.2"), console=screen())


def test_zero_steps_are_refused(text):
    with pytest.raises(ConfigError, match="steps: got 0, needs at least 1"):
        run(small.CONFIG, text=text, steps=0, console=screen())


def test_the_number_of_threads_is_given_back(text):
    before = torch.get_num_threads()
    run(small.CONFIG, text=text, steps=1, console=screen())
    with pytest.raises(ConfigError):
        run(small.CONFIG, text=text.with_name("missing.txt"), console=screen())
    assert torch.get_num_threads() == before
