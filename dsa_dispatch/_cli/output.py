"""Where results go: standard output or a file, plain, so that they can be piped.

A backend or plugin may print at import, in a hook or in a kernel. While a command runs, ``sys.stdout`` is therefore
standard error, and only what goes through this module reaches standard output.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import Final, ParamSpec, TextIO, TypeVar

import typer
from rich.console import Console

from dsa_dispatch.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
_RESULTS: Final[ContextVar[TextIO | None]] = ContextVar("dsa_dispatch_results", default=None)


class Format(str, Enum):
    """Forms of a result."""

    text = "text"
    markdown = "markdown"
    json = "json"


def results_apart(command: Callable[P, R]) -> Callable[P, R]:
    """``command`` with standard output kept for its results: what anything else prints goes to standard error."""

    @functools.wraps(command)
    def kept(*args: P.args, **kwargs: P.kwargs) -> R:
        before = _RESULTS.set(sys.stdout)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return command(*args, **kwargs)
        finally:
            _RESULTS.reset(before)

    return kept


def results() -> TextIO:
    """Standard output, as it was when the command began."""
    return _RESULTS.get() or sys.stdout


def results_console(soft_wrap: bool = False) -> Console:
    """A console for results."""
    return Console(file=results(), soft_wrap=soft_wrap)


def progress_console(json: bool, soft_wrap: bool = False) -> Console:
    """A console for progress and tables; on standard error where standard output is one JSON document."""
    return Console(stderr=True, soft_wrap=soft_wrap) if json else results_console(soft_wrap)


def emit(text: str, output: Path | None = None) -> None:
    """Print, or write to ``output``, with one newline at the end. Raises ``ConfigError`` where that is impossible."""
    text = text.rstrip("\n") + "\n"
    if output is None:
        typer.echo(text, file=results(), nl=False)
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
