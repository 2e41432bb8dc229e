"""Plugins as real distributions in a fresh environment: found through entry points, and a broken one costs nothing."""

from __future__ import annotations

import json

import pytest
from fresh_environment import ROOT, Environment, wheel

HEAD = """
from dsa_dispatch import BackendSpec, Capability, StageSpec, hookimpl


def spec(name, **changes):
    kernel = "dsa_backends.torch_dense.attention_forward:attention_forward"
    stages = {"attention_forward": StageSpec(Capability(), kernel)}
    return BackendSpec(name=name, **{"stages": stages, "rank": -300, **changes})


@hookimpl
def dsa_dispatch_backends():
    return [%s]
"""
GOOD = "spec(__name__)"

# distribution: (source, what doctor must say of it beside its name)
BROKEN = {
    "raises-at-import": (
        "raise RuntimeError('no driver on this machine')\n",
        "RuntimeError: no driver on this machine",
    ),
    "exits-at-import": ("raise SystemExit(3)\n", "SystemExit: 3"),
    "exits-in-a-hook": (HEAD % "exit(4)", "SystemExit: 4"),
    "order-skips": (
        HEAD % GOOD
        + "\n@hookimpl\ndef dsa_dispatch_order(call, candidates):\n    raise GeneratorExit('skipped')\n",
        "GeneratorExit: skipped",
    ),
    "old-interface": (HEAD % "spec(__name__, api_version=99)", "API_MISMATCH api_version: got 99"),
    "takes-a-name": (HEAD % "spec('torch_dense')", "'torch_dense'"),
    "wrong-argument": (
        HEAD % GOOD
        + "\n@hookimpl\ndef dsa_dispatch_order(call, candidates, temperature):\n    return None\n",
        "temperature",
    ),
    "misspelt-hook": (
        HEAD % GOOD + "\n@hookimpl\ndef dsa_dispatch_odrer(call):\n    return None\n",
        "dsa_dispatch_odrer",
    ),
    "hook-raises": (HEAD % "1 / 0", "ZeroDivisionError: division by zero"),
    "order-raises": (
        HEAD % GOOD
        + "\n@hookimpl\ndef dsa_dispatch_order(call, candidates):\n    raise KeyError('no table')\n",
        "KeyError: 'no table'",
    ),
    "observer-raises": (
        HEAD % GOOD
        + "\n@hookimpl\ndef dsa_dispatch_on_decision(decision):\n    raise OSError('disk full')\n",
        "OSError: disk full",
    ),
    "not-frozen": (
        HEAD
        % "spec(__name__, stages={'attention_forward': StageSpec(Capability(dtypes={'float32'}), 'a:b')})",
        "field dtypes: got {'float32'}",
    ),
    "not-a-capability": (
        HEAD % "spec(__name__, stages={'attention_forward': StageSpec({'dtypes': 'any'}, 'a:b')})",
        "expected StageSpec(Capability(...)",
    ),
    "points-to-nothing": ("", "ModuleNotFoundError: No module named 'no_such_module'"),
}
ATTEND = """
import torch, dsa_dispatch as dsa
q, k = torch.randn(3, 1, 4, 32), torch.randn(5, 1, 1, 32)
with dsa.use_backend("example", fallback="error"):
    dsa.run_fused_absorbed_sparse_attention(None, q, k, torch.tensor([[[0, 1]] * 3]), 0.2, 16)
print(dict(dsa.stats().ran("attention_forward")))
"""


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The core and the example, both built and installed by pip."""
    environment = Environment(tmp_path_factory.mktemp("healthy"))
    environment.install(ROOT, ROOT / "plugins" / "example_backend")
    return environment


@pytest.fixture(scope="module")
def doctored(healthy, tmp_path_factory):
    """The same with every broken plugin beside it, and what ``doctor`` says then."""
    folder = tmp_path_factory.mktemp("wheels")
    wheels = [
        wheel(folder, name, source, "no_such_module" if name == "points-to-nothing" else "")
        for name, (source, _) in BROKEN.items()
    ]
    healthy.install(*wheels)
    return healthy.command("dsa-dispatch", "doctor")


def test_the_core_under_test_is_the_installed_one(healthy):
    where = healthy.run(
        "-c", "import dsa_dispatch, dsa_backends; print(dsa_dispatch.__file__, dsa_backends.__file__)"
    )
    assert all(path.startswith(str(healthy.folder)) for path in where.split())


def test_the_example_is_found_runs_and_passes(healthy):
    status, printed = healthy.command("dsa-dispatch", "list", "--json")
    assert status == 0
    listed = {info["name"]: info for info in json.loads(printed)["backends"]}
    assert listed["example"]["origin"] == "entry point 'example' of dsa-example-backend"
    assert healthy.run("-c", ATTEND).strip() == "{'example': 1}"
    status, printed = healthy.command("dsa-dispatch", "conformance", "example")
    assert status == 0, printed
    assert "ok" in printed


def test_its_own_test_file_is_the_mixin_and_passes(healthy):
    tests = ROOT / "plugins" / "example_backend" / "tests"
    assert [path.name for path in tests.glob("*.py")] == ["test_conformance.py"]
    printed = healthy.run("-m", "pytest", "-p", "no:cacheprovider", str(tests))
    # Its own settings: those of this checkout, which a copy of the template may lie in, ask for other plugins.
    assert f"rootdir: {tests.parent}" in printed
    assert " passed" in printed
    assert "failed" not in printed


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_reported_with_its_distribution_and_traceback(doctored, name):
    status, printed = doctored
    assert status == 1
    start = printed.index(f" of {name}")
    about = printed[start : printed.find("\nplugin ", start)]
    assert BROKEN[name][1] in about
    # Where nothing was raised there is no traceback.
    assert name == "old-interface" or "Traceback (most recent call last):" in about


def test_broken_plugins_cost_the_others_nothing(doctored, healthy):
    _, printed = doctored
    for backend in ("torch_dense", "example"):
        assert any(
            line.split("│")[1:2] == [f" {backend:<16} "] or backend in line for line in printed.splitlines()
        )
    assert healthy.run("-c", ATTEND).strip() == "{'example': 1}"
