"""Where results go: standard output or a file, plain, so that they can be piped."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import typer

from dsa_dispatch.errors import ConfigError


class Format(str, Enum):
    """Forms of a result."""

    text = "text"
    markdown = "markdown"
    json = "json"


def emit(text: str, output: Path | None = None) -> None:
    """Print, or write to ``output``, with one newline at the end. Raises ``ConfigError`` where that is impossible."""
    text = text.rstrip("\n") + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--output {str(output)!r} cannot be written: {error.strerror}. Give a file in a folder that exists"
            ) from error


def holds(page: Path, text: str) -> bool:
    """Whether a file holds this text. Raises ``ConfigError`` for one that cannot be read, which is not a stale one."""
    try:
        return page.read_text(encoding="utf-8") == text
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise ConfigError(f"{str(page)!r} cannot be read: {error.strerror}. Give a generated page") from error
