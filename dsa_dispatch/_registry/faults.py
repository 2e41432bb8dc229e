"""What a plugin's code raised, in words.

Wherever a plugin is loaded, asked or tested, everything but ``KeyboardInterrupt`` is caught: a library that ends the
process at import, or a skip of a test framework, is no ``Exception`` and must not cost the user the other backends.
A kernel that raises while a call runs is not guarded so.
"""

from __future__ import annotations

import traceback


def raised(error: BaseException) -> str:
    """Kind and text of an error, even of one whose text cannot be made."""
    try:
        text = str(error).strip()
    except Exception:  # the report must not fail on what it reports
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def traced(error: BaseException) -> str:
    """The traceback as Python prints it."""
    return "".join(traceback.format_exception(error))
