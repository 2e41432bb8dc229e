"""The pluggy hooks a plugin may implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import pluggy

from dsa_dispatch._backend import BackendSpec
from dsa_dispatch._call import CallSpec

if TYPE_CHECKING:
    from dsa_dispatch._dispatch.decision import Decision

PROJECT: Final = "dsa_dispatch"
ENTRY_POINT_GROUP: Final = "dsa_dispatch.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def dsa_dispatch_backends() -> Sequence[BackendSpec]:  # type: ignore[empty-body]  # a specification has no body
    """The backends this plugin brings. Called once; must not import kernels."""


@hookspec
def dsa_dispatch_on_decision(decision: Decision) -> None:
    """Observe every new decision (not every call: a cached one is not decided again)."""


@hookspec(firstresult=True)
def dsa_dispatch_order(call: CallSpec, candidates: tuple[str, ...]) -> Sequence[str] | None:
    """Reorder the candidates of a stage. The first plugin that returns a permutation wins; None leaves it to others.

    Must be pure: the same arguments give the same order on every rank. ``call`` carries no lengths: its batch, rows
    and keys are 1, since one decision serves calls of many lengths.
    """
