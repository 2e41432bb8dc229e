"""``dsa-dispatch check``: every available backend against fp64 formulas, on this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from dsa_dispatch._cli.doctor import available_devices
from dsa_dispatch._cli.dtypes import ALIASES
from dsa_dispatch._cli.output import emit, progress_console
from dsa_dispatch._registry import selftest
from dsa_dispatch._registry.availability import installation_declines, probe
from dsa_dispatch._registry.faults import raised
from dsa_dispatch._registry.registry import Registered
from dsa_dispatch._registry.selfcase import SelfTestSkipped
from dsa_dispatch._runtime import current
from dsa_dispatch._stages import Stage
from dsa_dispatch.errors import UnknownBackendError

LIMITS: Final = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 6e-3}
"""Relative Frobenius error against fp64: rounding of the inputs' type with a margin; bf16 as the contract promises."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One stage of one backend in one dtype on one device."""

    backend: str
    stage: str
    device: str
    dtype: str
    worst: str
    error: float | None
    limit: float
    passed: bool | None
    """None where the declaration accepts no small call, so that nothing was compared; ``note`` says why."""
    note: str = ""


def outcomes(only: str | None = None) -> Iterator[tuple[Registered, Stage, torch.device, str]]:
    """What there is to check: stages that can be used here, in every dtype they declare."""
    runtime = current()
    for entry in runtime.snapshot.ranked():
        if only not in (None, entry.spec.name):
            continue
        for stage, spec in entry.spec.stages.items():
            if installation_declines(entry.spec, stage):
                continue
            for device in available_devices():
                if spec.capability.devices is None or device.type in spec.capability.devices:
                    for dtype in LIMITS:
                        if dtype in spec.capability.dtypes:
                            yield entry, stage, device, dtype


def judge(entry: Registered, stage: Stage, device: torch.device, dtype: str) -> Outcome:
    """Run one stage on random ids with holes, duplicates and empty rows, and compare."""
    name, limit = entry.spec.name, LIMITS[dtype]
    found = probe(current(), entry.spec, stage, device)
    if found.function is None:
        reasons = "; ".join(str(decline) for decline in found.declines)
        return Outcome(name, stage, str(device), dtype, "", None, limit, False, reasons)
    try:
        errors = selftest.measure(
            found.function, entry.spec.stages[stage].capability, stage, device, dtype, large=True
        )
    except KeyboardInterrupt:
        raise
    except SelfTestSkipped as reason:
        return Outcome(name, stage, str(device), dtype, "", None, limit, None, f"skipped: {reason}")
    except BaseException as error:  # the report is the point: one broken stage must not hide the others
        note = raised(error)
        return Outcome(name, stage, str(device), dtype, "", None, limit, False, note)
    worst = max(errors, key=lambda what: errors[what])
    return Outcome(name, stage, str(device), dtype, worst, errors[worst], limit, errors[worst] <= limit)


def check(
    backend: Annotated[str | None, typer.Argument(help="Only this backend.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Compare every available backend with fp64 formulas. Exit status 1 when one is wrong, or when nothing of the one
    that is named could be compared. A declaration that accepts no small call is skipped, with its reason."""
    known = current().snapshot.backends
    if backend is not None and backend not in known:
        raise UnknownBackendError(
            f"check: unknown backend {backend!r}; registered: {', '.join(sorted(known))}"
        )
    console = progress_console(json_)
    work = list(outcomes(backend))
    results = [judge(*case) for case in track(work, "checking", console=console, transient=True)]
    if json_:
        emit(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
    else:
        _show(console, results)
    if backend is not None and not results:
        for stage in known[backend].spec.stages:
            missing = installation_declines(known[backend].spec, stage)
            why = "; ".join(str(decline) for decline in missing) or "no device here that it declares"
            console.print(f"{backend} {stage} not checked: {why}", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    wrong = any(result.passed is False for result in results)
    if wrong or (backend is not None and not any(result.passed for result in results)):
        raise typer.Exit(1)


_STATES: Final = {True: "[green]ok[/]", False: "[red]WRONG[/]", None: "[yellow]skipped[/]"}


def _show(console: Console, results: Sequence[Outcome]) -> None:
    """A table per backend, which leaves the other columns room at 80 characters; reasons below, in full."""
    short = {name: alias for alias, name in ALIASES.items()}
    for backend in dict.fromkeys(result.backend for result in results):
        mine = [result for result in results if result.backend == backend]
        table = Table(
            *(Column(name, no_wrap=True) for name in ("stage", "device", "dtype")),
            Column("worst", overflow="fold"),
            *(Column(name, no_wrap=True) for name in ("error", "limit", "")),
            title=backend,
            title_justify="left",
            box=SIMPLE_HEAD,
        )
        for result in mine:
            table.add_row(
                result.stage,
                result.device,
                short[result.dtype],
                result.worst or "-",
                "-" if result.error is None else f"{result.error:.1e}",
                f"{result.limit:.0e}",
                _STATES[result.passed],
            )
        console.print(table)
        notes = [
            f"{result.backend} {result.stage} on {result.device} in {result.dtype}: {result.note}"
            for result in mine
            if result.note
        ]
        for note in notes:
            console.print(note, markup=False, soft_wrap=True)
