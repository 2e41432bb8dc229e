"""Which backend ran: a test of a backend proves nothing when the call went elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dsa_dispatch._dispatch.statistics import stats


@contextmanager
def assert_backend_ran(backend: str, *stages: str) -> Iterator[None]:
    """Assert that inside the block every named stage ran, and ran on ``backend`` alone.

    Without stages: at least one stage ran, and every one that ran was on ``backend``. Raises ``AssertionError``.
    """
    before = stats().runs
    yield
    new = {
        key: count - before.get(key, 0) for key, count in stats().runs.items() if count > before.get(key, 0)
    }
    ran: dict[str, set[str]] = {}
    for stage, name, _ in new:
        ran.setdefault(stage, set()).add(name)
    wanted = stages or tuple(ran)
    if not wanted:
        raise AssertionError(f"expected {backend} to run, but no stage ran at all")
    for stage in wanted:
        if ran.get(stage, set()) != {backend}:
            found = ", ".join(sorted(ran.get(stage, ()))) or "nothing"
            raise AssertionError(f"expected {stage} to run on {backend}, but it ran on {found}")
