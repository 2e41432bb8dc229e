"""Finding and reading configuration files, with errors that name the key at fault."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Final, get_args

import yaml
from pydantic import BaseModel, ValidationError

from dsa_dispatch._policy.values import nearest, shown
from dsa_dispatch._run_config.recipe import RunConfig
from dsa_dispatch.errors import ConfigError

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_SUFFIXES: Final = (".yaml", ".yml")


def preset_names() -> tuple[str, ...]:
    """Names of the shipped configurations, for ``load_preset``."""
    return tuple(sorted(path.stem for path in _preset_folder().glob("*.yaml")))


def load_preset(name_or_path: str | os.PathLike[str]) -> RunConfig:
    """The configuration of a shipped preset, or of a YAML file.

    A string without a folder and without a YAML suffix is a preset's name first and a file second.
    Raises ``ConfigError`` for an unknown name (with the nearest and all known), an unreadable file, and for every key
    that is unknown, missing or ill-valued.
    """
    # Callers pass what they were given: a value of a file, of an argument.
    text = os.fspath(name_or_path) if isinstance(name_or_path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise ConfigError(
            f"configuration {shown(name_or_path)}: got {type(name_or_path).__name__}, supports the name of a preset or "
            f"the path of a YAML file, as str or pathlib.Path. Presets: {', '.join(preset_names())}"
        )
    path = Path(text)
    if isinstance(name_or_path, str) and path.name == text and path.suffix not in _SUFFIXES:
        names = preset_names()
        if text.lower() in names:
            path = _preset_folder() / f"{text.lower()}.yaml"
        elif not _is_file(path):
            raise ConfigError(
                f"configuration {shown(text)} is neither a preset nor a file. Presets: {', '.join(names)}."
                f"{nearest(text.lower(), names)}"
            )
    elif not _is_file(path):
        raise ConfigError(
            f"configuration file {shown(text)} does not exist. Give a YAML file or one of the presets: "
            f"{', '.join(preset_names())}"
        )
    return read_config(path)


def read_config(path: Path) -> RunConfig:
    """The configuration in a YAML file, named after the file. Raises ``ConfigError`` on anything wrong with it."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(path)!r} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration file {str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"configuration file {str(path)!r}: expected a mapping with the keys {_keys_of(RunConfig)}, "
            f"got {type(data).__name__}"
        )
    return parse_config({"name": path.stem, **data}, where=path.name)


def parse_config(data: Mapping[str, Any], where: str = "configuration") -> RunConfig:
    """A ``RunConfig`` from plain data; ``where`` begins every message of the ``ConfigError`` it may raise."""
    try:
        return RunConfig.model_validate(dict(data))
    except ValidationError as error:
        # A misspelt key also leaves the right one missing: what is unknown comes first.
        details = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
        raise ConfigError("\n".join(_message(where, detail) for detail in details)) from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError) as error:  # a name too long, a folder that may not be entered
        raise ConfigError(f"configuration file {shown(str(path))} cannot be read: {error}") from error


def _preset_folder() -> Path:
    """Package data in a wheel; ``configs`` beside the package in a checkout.

    The checkout is recognised by its ``pyproject.toml``: a folder named ``configs`` beside an installed package
    belongs to somebody else.
    """
    checkout = _PACKAGE.parent
    candidates = [_PACKAGE / "_presets"]
    if (checkout / "pyproject.toml").is_file():
        candidates.append(checkout / "configs")
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"the shipped presets are missing: looked in {', '.join(str(folder) for folder in candidates)}. "
        f"Reinstall dsa-dispatch, or give the path of a YAML file"
    )


def _message(where: str, detail: Any) -> str:
    location = [str(part) for part in detail["loc"]]
    dotted = ".".join(location)
    kind = detail["type"]
    if kind == "extra_forbidden":
        owner = _model_at(location[:-1])
        section = f" in section {'.'.join(location[:-1])!r}" if location[:-1] else ""
        known = tuple(owner.model_fields)
        return (
            f"{where}: unknown key {location[-1]!r}{section}. Valid keys: {', '.join(known)}."
            f"{nearest(location[-1], known)}"
        )
    if kind == "missing":
        return f"{where}: key {dotted!r} is missing"
    text = str(detail["msg"]).removeprefix("Value error, ")
    if isinstance(detail["input"], (dict, BaseModel)):
        return f"{where}: {dotted + ': ' if dotted else ''}{text}"
    return f"{where}: {dotted}: got {detail['input']!r}; {text[:1].lower()}{text[1:]}"


def _model_at(location: list[str]) -> type[BaseModel]:
    """The model class of a section, found through the field's annotation (``X`` or ``X | None``)."""
    model: type[BaseModel] = RunConfig
    for part in location:
        annotation = model.model_fields[part].annotation
        choices = (annotation, *get_args(annotation))
        model = next(entry for entry in choices if isinstance(entry, type) and issubclass(entry, BaseModel))
    return model


def _keys_of(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)


class _UniqueKeys(yaml.SafeLoader):
    """YAML allows a repeated key and keeps the last one, which hides half of an edited file."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping",
                    node.start_mark,
                    f"key {key!r} is given twice",
                    key_node.start_mark,
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)
