"""The one mutable place of the library: the registry snapshot with what has been decided and counted under it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dsa_dispatch._policy.environment import reject_unknown_variables
from dsa_dispatch._registry.registry import Snapshot, load_plugins

if TYPE_CHECKING:
    from dsa_dispatch._dispatch.plan import Plan
    from dsa_dispatch._registry.availability import Availability


class Runtime:
    """Registry snapshot, process-wide settings, decision table and counters.

    Readers take no lock: every attribute but the counters is replaced, never changed in place.
    """

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.lock = threading.RLock()
        self.configured = ""
        self.plans: dict[Any, Plan] = {}
        self.counters: dict[tuple[str, ...], int] = {}
        self.warned: frozenset[tuple[str, ...]] = frozenset()
        self.availability: dict[tuple[str, ...], Availability] = {}
        self._snapshot = snapshot

    @property
    def snapshot(self) -> Snapshot:
        """Plugins are loaded at first use, so that importing the library imports no plugin."""
        snapshot = self._snapshot
        if snapshot is None:
            with self.lock:
                if self._snapshot is None:
                    reject_unknown_variables()
                    self._snapshot = load_plugins(Snapshot())
                snapshot = self._snapshot
        return snapshot

    def update(self, change: Callable[[Snapshot], Snapshot]) -> None:
        """Replace the snapshot and forget every decision taken under the old one."""
        with self.lock:
            self._snapshot = change(self.snapshot)
            self.plans = {}
            self.availability = {}

    def refresh(self) -> None:
        """Look again: environment, installed packages, devices. Registered backends stay."""
        reject_unknown_variables()
        with self.lock:
            self.plans = {}
            self.availability = {}
            self.warned = frozenset()

    def count(self, *key: str, by: int = 1) -> None:
        with self.lock:
            self.counters[key] = self.counters.get(key, 0) + by


_CURRENT = Runtime()


def current() -> Runtime:
    return _CURRENT


@contextmanager
def swapped(runtime: Runtime) -> Iterator[Runtime]:
    """Put another runtime in place, for tests. Process-wide, so not for concurrent use."""
    global _CURRENT
    before, _CURRENT = _CURRENT, runtime
    try:
        yield runtime
    finally:
        _CURRENT = before
