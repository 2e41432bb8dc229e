"""``dsa-dispatch run``: a small configuration from a file, and what is refused before a text is read."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from cli.command import invoke, status
from quickstart import small

from dsa_dispatch._quickstart import run as job
from dsa_dispatch.testing import FakeBackend, isolated_registry


@pytest.fixture
def files(tmp_path):
    """A configuration and a text."""
    config, text = tmp_path / "small.yaml", tmp_path / "sentence.txt"
    config.write_text(yaml.safe_dump(json.loads(small.CONFIG.model_dump_json())))
    text.write_text(small.SENTENCE * 200)
    return config, text


def test_json_is_the_report_and_nothing_else_on_standard_output(files, registry):
    config, text = files
    done = invoke("run", config, "--text", text, "--steps", 1, "--json")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert (report["config"], report["steps"], len(report["records"])) == ("small", 1, 1)
    assert {entry["backend"] for entry in report["backends"]} == {"torch_dense"}
    assert report["first_loss"] > 0
    assert "training" in done.stderr


def test_the_report_is_shown_and_options_reach_the_kernels(files):
    config, text = files
    with isolated_registry(FakeBackend("mine").spec, installed=True):
        done = invoke("run", config, "--text", text, "--steps", 1, "--backend", "mine", "--fallback", "error")
    assert done.exit_code == 0
    assert "mine" in done.stdout
    assert "tokens/s" in done.stdout
    assert "torch_dense" not in done.stdout


@pytest.mark.parametrize(
    ("options", "variables", "part"),
    [
        (["--backend", "nosuch"], {}, "unknown backend 'nosuch'"),
        ([], {"DSA_KERNEL_BACKEND": "nosuch"}, "unknown backend 'nosuch'"),
        ([], {"DSA_KERNEL_MEMORY_BUDGET": "much"}, "environment variable DSA_KERNEL_MEMORY_BUDGET='much'"),
        (["--fallback", "maybe"], {}, "dsa_kernel_fallback: got 'maybe'"),
        (["--device", "cuda"], {}, "device 'cuda': torch"),
        (["--device", "xyz"], {}, "device 'xyz' is no device name"),
    ],
    ids=["backend", "backend variable", "budget variable", "fallback", "no cuda", "no device"],
)
def test_what_cannot_be_is_refused_before_a_text_is_read(
    files, monkeypatch, capsys, registry, options, variables, part
):
    def read(*_, **__):
        raise AssertionError("a text was read")

    monkeypatch.setitem(
        job.__globals__, "load_corpus", read
    )  # its module is hidden behind the function's name
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert status(monkeypatch, "run", files[0], *options) == 2
    output = capsys.readouterr()
    assert part in output.err
    assert output.out == ""


def test_a_misspelt_key_of_the_kernels_section_is_named(files, monkeypatch, capsys, registry, tmp_path):
    written = yaml.safe_load(files[0].read_text()) | {"kernels": {"dsa_kernel_backnd": "triton"}}
    config = tmp_path / "misspelt.yaml"
    config.write_text(yaml.safe_dump(written))
    assert status(monkeypatch, "run", config) == 2
    output = capsys.readouterr().err
    assert "kernels section: unknown key 'dsa_kernel_backnd'" in output
    assert "Did you mean 'dsa_kernel_backend'?" in output
