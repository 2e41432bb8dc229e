"""``use_backend`` and ``configure``: the two ways to set a policy from code beside the explicit argument."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import torch

from dsa_dispatch._policy.config import DSAConfig, config_from_mapping, parse_text
from dsa_dispatch._policy.policy import CONTEXT, check_names, overlay
from dsa_dispatch._runtime import current
from dsa_dispatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Layer:
    """An open block and the text of the settings that it replaced."""

    block: use_backend
    outer: str


_LAYERS: Final[ContextVar[tuple[_Layer, ...]]] = ContextVar("dsa_dispatch_policy_layers", default=())
"""The open blocks of this thread or task. Not kept in the object: one may be open in two threads."""


class use_backend:  # a context manager is named like the function it reads as
    """Prefer backends inside a ``with`` block, in this thread or task; the strongest of all settings.

    ``backend`` as ``DSAConfig.dsa_kernel_backend``, or None to keep it; other settings by their short names. A block
    inside another inherits what it does not name. Wrap a compiled call in it; inside one it is a ``ConfigError``.
    Leaving a block removes its own settings, whatever blocks were opened since; leaving one that was opened in another
    thread or task is a ``ConfigError``.
    Raises ``ConfigError`` on entry for a value that cannot be meant, ``UnknownBackendError`` for an unknown name.
    """

    def __init__(
        self,
        backend: Any = None,
        *,
        fallback: str | None = None,
        deterministic: bool | None = None,
        memory_budget: int | str | None = None,
        query_chunk: int | str | None = None,
        debug_checks: bool | None = None,
    ) -> None:
        self._config = DSAConfig(
            dsa_kernel_backend=backend,
            dsa_kernel_fallback=fallback,
            deterministic=deterministic,
            memory_budget=memory_budget,
            query_chunk=query_chunk,
            debug_checks=debug_checks,
        )

    def __enter__(self) -> DSAConfig:
        """The settings in force inside the block."""
        if torch.compiler.is_compiling():
            raise ConfigError(
                "use_backend inside a compiled function would be fixed at compile time; put it around the compiled call"
            )
        check_names(self._config, current().snapshot.names())
        outer = CONTEXT.get()
        merged = overlay(parse_text(outer), self._config)
        _LAYERS.set((*_LAYERS.get(), _Layer(self, outer)))
        CONTEXT.set(merged.text)
        return merged

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        layers = _LAYERS.get()
        place = max((place for place, layer in enumerate(layers) if layer.block is self), default=None)
        if place is None:
            raise ConfigError(
                "use_backend: this block was opened in another thread or task, where its settings stay in force, or "
                "not at all. Close a generator that holds a block where it was opened; to run a whole generator "
                "elsewhere, open the block there"
            )
        kept, text = layers[:place], layers[place].outer
        # A generator closed late leaves a block that is not the innermost: those inside it lose what they inherited.
        for layer in layers[place + 1 :]:
            kept = (*kept, _Layer(layer.block, text))
            text = overlay(parse_text(text), layer.block._config).text
        _LAYERS.set(kept)
        CONTEXT.set(text)


def configure(config: DSAConfig | Mapping[str, Any] | None) -> None:
    """Set the process-wide settings, weaker than ``use_backend`` and an explicit config; None clears them.

    Raises ``ConfigError`` on an unknown key or value, ``UnknownBackendError`` for an unknown name.
    """
    if config is None:
        config = DSAConfig()
    elif isinstance(config, Mapping):
        config = config_from_mapping(config, "configure()")
    elif not isinstance(config, DSAConfig):
        raise ConfigError(
            f"configure(): got {type(config).__name__}, supports a DSAConfig, a mapping or None"
        )
    runtime = current()
    check_names(config, runtime.snapshot.names())
    with runtime.lock:
        runtime.configured = config.text
