"""Paths that a person mistypes: one line on standard error and exit status 2, whatever the command."""

from __future__ import annotations

import ctypes

import pytest
from cli.command import invoke, status

from dsa_dispatch import _cli
from dsa_dispatch._cli.pages import pages

TOPK = "run_fused_qk_topk"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "file").write_text("not a page")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "path", "part"),
    [
        (["matrix", "--check"], "missing.md", "cannot be read: No such file or directory"),
        (["matrix", "--check"], "", "cannot be read: Is a directory"),
        (["matrix", "--check"], "file/page.md", "cannot be read: Not a directory"),
        (["matrix", "--output"], "missing/page.md", "cannot be written: No such file or directory"),
        (["matrix", "--output"], "", "cannot be written: Is a directory"),
        (["explain", TOPK, "--output"], "missing/why.txt", "cannot be written: No such file or directory"),
        (["explain", TOPK, "--model"], "missing.yaml", "does not exist"),
        (["explain", TOPK, "--model"], "file", "expected a mapping"),
        (["pages"], "file", "is no folder"),
        (["pages"], "file/docs", "cannot be written"),
        (["pages", "--check"], "missing", "is no folder"),
        (["pages", "--check"], "file", "is no folder"),
        (["run"], "missing.yaml", "does not exist"),
        (["run", "--text"], "missing.txt", "cannot be read: No such file or directory"),
        (["run", "--text"], "", "cannot be read: Is a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_it_is_named_with_what_is_wrong(monkeypatch, capsys, registry, folder, command, path, part):
    assert status(monkeypatch, *command, folder / path) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ConfigError: ")
    assert str(folder / path) in output.err
    assert part in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_pages_under_a_folder_of_the_system_are_refused(monkeypatch, capsys, registry):
    assert status(monkeypatch, "pages", "/proc/nope") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_pages_makes_the_folder_that_is_missing(registry, tmp_path):
    done = invoke("pages", tmp_path / "new" / "docs")
    assert done.exit_code == 0
    assert done.stdout.count("wrote") == len(pages())
    assert invoke("pages", "--check", tmp_path / "new" / "docs").exit_code == 0


def test_any_other_path_that_cannot_be_used_is_named_too(monkeypatch, capsys):
    def fails():
        raise PermissionError(13, "Permission denied", "/some/[file]")

    monkeypatch.setattr(_cli, "app", fails)
    assert status(monkeypatch) == 2
    assert capsys.readouterr().err == "error: PermissionError: /some/[file]: Permission denied\n"


def test_a_library_that_does_not_load_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(_cli, "app", lambda: ctypes.CDLL("libnobodyhasthis.so"))
    with pytest.raises(OSError, match="libnobodyhasthis"):
        status(monkeypatch)
