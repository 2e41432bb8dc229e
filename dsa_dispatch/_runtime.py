"""The one mutable place of the library: the registry snapshot with what has been decided and counted under it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dsa_dispatch._policy.environment import reject_unknown_variables
from dsa_dispatch._registry.registry import Snapshot, load_plugins
from dsa_dispatch.errors import PluginError

if TYPE_CHECKING:
    from dsa_dispatch._dispatch.plan import Plan
    from dsa_dispatch._registry.availability import Availability


class Runtime:
    """Registry snapshot, process-wide settings, decision table and counters.

    Readers take no lock: every attribute but the counters is replaced, never changed in place. ``epoch`` moves when
    what was decided may no longer hold; what was computed under an older one is used once and not kept.
    """

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.lock = threading.RLock()
        self.counting = threading.Lock()
        self.epoch = 0
        self.configured = ""
        self.plans: dict[Any, Plan] = {}
        self.counters: dict[tuple[str, ...], int] = {}
        self.warned: frozenset[tuple[str, ...]] = frozenset()
        self.availability: dict[tuple[str, ...], Availability] = {}
        self._snapshot = snapshot
        self._loading = False

    @property
    def snapshot(self) -> Snapshot:
        """Plugins are loaded at first use, so that importing the library imports no plugin."""
        snapshot = self._snapshot
        if snapshot is None:
            with self.lock:
                if self._snapshot is None:
                    self._snapshot = self._load()
                snapshot = self._snapshot
        return snapshot

    def _load(self) -> Snapshot:
        if self._loading:
            # A plugin's import came back here; what it registered would be lost when its own loading ends.
            raise PluginError(
                "the registry was used while plugins are being loaded; a plugin hands its backends over from the "
                "hook dsa_dispatch_backends() and calls nothing of dsa_dispatch at import"
            )
        reject_unknown_variables()
        self._loading = True
        try:
            return load_plugins(Snapshot())
        finally:
            self._loading = False

    def update(self, change: Callable[[Snapshot], Snapshot]) -> None:
        """Replace the snapshot and forget every decision taken under the old one."""
        with self.lock:
            self._snapshot = change(self.snapshot)
            self._forget()

    def refresh(self) -> None:
        """Look again: environment, installed packages, devices. Registered backends stay."""
        reject_unknown_variables()
        with self.lock:
            self._forget()
            self.warned = frozenset()

    def _forget(self) -> None:
        self.epoch += 1
        self.plans = {}
        self.availability = {}

    def count(self, *key: str) -> None:
        # A lock of its own: the other one is held while a backend is imported and tested.
        with self.counting:
            self.counters[key] = self.counters.get(key, 0) + 1

    def first_time(self, *event: str) -> bool:
        """True for one caller per event, until ``refresh()``: what is said once."""
        with self.counting:
            if event in self.warned:
                return False
            self.warned |= {event}
            return True


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
