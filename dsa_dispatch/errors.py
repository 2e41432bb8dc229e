"""Everything this library raises. A message says what was asked, what was found, what is possible, what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsa_dispatch._decline import Decline
from dsa_dispatch._typed import type_errors

if TYPE_CHECKING:
    from dsa_dispatch._dispatch.decision import Decision

__all__ = [
    "BackendDeclined",
    "ConfigError",
    "DSADispatchError",
    "InvalidInputError",
    "NoBackendError",
    "PluginError",
    "RankMismatchError",
    "UnknownBackendError",
]


class DSADispatchError(Exception):
    """Base of every error of this library."""


class InvalidInputError(DSADispatchError, ValueError):
    """The caller's arguments are wrong whatever the backend; raised before any backend is asked."""


class ConfigError(DSADispatchError, ValueError):
    """A setting is unknown, ill-formed or cannot be honoured."""


class UnknownBackendError(ConfigError):
    """A policy names a backend that is not registered."""


class NoBackendError(DSADispatchError, RuntimeError):
    """Nobody may serve the call under its policy. ``decision`` holds every backend with every reason."""

    def __init__(self, message: str, decision: Decision) -> None:
        super().__init__(message)
        self.decision = decision

    def __reduce__(self) -> tuple[type[NoBackendError], tuple[str, Decision]]:
        # Or the reason would be lost on its way out of a worker process.
        return type(self), (str(self), self.decision)


class BackendDeclined(DSADispatchError):
    """Raised by a backend, before any side effect, for what its capability cannot say; dispatch moves on.

    Raises ``PluginError`` when it is given anything but a well-typed ``Decline``.
    """

    def __init__(self, decline: Decline) -> None:
        found = (
            "; ".join(type_errors(decline, "Decline")) if isinstance(decline, Decline) else f"got {decline!r}"
        )
        if found:
            raise PluginError(
                f"BackendDeclined takes a Decline(DeclineCode.…, field, got, supported, hint), all text but the "
                f"code: {found}"
            )
        super().__init__(str(decline))
        self.decline = decline

    def __reduce__(self) -> tuple[type[BackendDeclined], tuple[Decline]]:
        return type(self), (self.decline,)


class PluginError(DSADispatchError):
    """A plugin's data or hook is not what the contract asks."""


class RankMismatchError(DSADispatchError):
    """Ranks of a group would decide differently."""
