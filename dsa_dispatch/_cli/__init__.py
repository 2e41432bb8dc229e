"""The command line: one module per command, joined here."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

import typer
from rich.console import Console

from dsa_dispatch._cli import (
    bench,
    check,
    conformance,
    doctor,
    explain,
    fingerprint,
    listing,
    matrix,
    pages,
    run,
)
from dsa_dispatch._cli.output import results_apart
from dsa_dispatch.errors import DSADispatchError

app = typer.Typer(
    name="dsa-dispatch",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="DeepSeek Sparse Attention through whichever kernel can run it.",
)
app.command("run")(results_apart(run.run))
app.command("check")(results_apart(check.check))
app.command("matrix")(results_apart(matrix.matrix))
app.command("explain")(results_apart(explain.explain))
app.command("bench")(results_apart(bench.bench))
app.command("list")(results_apart(listing.list_))
app.command("conformance")(results_apart(conformance.conformance))
app.command("doctor")(results_apart(doctor.doctor))
app.command("pages")(results_apart(pages.write_pages))
app.command("fingerprint")(results_apart(fingerprint.fingerprint))


def main() -> None:
    """Entry point of ``dsa-dispatch``. An error of this library, or of a path that was given, ends with its message
    and exit status 2."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except DSADispatchError as error:
        _end(type(error).__name__, str(error))
    except OSError as error:
        # A failed load of a library names no file: its traceback is what tells.
        if error.filename is None:
            raise
        _end(type(error).__name__, f"{os.fsdecode(error.filename)}: {error.strerror}")


def _end(kind: str, message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {kind}:", end=" ")
    print(message, file=sys.stderr)  # noqa: T201 # the message is plain text: rich would read brackets as markup
    raise SystemExit(2) from None
