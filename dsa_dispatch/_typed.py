"""Whether the fields of a dataclass hold what their annotations say: third-party data is looked at when it arrives.

One backend with ``rank="high"`` would otherwise fail every later call of every other backend.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def type_errors(value: Any, where: str) -> Iterator[str]:
    """One text per field, of ``value`` and of the dataclasses in it, that holds another type than declared."""
    kind: Any = type(value)
    for name, annotation in _hints(kind).items():
        found = getattr(value, name)
        path = f"{where}, field {name}"
        if not _matches(found, annotation):
            yield f"{path}: got {found!r}, expected {_shown(annotation)}{_nearest_name(found, annotation)}"
            continue
        entries = found if isinstance(found, tuple) else (found,)
        for entry in entries:
            if dataclasses.is_dataclass(entry):
                yield from type_errors(entry, path)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _matches(value: object, annotation: Any) -> bool:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_matches(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if origin is collections.abc.Callable:
        # Plans are looked up by what they hold.
        return callable(value) and type(value).__hash__ is not None
    if origin is frozenset:
        return isinstance(value, frozenset) and all(_matches(entry, arguments[0]) for entry in value)
    if origin is tuple:
        return isinstance(value, tuple) and _matches_entries(value, arguments)
    if origin is not None:
        return isinstance(value, Mapping) if issubclass(origin, Mapping) else isinstance(value, origin)
    if annotation in (int, float):
        # True is an int to Python, and a limit of True is a mistake.
        allowed = (int,) if annotation is int else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _matches_entries(value: tuple[object, ...], arguments: tuple[Any, ...]) -> bool:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return all(_matches(entry, arguments[0]) for entry in value)
    return len(value) == len(arguments) and all(
        _matches(entry, argument) for entry, argument in zip(value, arguments, strict=True)
    )


def _nearest_name(found: object, annotation: Any) -> str:
    """The known name that a misspelt one, of a set of names or alone, may have meant."""
    arguments = get_args(annotation)
    if get_origin(annotation) is frozenset and isinstance(found, frozenset):
        wrong = sorted(
            entry for entry in found if isinstance(entry, str) and not _matches(entry, arguments[0])
        )
        return _nearest_name(wrong[0], arguments[0]) if wrong else ""
    if get_origin(annotation) is not Literal or not isinstance(found, str):
        return ""
    close = difflib.get_close_matches(found, [name for name in arguments if isinstance(name, str)], 1, 0.5)
    return f". Did you mean {close[0]!r}?" if close else ""


def _shown(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
