"""``explain`` runs an operation up to its first kernel: while it records, decisions are kept and nothing executes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from dsa_dispatch._dispatch.decision import Decision

RECORDED: Final[ContextVar[list[Decision] | None]] = ContextVar("dsa_dispatch_recorded", default=None)

NO_PLAN: Final = -1
"""The plan id that ``decide`` returns while recording."""


class Explained(BaseException):
    """Ends a recorded operation where its first kernel would run. Not an ``Exception``: no handler should keep it."""


@contextmanager
def recording() -> Iterator[list[Decision]]:
    decisions: list[Decision] = []
    token = RECORDED.set(decisions)
    try:
        yield decisions
    except Explained:
        pass
    finally:
        RECORDED.reset(token)
