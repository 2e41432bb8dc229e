"""``DSAConfig``: the settings a person may write down, and how other objects become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Final

from dsa_dispatch._policy.values import (
    backend_text,
    nearest,
    parse_backend,
    parse_bytes,
    parse_choice,
    parse_fallback,
    parse_flag,
    parse_profile,
    parse_query_chunk,
)
from dsa_dispatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DSAConfig:
    """Settings of the dispatch. A field left at None is decided elsewhere (``configure``, environment, default).

    ``dsa_kernel_backend``: ``"auto"``, a name (that first, then the rest), a list (in that order, then the rest), a
    mapping from a stage to these, or ``"none"`` (only ``torch_dense``).
    ``dsa_kernel_fallback``: ``"next"`` (move on, and say so once) or ``"error"`` (run what is named or raise).
    ``deterministic``: default torch's global switch. ``memory_budget``: bytes or text such as ``"512MiB"``, default
    min(1 GiB, device memory / 16). ``query_chunk``: most query rows a kernel is handed at once, ``"auto"`` (from the
    budget) or ``"off"`` (all of them, whatever the budget says).
    ``debug_checks``: look for NaN scores, at the price of a second pass.
    Raises ``ConfigError`` on a value that cannot be meant.
    """

    dsa_kernel_backend: Any = None
    dsa_kernel_fallback: Any = None
    deterministic: Any = None
    memory_budget: Any = None
    query_chunk: Any = None
    profile: Any = None
    debug_checks: Any = None
    text: str = field(init=False, repr=False, compare=False, default="")
    """Canonical form; equal settings have equal text, and ``parse_text`` reads it back."""

    def __post_init__(self) -> None:
        parts = []
        for name, (parse, show) in _FIELDS.items():
            value = getattr(self, name)
            if value is not None:
                canonical = parse(value)
                object.__setattr__(self, name, canonical)
                parts.append(f"{name}:{show(canonical)}")
        object.__setattr__(self, "text", "|".join(parts))


_FIELDS: Final[Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], str]]]] = {
    "dsa_kernel_backend": (
        lambda value: parse_choice(value) if _is_choice(value) else parse_backend(value),
        backend_text,
    ),
    "dsa_kernel_fallback": (parse_fallback, str),
    "deterministic": (lambda value: parse_flag(value, "deterministic"), str),
    "memory_budget": (parse_bytes, str),
    "query_chunk": (parse_query_chunk, str),
    "profile": (parse_profile, str),
    "debug_checks": (lambda value: parse_flag(value, "debug_checks"), str),
}
FIELD_NAMES: Final[tuple[str, ...]] = tuple(_FIELDS)
FOREIGN_FIELDS: Final = ("dsa_kernel_backend", "dsa_kernel_fallback")
"""Only these are read from other frameworks' configs: their `deterministic` or `profile` may mean something else."""


def _is_choice(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(entry, tuple) for entry in value)


def config_from_mapping(values: Mapping[str, Any], where: str = "config") -> DSAConfig:
    """A ``DSAConfig`` from a mapping; an unknown key is a ``ConfigError`` that names the valid ones."""
    for key in values:
        if key not in FIELD_NAMES:
            raise ConfigError(
                f"{where}: unknown key {key!r}. Valid keys: {', '.join(FIELD_NAMES)}.{nearest(str(key), FIELD_NAMES)}"
            )
    return DSAConfig(**values)


@lru_cache(maxsize=256)
def parse_text(text: str) -> DSAConfig:
    """The config whose ``text`` this is."""
    parts = (part.partition(":") for part in text.split("|") if part)
    return DSAConfig(**{name: value for name, _, value in parts})


@lru_cache(maxsize=256)
def _foreign(backend: str | None, fallback: str | None) -> DSAConfig:
    return DSAConfig(dsa_kernel_backend=backend, dsa_kernel_fallback=fallback)


def explicit_text(config: object) -> str:
    """Canonical text of the ``config`` argument of an operation.

    ``config`` is None, a ``DSAConfig``, a mapping, or any object with a ``dsa_kernel_backend`` attribute.
    """
    if config is None:
        return ""
    if isinstance(config, DSAConfig):
        return config.text
    if isinstance(config, Mapping):
        return config_from_mapping(config).text
    if not hasattr(config, "dsa_kernel_backend"):
        raise ConfigError(
            f"config: got {type(config).__name__}, supports None, a DSAConfig, a mapping with the keys "
            f"{', '.join(FIELD_NAMES)}, or an object with a dsa_kernel_backend attribute"
        )
    backend, fallback = (getattr(config, name, None) for name in FOREIGN_FIELDS)
    if isinstance(backend, (str, type(None))) and isinstance(fallback, (str, type(None))):
        return _foreign(backend, fallback).text
    return DSAConfig(dsa_kernel_backend=backend, dsa_kernel_fallback=fallback).text


assert {entry.name for entry in fields(DSAConfig)} == {*FIELD_NAMES, "text"}
