"""Where results go: standard output or a file, plain, so that they can be piped."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import typer


class Format(str, Enum):
    """Forms of a result."""

    text = "text"
    markdown = "markdown"
    json = "json"


def emit(text: str, output: Path | None = None) -> None:
    """Print, or write to ``output``, with one newline at the end."""
    text = text.rstrip("\n") + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
