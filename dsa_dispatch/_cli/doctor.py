"""``dsa-dispatch doctor``: what is wrong with an installation, with tracebacks. Imports and self-tests every
backend."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Column, Table

from dsa_dispatch._dispatch.device import device_info
from dsa_dispatch._policy.environment import VARIABLES, reject_unknown_variables
from dsa_dispatch._registry.availability import installation_declines, probe
from dsa_dispatch._runtime import current


def available_devices() -> tuple[torch.device, ...]:
    """The CPU, and every CUDA device that is here."""
    cuda = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return (torch.device("cpu"), *(torch.device("cuda", index) for index in cuda))


def doctor(
    tracebacks: Annotated[bool, typer.Option(help="Show the tracebacks of failures.")] = True,
) -> None:
    """Import and self-test every stage of every backend on every device, and report plugins that failed to load."""
    console = Console(soft_wrap=True)
    runtime = current()
    reject_unknown_variables()
    failures = runtime.snapshot.failures
    for failure in failures:
        console.print(
            f"plugin {failure.plugin!r} of {failure.distribution} failed at {failure.step}: {failure.error}",
            markup=False,
        )
        if tracebacks:
            console.print(failure.traceback, markup=False)
    table = Table(
        Column("backend", no_wrap=True),
        Column("stage", no_wrap=True),
        "device",
        "state",
        title="Import and self-test",
    )
    details: list[str] = []
    for entry in runtime.snapshot.ranked():
        for stage, spec in entry.spec.stages.items():
            for device in available_devices():
                state, detail = _state(entry.spec.name, stage, device, spec.capability.devices)
                table.add_row(entry.spec.name, stage, str(device), state)
                details += [detail] if detail else []
    console.print(table)
    if tracebacks:
        for detail in dict.fromkeys(details):
            console.print(detail, markup=False)
    for device in available_devices():
        info = device_info(device)
        capability = f", compute capability {info.compute_capability}" if info.compute_capability else ""
        console.print(f"{device}: {info.name}{capability}, {info.total_memory / 2**30:.1f} GiB", markup=False)
    console.print(f"torch {torch.__version__}; environment variables read: {', '.join(VARIABLES)}")
    if failures:
        raise typer.Exit(1)


def _state(name: str, stage: str, device: torch.device, devices: frozenset[str] | None) -> tuple[str, str]:
    """What to print in the table, and a traceback where there is one."""
    runtime = current()
    spec = runtime.snapshot.backends[name].spec
    missing = installation_declines(spec, stage)  # type: ignore[arg-type]  # the key of the spec's own mapping
    if missing:
        return "; ".join(str(decline) for decline in missing), ""
    if devices is not None and device.type not in devices:
        return f"not for {device.type}", ""
    found = probe(runtime, spec, stage, device)  # type: ignore[arg-type]
    if found.declines:
        return "; ".join(str(decline) for decline in found.declines), found.traceback
    return f"ready{' (' + found.provider + ')' if found.provider else ''}", ""
