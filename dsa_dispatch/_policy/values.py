"""Parsing of single settings. Every function returns the canonical value or raises ``ConfigError``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Final, Literal

from dsa_dispatch._stages import STAGES, Stage
from dsa_dispatch.errors import ConfigError

Fallback = Literal["next", "error"]
QueryChunk = int | Literal["auto", "off"]
BackendChoice = tuple[tuple[Stage | Literal["*"], tuple[str, ...]], ...]
"""Named backends per stage, ``"*"`` for every stage, in the order of preference; ``("auto",)`` and ``("none",)``
stand alone."""

SPECIAL: Final = ("auto", "none")
_UNITS: Final[Mapping[str, int]] = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}
_LARGEST: Final = 2**63 - 1
"""Numbers cross into kernels as 64-bit integers."""
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


def nearest(word: object, known: Iterable[str]) -> str:
    """``' Did you mean X?'`` or the empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5) if isinstance(word, str) else ()
    return f" Did you mean {close[0]!r}?" if close else ""


def shown(value: object) -> str:
    """``repr`` for a message: short, and there even for a number with more digits than Python prints."""
    try:
        text = repr(value)
    except Exception:  # the message about a wrong value must not fail on the value
        return f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text)} characters)"


def _stripped(value: object) -> object:
    return value.strip() if isinstance(value, str) else value


def parse_names(value: object, where: str) -> tuple[str, ...]:
    """A backend name, several separated by commas, or a sequence of names."""
    if isinstance(value, str):
        names = tuple(part.strip() for part in value.split(","))
    elif isinstance(value, (list, tuple)):
        names = tuple(value)
    else:
        raise ConfigError(
            f"{where}: got {shown(value)}, supports 'auto', 'none', a backend name, a list of names, or a mapping from "
            f"a stage to one of these"
        )
    if not names or not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise ConfigError(
            f"{where}: got {shown(value)}, expected backend names such as 'triton' or 'cudnn, triton'"
        )
    if len(set(names)) != len(names):
        raise ConfigError(f"{where}: got {shown(value)}, a backend is named twice")
    if len(names) > 1 and any(name in SPECIAL for name in names):
        raise ConfigError(
            f"{where}: got {shown(value)}; 'auto' and 'none' stand alone and are not part of a list"
        )
    return names


def parse_backend(value: object, where: str = "dsa_kernel_backend") -> BackendChoice:
    """``auto``, ``none``, a name, a list of names, or a mapping from a stage to these; also their text form."""
    if isinstance(value, str) and "=" in value:
        pairs = [part.partition("=") for part in value.split(";") if part.strip()]
        if len({stage.strip() for stage, _, _ in pairs}) != len(pairs):
            raise ConfigError(f"{where}: got {shown(value)}, a stage is named twice")
        value = {stage.strip(): names for stage, _, names in pairs}
    if not isinstance(value, Mapping):
        return (("*", parse_names(value, where)),)
    if not value:
        raise ConfigError(f"{where}: got an empty mapping; name at least one stage of {', '.join(STAGES)}")
    for stage in value:
        if stage not in STAGES:
            raise ConfigError(
                f"{where}: unknown stage {shown(stage)}. Stages: {', '.join(STAGES)}.{nearest(stage, STAGES)}"
            )
    return tuple(
        (stage, parse_names(value[stage], f"{where}[{stage}]")) for stage in STAGES if stage in value
    )


def parse_choice(value: tuple[tuple[object, ...], ...], where: str = "dsa_kernel_backend") -> BackendChoice:
    """The canonical form itself, as a ``DSAConfig`` holds it; ``dataclasses.replace`` hands it back."""
    pairs = [entry for entry in value if len(entry) == 2 and isinstance(entry[0], str)]
    choice = {entry[0]: entry[1] for entry in pairs}
    if len(choice) != len(value):
        raise ConfigError(
            f"{where}: got {shown(value)}, expected pairs of a stage (or '*') and its backend names, each stage once"
        )
    if list(choice) == ["*"]:
        return (("*", parse_names(choice["*"], where)),)
    return parse_backend(choice, where)


def backend_text(choice: BackendChoice) -> str:
    return ";".join(
        ",".join(names) if stage == "*" else f"{stage}={','.join(names)}" for stage, names in choice
    )


def parse_fallback(value: object, where: str = "dsa_kernel_fallback") -> Fallback:
    word = _stripped(value)
    if isinstance(word, str):
        if word == "next":
            return "next"
        if word == "error":
            return "error"
    raise ConfigError(
        f"{where}: got {shown(value)}, supports 'next' (move on and say so) and 'error' (run what is named or raise)."
        f"{nearest(word, ('next', 'error'))}"
    )


def parse_flag(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    try:
        word = str(value).strip().lower()
    except Exception:  # a number with more digits than Python prints
        word = ""
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ConfigError(f"{where}: got {shown(value)}, supports true or false (also 1/0, yes/no, on/off)")


def parse_bytes(value: object, where: str = "memory_budget") -> int:
    """Bytes as an int, or text such as ``"512MiB"`` or ``"1.5 GB"``."""
    size: int | Decimal = 0
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match and match[2].lower() in _UNITS:
            # Not a float: from 2**53 on it would read back as another number, and far beyond as infinity.
            size = Decimal(match[1]) * _UNITS[match[2].lower()]
    if not 1 <= size <= _LARGEST:
        raise ConfigError(
            f"{where}: got {shown(value)}, expected a positive number of bytes up to 2**63 - 1, or text such as "
            f"'512MiB' or '2GiB'"
        )
    return int(size)


def parse_query_chunk(value: object, where: str = "query_chunk") -> QueryChunk:
    word = _stripped(value)
    if isinstance(word, str):
        if word == "auto":
            return "auto"
        if word == "off":
            return "off"
        size: int | Decimal = Decimal(word) if word.isdecimal() else 0
    else:
        size = word if isinstance(word, int) and not isinstance(word, bool) else 0
    if 1 <= size <= _LARGEST:
        return int(size)
    raise ConfigError(
        f"{where}: got {shown(value)}, supports a positive number of query rows up to 2**63 - 1, 'auto' or 'off'"
    )


def parse_profile(value: object, where: str = "profile") -> str:
    if isinstance(value, str) and value.strip() == "none":
        return "none"
    raise ConfigError(
        f"{where}: got {shown(value)}, supports 'none': this version orders backends by their declared rank and reads "
        f"no measured profile. Leave it unset."
    )
