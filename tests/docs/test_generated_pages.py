"""Generated pages say what the data say: `make docs` after a change of a capability."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsa_dispatch._cli import app
from dsa_dispatch._cli.pages import pages
from dsa_dispatch.testing import FakeBackend, isolated_registry

DOCS = Path(__file__).parents[2] / "docs"


def test_pages_are_up_to_date(registry):
    made = pages()
    stale = [
        name for name, text in made.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != text
    ]
    assert stale == [], "run `make docs`"
    assert {f"backends/{path.name}" for path in (DOCS / "backends").glob("*.md")} == set(made) - {
        "capabilities.md"
    }


def test_every_backend_of_this_distribution_has_a_page_with_every_stage(registry):
    for name, entry in registry.snapshot.backends.items():
        page = pages()[f"backends/{name}.md"]
        assert all(f"\n## {stage}\n" in page for stage in entry.spec.stages)


def test_what_else_is_installed_changes_no_page():
    with isolated_registry(installed=True):
        before = pages()
    with isolated_registry(FakeBackend("other").spec, installed=True):
        assert pages() == before


@pytest.mark.parametrize("damage", ["stale", "missing", "obsolete"])
def test_check_finds_a_page_that_differs_and_writing_mends_it(damage, tmp_path, registry):
    folder = tmp_path / "docs"
    shutil.copytree(DOCS, folder)
    page = folder / "backends" / "torch_dense.md"
    if damage == "stale":
        page.write_text(page.read_text() + "by hand\n")
    elif damage == "missing":
        page.unlink()
    else:
        (folder / "backends" / "gone.md").write_text("a backend that is no more\n")
    runner = CliRunner()
    found = runner.invoke(app, ["pages", str(folder), "--check"])
    assert found.exit_code == 1
    assert "is stale: run `make docs`" in found.output
    assert runner.invoke(app, ["pages", str(folder)]).exit_code == 0
    assert runner.invoke(app, ["pages", str(folder), "--check"]).exit_code == 0
