"""Settings from environment variables with our prefix ``DSA_KERNEL_``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from dsa_dispatch._policy.config import DSAConfig
from dsa_dispatch._policy.values import nearest, shown
from dsa_dispatch.errors import ConfigError

PREFIX: Final = "DSA_KERNEL_"
VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "DSA_KERNEL_BACKEND": "dsa_kernel_backend",
        "DSA_KERNEL_FALLBACK": "dsa_kernel_fallback",
        "DSA_KERNEL_DETERMINISTIC": "deterministic",
        "DSA_KERNEL_MEMORY_BUDGET": "memory_budget",
        "DSA_KERNEL_QUERY_CHUNK": "query_chunk",
        "DSA_KERNEL_PROFILE": "profile",
        "DSA_KERNEL_DEBUG_CHECKS": "debug_checks",
    }
)

# os.environ encodes and decodes at every read (about 1 µs a variable); its table does not, and seven reads are on the
# path of every call, written out since a loop takes twice as long. Where a Python lacks the table, os.environ itself is
# read.
_TABLE: Final[Mapping[Any, Any]] = getattr(os.environ, "_data", os.environ)
_ENCODE: Final = getattr(os.environ, "encodekey", str) if _TABLE is not os.environ else str
_KEYS: Final = tuple(_ENCODE(name) for name in VARIABLES)
_1, _2, _3, _4, _5, _6, _7 = _KEYS
_GET: Final = _TABLE.get

Values = tuple[Any, ...]
EMPTY: Final[Values] = (None,) * len(_KEYS)


def read_environment() -> Values:
    """The raw values of our variables, as a cheap and hashable key."""
    get = _GET
    return (get(_1), get(_2), get(_3), get(_4), get(_5), get(_6), get(_7))


@lru_cache(maxsize=64)
def environment_config(values: Values) -> DSAConfig:
    """The settings that ``read_environment`` returned. An empty or blank variable counts as unset."""
    pairs = zip(VARIABLES, values, strict=True)
    texts = {name: os.fsdecode(value) for name, value in pairs if value and value.strip()}
    settings = {}
    for name, text in texts.items():
        try:
            settings[VARIABLES[name]] = getattr(DSAConfig(**{VARIABLES[name]: text}), VARIABLES[name])
        except ConfigError as error:
            raise ConfigError(f"environment variable {name}={shown(text)}: {error}") from None
    return DSAConfig(**settings)


def reject_unknown_variables() -> None:
    """Raise ``ConfigError`` for a variable with our prefix that nothing reads: a misspelt one has no effect
    otherwise."""
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            raise ConfigError(
                f"environment variable {name} is set, but nothing reads it. Known: {', '.join(VARIABLES)}."
                f"{nearest(name, VARIABLES)}"
            )
