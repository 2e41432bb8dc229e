"""Calling a backend: counted, with its faults named, and with the one exception that moves on to the next."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from dsa_dispatch._call import RowLayout
from dsa_dispatch._decline import Decline
from dsa_dispatch._dispatch.decide import LOGGER, replan
from dsa_dispatch._dispatch.plan import Plan, StagePlan
from dsa_dispatch._execution.memory import MemoryPlan
from dsa_dispatch._execution.notes import add_note
from dsa_dispatch._execution.results import check_results
from dsa_dispatch._execution.rows import Chunk, chunks
from dsa_dispatch._runtime import current
from dsa_dispatch._stages import Stage
from dsa_dispatch.errors import BackendDeclined

P = ParamSpec("P")
R = TypeVar("R")


class _MoveOn(Exception):
    """A backend declined at run time, before any side effect."""

    def __init__(self, stage: StagePlan, decline: Decline, rows: RowLayout | None) -> None:
        super().__init__(str(decline))
        self.stage = stage
        self.decline = decline
        self.rows = rows


def call_stage(stage: StagePlan, *args: Any, **kwargs: Any) -> Any:
    """Run the stage's function. Its exceptions propagate with a note that names backend and stage."""
    try:
        result = stage.function(*args, **kwargs)
        check_results(stage.backend, stage.stage, result, args, kwargs)
        return result
    except BackendDeclined as declined:
        raise _MoveOn(stage, declined.decline, kwargs.get("rows")) from declined
    except Exception as error:
        provider = f" ({stage.provider})" if stage.provider else ""
        note = f"raised by backend {stage.backend}{provider} in stage {stage.stage}"
        add_note(error, note)
        raise


def run_planned(plan: Plan, stages: tuple[Stage, ...], body: Callable[[Plan], R]) -> R:
    """Run ``body`` under ``plan``; where a backend declines at run time, again under a plan without it."""
    while True:
        try:
            result = body(plan)
        except _MoveOn as moved:
            plan = replan(plan, moved.stage, moved.decline, moved.rows)
            continue
        runtime = current()
        for name in stages:
            stage = plan.stage(name)
            runtime.count("run", name, stage.backend, stage.provider)
        return result


def planned_chunks(memory: MemoryPlan) -> Iterator[Chunk]:
    """The chunks of a call. Counted, and once per stage and outcome said, whether there were several and why."""
    yield from chunks(memory.rows, memory.chunk)
    runtime = current()
    outcome = "used" if memory.chunked else "declined"
    for stage in memory.stages:
        runtime.count("chunking", stage.stage, outcome)
    first = memory.stages[0]
    if runtime.first_time("chunking", first.stage, outcome):
        LOGGER.info(
            "%s on %s: query chunks %s: %d rows %s (%s). (said once per stage and outcome)",
            " and ".join(stage.stage for stage in memory.stages),
            first.backend,
            outcome,
            memory.rows,
            f"in chunks of {memory.chunk}" if memory.chunked else "in one piece",
            memory.bound,
        )


def opaque(function: Callable[P, R]) -> Callable[P, R]:
    """Body of an op: no autograd, no autocast, on the device of its first tensor."""

    @functools.wraps(function)
    def body(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(argument for argument in args if isinstance(argument, torch.Tensor))
        with torch.no_grad(), _without_autocast(first.device.type), _on(first.device):
            results: R = _owned(function(*args, **kwargs))
            return results

    return body


def _owned(results: Any) -> Any:
    """Results that are no views: autograd refuses to change a view in place (``out += x``, ``relu_``), and whether a
    result is one would depend on batch and chunks. What it views is ours and gone, so ``data`` is the whole truth.
    """
    if isinstance(results, torch.Tensor):
        return results.data if results._is_view() else results
    return tuple(_owned(result) for result in results)


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    # Autocast would round the products of an fp32 call to bf16; entering it costs 5 µs, asking costs 0.1.
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _cuda_device(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device):
        yield


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    # Kernels of several providers launch on the current device whatever their tensors say.
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return _cuda_device(device)
    return contextlib.nullcontext()
