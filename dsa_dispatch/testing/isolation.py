"""A registry of one's own, so that tests neither see nor leave anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dsa_dispatch._backend import BackendSpec
from dsa_dispatch._registry.registry import Snapshot, load_plugins, with_backend
from dsa_dispatch._runtime import Runtime, swapped


@contextmanager
def isolated_registry(
    *backends: BackendSpec, installed: bool = False, plugins: Iterable[object] = ()
) -> Iterator[Runtime]:
    """A fresh registry with ``backends`` alone, or beside the ``installed`` ones; fresh counters, settings and tables.

    ``plugins`` are objects with pluggy hooks. Replaces the registry of the whole process until the block ends, so it is
    not for concurrent tests in one process. As a fixture::

        @pytest.fixture
        def registry():
            with isolated_registry(installed=True) as runtime:
                yield runtime
    """
    snapshot = load_plugins(Snapshot()) if installed else Snapshot()
    for plugin in plugins:
        snapshot.plugins.register(plugin)
    for spec in backends:
        snapshot = with_backend(snapshot, spec, "isolated_registry()")
    with swapped(Runtime(snapshot)) as runtime:
        yield runtime
