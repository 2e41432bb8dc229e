"""What ran, what declined, what was decided: counters, read as a frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from dsa_dispatch._policy.values import nearest
from dsa_dispatch._runtime import current
from dsa_dispatch._stages import GROUP_STAGES, OPERATION_GROUPS, STAGES
from dsa_dispatch.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts since the start of the process or the last ``reset_stats()``."""

    runs: Mapping[tuple[str, str, str], int]
    """(stage, backend, provider) to how often it ran, once per call whatever its chunks."""
    declines: Mapping[tuple[str, str, str], int]
    """(stage, backend, code) to how often a new decision met it."""
    decisions: Mapping[str, int]
    """Operation to how often one of its stages was decided, cached decisions included."""
    misses: Mapping[str, int]
    """Operation to how often a decision was not found in the table."""
    chunking: Mapping[tuple[str, str], int]
    """(stage, outcome) to how many calls: ``"used"`` ran in several query chunks; ``"declined"`` ran in one piece,
    since no memory_budget, query_chunk or block_size asked for less (no backend declined anything). The log says at
    INFO, once per stage and outcome, which setting decided."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            object.__setattr__(self, entry.name, MappingProxyType(dict(getattr(self, entry.name))))

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping cannot be pickled, and worker processes report their counters.
        return type(self), tuple(dict(getattr(self, entry.name)) for entry in fields(self))

    def ran(self, stage: str) -> dict[str, int]:
        """Backend to number of runs of one stage. Raises ``InvalidInputError`` for what is no stage."""
        if stage not in STAGES:
            parts = OPERATION_GROUPS.get(stage, ())
            made_of = ", ".join(name for group in parts for name in GROUP_STAGES[group])
            raise InvalidInputError(
                f"Stats.ran: {stage!r} is an operation, made of the stages {made_of}"
                if made_of
                else f"Stats.ran: unknown stage {stage!r}. Stages: {', '.join(STAGES)}.{nearest(stage, STAGES)}"
            )
        counts: dict[str, int] = {}
        for (name, backend, _), count in self.runs.items():
            if name == stage:
                counts[backend] = counts.get(backend, 0) + count
        return counts


def stats() -> Stats:
    """The counters as they stand."""
    runtime = current()
    with runtime.counting:
        counters = dict(runtime.counters)

    def triples(kind: str) -> Mapping[tuple[str, str, str], int]:
        return {(key[1], key[2], key[3]): count for key, count in counters.items() if key[0] == kind}

    def names(kind: str) -> Mapping[str, int]:
        return {key[1]: count for key, count in counters.items() if key[0] == kind}

    chunking = {(key[1], key[2]): count for key, count in counters.items() if key[0] == "chunking"}
    return Stats(triples("run"), triples("decline"), names("decision"), names("miss"), chunking)


def reset_stats() -> None:
    """Set every counter to zero. Cached decisions and warnings already given stay."""
    runtime = current()
    with runtime.counting:
        runtime.counters = {}
