"""All peers of a case, in turn, round after round: a card's clock drifts by several per cent, for all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from dsa_dispatch._bench.case import Case
from dsa_dispatch._bench.clock import Call, Clock
from dsa_dispatch._bench.inputs import Inputs, make_inputs
from dsa_dispatch._bench.peers import Peer, SitsOut, ran
from dsa_dispatch._registry.faults import raised

REFERENCE_TFLOPS: Final = 672.0
"""What one H200 gave on an 8192-cubed bf16 product; figures of CUDA devices are also given scaled to it."""


@dataclass(frozen=True, slots=True)
class Effort:
    """At most ``repeats`` rounds after ``warmup`` calls, fewer where a peer would take more than ``seconds``."""

    repeats: int = 20
    warmup: int = 3
    seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Result:
    """One peer on one case: times in milliseconds, scratch in bytes, TFLOP/s from ``Case.flops`` and the median."""

    case: Case
    peer: str
    state: Literal["measured", "sat out", "failed"]
    note: str = ""
    median: float | None = None
    least: float | None = None
    most: float | None = None
    repeats: int = 0
    tflops: float | None = None
    scaled_tflops: float | None = None
    product_tflops: float | None = None
    scratch: int | None = None


@dataclass(slots=True)
class _Running:
    peer: Peer
    call: Call
    repeats: int
    scratch: int | None
    times: list[float] = field(default_factory=list)


def measure(
    case: Case, peers: Sequence[Peer], clock: Clock, device: torch.device, effort: Effort
) -> list[Result]:
    """A result per peer. One that fails costs only itself; the process ends with all of them told apart.

    Raises ``ConfigError`` where the inputs of the case cannot be made.
    """
    inputs = make_inputs(case, device)
    running: list[_Running] = []
    results: list[Result] = []
    for peer in peers:
        try:
            running.append(_prepared(peer, inputs, clock, effort))
        except SitsOut as reason:
            results.append(Result(case, peer.name, "sat out", str(reason)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the others' figures are worth having
            results.append(_failed(case, peer, error))
    product = clock.product() if running else None
    for index in range(effort.repeats):
        for entry in running:
            if index < entry.repeats:
                try:
                    entry.times.append(clock.once(entry.call))
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    results.append(_failed(case, entry.peer, error))
                    entry.repeats, entry.times = 0, []
    scale = device.type == "cuda"
    measured = [_result(case, entry, product, scale) for entry in running if entry.times]
    return [*sorted(measured, key=lambda result: result.median or 0.0), *results]


def _prepared(peer: Peer, inputs: Inputs, clock: Clock, effort: Effort) -> _Running:
    begun = time.perf_counter()
    call = peer.prepare(inputs)
    for _ in range(effort.warmup):
        if time.perf_counter() - begun > effort.seconds:
            break
        call()
    _assert_ran(peer, inputs.case, call)
    scratch = clock.scratch(call)
    slow = max(clock.once(call) / 1e3, 1e-9)
    return _Running(peer, call, max(1, min(effort.repeats, int(effort.seconds / slow))), scratch)


def _assert_ran(peer: Peer, case: Case, call: Call) -> None:
    """A figure under a backend's name that another backend earned would be worse than none."""
    if peer.backend is None:
        return
    found = ran(call)
    for stage in case.stages:
        if stage in peer.stages and found.get(stage) != [peer.backend]:
            raise AssertionError(f"{stage} was to run on {peer.backend}, but ran on {found.get(stage)}")


def _result(case: Case, entry: _Running, product: float | None, scale: bool) -> Result:
    median = statistics.median(entry.times)
    tflops = case.flops / (median * 1e9)
    scaled = tflops * REFERENCE_TFLOPS / product if scale and product else None
    return Result(
        case,
        entry.peer.name,
        "measured",
        "",
        median,
        min(entry.times),
        max(entry.times),
        len(entry.times),
        tflops,
        scaled,
        product,
        entry.scratch,
    )


def _failed(case: Case, peer: Peer, error: BaseException) -> Result:
    return Result(case, peer.name, "failed", raised(error)[:1000])


def measure_all(
    cases: Sequence[Case], peers: Sequence[Peer], clock: Clock, device: torch.device, effort: Effort
) -> Iterator[list[Result]]:
    """``measure`` of each case; what a case held is given back before the next."""
    for case in cases:
        yield measure(case, peers, clock, device, effort)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
