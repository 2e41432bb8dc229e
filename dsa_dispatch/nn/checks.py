"""What the constructors here refuse: a wrong size would surface far away, or as memory that nobody wrote."""

from __future__ import annotations

from typing import get_args

from dsa_dispatch._policy.values import nearest
from dsa_dispatch.errors import ConfigError
from dsa_dispatch.nn.rope import Rope


def check_sizes(where: str, **sizes: object) -> None:
    """Raise ``ConfigError`` for a size that is no int of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{where}: {name}: got {size!r}, expected an int of at least 1")


def check_rope(where: str, rope: object) -> None:
    """Raise ``ConfigError`` for a convention that is neither known nor None."""
    known = get_args(Rope)
    if rope is not None and rope not in known:
        listed = " or ".join(map(repr, known))
        raise ConfigError(f"{where}: rope: got {rope!r}, expected {listed}, or None.{nearest(rope, known)}")
