"""Standard output holds a command's results alone, whatever a plugin, its hooks and its kernels print."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint

import pytest
import yaml
from cli.command import invoke
from quickstart import small

from dsa_dispatch._registry import registry
from dsa_dispatch._runtime import Runtime, swapped

PLUGIN = """
from dsa_backends.torch_dense.attention_forward import attention_forward
from dsa_backends.torch_dense.spec import SPEC
from dsa_dispatch import BackendSpec, Capability, StageSpec, hookimpl

print("{noise: import")


def forward(*args, **kwargs):
    print("{noise: kernel")
    return attention_forward(*args, **kwargs)


@hookimpl
def dsa_dispatch_backends():
    print("{noise: backends")
    capability = Capability(dtypes=frozenset({"float32"}))
    return [SPEC, BackendSpec("noisy", {"attention_forward": StageSpec(capability, "noisy_plugin:forward")})]


@hookimpl
def dsa_dispatch_order(call, candidates):
    print("{noise: order")


@hookimpl
def dsa_dispatch_on_decision(decision):
    print("{noise: decision")
"""
ATTENTION = "run_fused_absorbed_sparse_attention"
BENCH = ("--rows", 4, "--keys", 8, "--topk", 4, "--heads", 2, "--dtype", "float32")
# command: what it must have met of the plugin
JSON = {
    ("list", "--json"): ["import", "backends"],
    ("fingerprint", "--json"): ["import", "backends"],
    ("matrix", "--format", "json"): ["import", "backends"],
    ("explain", ATTENTION, "--rows", 8, "--dtype", "float32", "--format", "json"): ["import", "order"],
    ("check", "noisy", "--json"): ["import", "kernel"],
    ("conformance", "noisy", "--size", "small", "--json"): ["import", "decision", "kernel"],
    ("run", "CONFIG", "--text", "TEXT", "--steps", 1, "--backend", "noisy", "--json"): ["import", "kernel"],
}
TEXT = {
    ("list",): ["import", "backends"],
    ("doctor",): ["import", "order", "decision", "kernel"],
    ("check", "noisy"): ["import", "kernel"],
    ("pages", "FOLDER"): ["import"],
    ("bench", *BENCH, "--repeats", 1, "--warmup", 0, "--device", "cpu"): ["import", "kernel"],
}


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """``shown(command)``: how it ended where the printing plugin is installed and not imported yet."""
    (tmp_path / "noisy_plugin.py").write_text(PLUGIN)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(small.CONFIG.model_dump_json())))
    (tmp_path / "text.txt").write_text(small.SENTENCE * 200)
    files = {"CONFIG": tmp_path / "config.yaml", "TEXT": tmp_path / "text.txt", "FOLDER": tmp_path / "made"}
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("noisy", "noisy_plugin", "dsa_dispatch.backends")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])

    def run(command):
        with swapped(Runtime()):
            return invoke(*(files.get(part, part) for part in command))

    yield run
    sys.modules.pop("noisy_plugin", None)


@pytest.mark.parametrize("command", JSON, ids=lambda command: command[0])
def test_json_can_be_read_and_what_the_plugin_prints_is_on_standard_error(shown, command):
    done = shown(command)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)
    for met in JSON[command]:
        assert f"{{noise: {met}" in done.stderr


@pytest.mark.parametrize("command", TEXT, ids=lambda command: command[0])
def test_a_table_is_on_standard_output_alone(shown, command):
    done = shown(command)
    assert done.exit_code == 0, done.output
    assert done.stdout
    assert "noise" not in done.stdout
    for met in TEXT[command]:
        assert f"{{noise: {met}" in done.stderr
