"""Names of floating-point types on the command line."""

from __future__ import annotations

from typing import Final

ALIASES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""What the tables print, and so what is typed."""


def dtype_of(name: str) -> str:
    """The full name of a type that may be given by its short one; anything else as it is, for whoever checks it."""
    return ALIASES.get(name, name)
