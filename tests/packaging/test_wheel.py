"""The wheel: what is in it, and that it works in an environment that holds nothing else of ours."""

from __future__ import annotations

import configparser
import importlib
import json
import sys
import zipfile

import pytest
from fresh_environment import ROOT, Environment

import dsa_dispatch
from dsa_dispatch.testing import isolated_registry

INFO = f"dsa_dispatch-{dsa_dispatch.__version__}.dist-info"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def built(environment, tmp_path_factory):
    """The wheel, made as `python -m build` makes it from the checkout; hatchling is there already."""
    out = tmp_path_factory.mktemp("dist")
    environment.process(
        sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)
    )
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(built):
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(environment, built):
    environment.install(built)
    return environment


def test_the_top_level_is_exactly_two_packages(names):
    assert {name.partition("/")[0] for name in names} == {"dsa_dispatch", "dsa_backends", INFO}


def test_every_source_file_is_in_it_and_nothing_else(names):
    wanted = {
        str(path.relative_to(root))
        for root, package in ((ROOT, "dsa_dispatch"), (ROOT / "backends", "dsa_backends"))
        for path in (root / package).rglob("*")
        if path.suffix in {".py", ".typed"}
    }
    wanted |= {f"dsa_dispatch/_presets/{path.name}" for path in (ROOT / "configs").iterdir()}
    assert {name for name in names if not name.startswith(INFO)} == wanted


def test_both_packages_are_typed(names):
    assert {"dsa_dispatch/py.typed", "dsa_backends/py.typed"} <= names


@pytest.fixture(scope="module")
def entry_points(built):
    parser = configparser.ConfigParser()
    parser.optionxform = str
    with zipfile.ZipFile(built) as archive:
        parser.read_string(archive.read(f"{INFO}/entry_points.txt").decode())
    return parser


def test_the_entry_points_are_there_and_lead_somewhere(entry_points, names):
    assert entry_points["console_scripts"]["dsa-dispatch"] == "dsa_dispatch._cli:main"
    points = dict(entry_points["dsa_dispatch.backends"])
    assert points["torch_dense"] == "dsa_backends.torch_dense.spec"
    for module in points.values():
        assert f"{module.replace('.', '/')}.py" in names


def test_the_licence_and_the_supported_range_are_in_the_metadata(built, names):
    assert f"{INFO}/licenses/LICENSE" in names
    with zipfile.ZipFile(built) as archive:
        metadata = archive.read(f"{INFO}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist: torch<2.15,>=2.11" in metadata
    assert "Requires-Python: <3.14,>=3.10" in metadata


def test_it_is_the_installed_copy_that_runs(installed):
    source = "import dsa_dispatch, dsa_backends; print(dsa_dispatch.__file__, dsa_backends.__file__)"
    for path in installed.run("-c", source).split():
        assert path.startswith(str(installed.folder))


def test_the_matrix_is_printed_and_is_that_of_every_backend_in_the_wheel(installed, entry_points):
    modules = [importlib.import_module(module) for module in entry_points["dsa_dispatch.backends"].values()]
    specs = [spec for module in modules for spec in module.dsa_dispatch_backends()]
    status, text = installed.command("dsa-dispatch", "matrix", "--format", "markdown")
    assert status == 0, text
    with isolated_registry(*specs):
        assert dsa_dispatch.capability_matrix().to_markdown() in text
    status, text = installed.command("dsa-dispatch", "matrix")
    assert status == 0, text
    assert "torch_dense" in text


def test_presets_are_found_by_name(installed):
    presets = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    source = (
        f"import dsa_dispatch, json; print(json.dumps([dsa_dispatch.load_config(n).text for n in {presets}]))"
    )
    assert len(presets) >= 5
    assert json.loads(installed.run("-c", source)) == [
        dsa_dispatch.load_config(name).text for name in presets
    ]


def test_a_call_runs_on_the_reference(installed):
    source = """
import torch, dsa_dispatch
out = dsa_dispatch.run_fused_absorbed_sparse_attention(
    None, torch.ones(2, 1, 1, 4), torch.ones(3, 1, 1, 4), torch.zeros(1, 2, 1, dtype=torch.int32), 1.0, 2)
print(tuple(out.shape), dsa_dispatch.stats().ran("attention_forward"))
"""
    assert installed.run("-c", source).strip() == "(2, 1, 1, 2) {'torch_dense': 1}"
