"""How many rows a stage is handed at once: from the bytes a row costs and the budget of the plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from dsa_dispatch._call import RowLayout
from dsa_dispatch._capability import Scratch
from dsa_dispatch._dispatch.check import kernel_call
from dsa_dispatch._dispatch.plan import Plan, StagePlan, plan_by_id
from dsa_dispatch._execution.notes import add_note
from dsa_dispatch._stages import Stage
from dsa_dispatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The transients of one stage of one call, by name, in bytes: those of a row and those of the whole call."""

    stages: tuple[StagePlan, ...]
    rows: int
    """Rows of the whole call."""
    chunk: int
    """Rows handed to the stage at once."""
    per_row: tuple[tuple[str, int], ...]
    fixed: tuple[tuple[str, int], ...]
    bound: str
    """What decided the chunk, for whoever asks why a call ran in pieces or in one."""
    budget: int
    """What the settings allow."""
    smallest_budget: int
    """The least that would do: of one row at a time, or of the whole call in one piece where that costs less."""

    @property
    def chunked(self) -> bool:
        return self.chunk < self.rows

    @property
    def row_bytes(self) -> int:
        return _bytes(self.per_row)

    @property
    def scratch_bytes(self) -> int:
        """What grows with the chunk; at most the budget, unless ``query_chunk="off"`` asked for one piece."""
        return self.row_bytes * self.chunk

    @property
    def fixed_bytes(self) -> int:
        return _bytes(self.fixed)


def plan_memory(
    plan: Plan,
    stages: tuple[StagePlan, ...],
    layout: RowLayout,
    *,
    core: tuple[tuple[str, int], ...] = (),
    fixed: tuple[tuple[str, int], ...] = (),
    handed_over: tuple[tuple[str, int], ...] = (),
    block_size: int | None = None,
) -> MemoryPlan:
    """Chunk size and transients. ``core`` and ``fixed`` are what the core itself allocates, per row and per call;
    ``handed_over`` is what the stage returns per row: a transient of each chunk, and of a call in one piece the result
    itself.

    A chunk is at least one row, whether it fits or not: ``require_budget`` refuses.
    """
    if plan.excluded:
        # Replanned after a run-time decline: it has the id of the plan it stands in for, but other stages.
        return _plan_memory(plan, stages, layout, core, fixed, handed_over, block_size)
    names = tuple(stage.stage for stage in stages)
    return _kept_memory(plan.id, names, layout, core, fixed, handed_over, block_size)


@functools.lru_cache(maxsize=1024)
def _kept_memory(
    plan_id: int,
    names: tuple[Stage, ...],
    layout: RowLayout,
    core: tuple[tuple[str, int], ...],
    fixed: tuple[tuple[str, int], ...],
    handed_over: tuple[tuple[str, int], ...],
    block_size: int | None,
) -> MemoryPlan:
    """Kept per size: asking every stage anew cost a third of the time that a small call spends outside its kernel."""
    plan = plan_by_id(plan_id)
    stages = tuple(plan.stage(name) for name in names)
    return _plan_memory(plan, stages, layout, core, fixed, handed_over, block_size)


def _plan_memory(
    plan: Plan,
    stages: tuple[StagePlan, ...],
    layout: RowLayout,
    core: tuple[tuple[str, int], ...],
    fixed: tuple[tuple[str, int], ...],
    handed_over: tuple[tuple[str, int], ...],
    block_size: int | None,
) -> MemoryPlan:
    call = dataclasses.replace(plan.call, batch=layout.batch, rows=layout.rows, keys=layout.keys)
    per_row, whole = list(core), list(fixed)
    for stage in stages:
        try:
            scratch: Scratch = stage.capability.scratch(kernel_call(call, stage.stage, stage.legalization))
        except Exception as error:
            add_note(error, f"raised by the scratch of backend {stage.backend}, stage {stage.stage}")
            raise
        per_row += [(f"{stage.stage}: {name}", size) for name, size in scratch.per_row]
        whole += [(f"{stage.stage}: {name}", size) for name, size in scratch.fixed]
    total = layout.batch * layout.rows
    budget = plan.options.memory_budget
    smallest = _smallest_budget(plan, _bytes(per_row), _bytes(handed_over), total, block_size)
    chunk, bound = _chunk(plan, total, _affordable(budget, per_row, total), block_size)
    if chunk < total:
        per_row += handed_over
        chunk, bound = _chunk(plan, total, _affordable(budget, per_row, total), block_size)
    return MemoryPlan(stages, total, chunk, tuple(per_row), tuple(whole), bound, budget, smallest)


def _smallest_budget(plan: Plan, row: int, handed_over: int, total: int, block_size: int | None) -> int:
    """The least budget that a call is not refused with. What a stage hands over is a transient of a chunk only, so few
    rows may cost less in one piece, unless a setting cuts them whatever the budget."""
    sizes = [size for size in (plan.query_chunk, block_size) if isinstance(size, int)]
    if min(sizes, default=total) < total:
        return row + handed_over
    if plan.query_chunk == "off":
        return row
    return min(row + handed_over, row * total)


def require_budget(*memories: MemoryPlan) -> None:
    """Raise ``ConfigError`` where the budget does not do for all of them; it names what does, so that whoever sets it
    is not refused by the next one."""
    if all(memory.smallest_budget <= memory.budget for memory in memories):
        return
    most = max(memories, key=lambda memory: memory.smallest_budget)
    costs = ", ".join(f"{name} {size}" for name, size in sorted(most.per_row, key=lambda entry: -entry[1]))
    where = " and ".join(f"{stage.stage} on {stage.backend}" for stage in most.stages)
    raise ConfigError(
        f"memory_budget: got {most.budget} bytes, but one row of {where} needs {most.row_bytes} bytes ({costs}). "
        f"Set memory_budget to at least {most.smallest_budget}."
    )


def _bytes(parts: Sequence[tuple[str, int]]) -> int:
    return sum(size for _, size in parts)


def _affordable(budget: int, per_row: Sequence[tuple[str, int]], total: int) -> int:
    row_bytes = _bytes(per_row)
    return budget // row_bytes if row_bytes else total


def _chunk(plan: Plan, total: int, affordable: int, block_size: int | None) -> tuple[int, str]:
    """Rows of a chunk, and the setting that decided it."""
    limits = []
    if plan.query_chunk != "off":
        limits.append((affordable, f"memory_budget={plan.options.memory_budget}"))
    if isinstance(plan.query_chunk, int):
        limits.append((plan.query_chunk, f"query_chunk={plan.query_chunk}"))
    if block_size is not None:
        limits.append((block_size, f"block_size={block_size}"))
    if not limits:
        return max(total, 1), "query_chunk=off"
    chunk, bound = min(limits, key=lambda limit: limit[0])
    return max(min(chunk, total), 1), bound
