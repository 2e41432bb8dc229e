"""Notes on exceptions that pass through: whose code raised them."""

from __future__ import annotations

import contextlib


def add_note(error: Exception, note: str) -> None:
    """What ``Exception.add_note`` does, also on Python 3.10, which shows no notes but keeps them for whoever looks."""
    notes = getattr(error, "__notes__", [])
    if note not in notes:
        # An exception class may forbid attributes; then the note is lost, never the exception.
        with contextlib.suppress(AttributeError, TypeError):
            error.__notes__ = [*notes, note]  # type: ignore[attr-defined]  # since Python 3.11
