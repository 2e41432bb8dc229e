"""Running a command: through typer's runner, or through the entry point with all that it prints."""

from __future__ import annotations

import sys

from typer.testing import CliRunner

from dsa_dispatch._cli import app, main


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def status(monkeypatch, *arguments):
    """The exit status of ``dsa-dispatch``, as a shell sees it."""
    monkeypatch.setattr(sys, "argv", ["dsa-dispatch", *map(str, arguments)])
    try:
        main()
    except SystemExit as end:
        return end.code
    return 0
