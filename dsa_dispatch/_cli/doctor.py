"""``dsa-dispatch doctor``: what is wrong with an installation, with tracebacks. Imports and self-tests every
backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Column, Table

from dsa_dispatch._call import CallSpec
from dsa_dispatch._cli.output import results_console
from dsa_dispatch._decline import DeclineCode
from dsa_dispatch._dispatch.device import device_info
from dsa_dispatch._dispatch.explain import explain_call
from dsa_dispatch._dispatch.rules import rule_faults
from dsa_dispatch._policy.environment import VARIABLES, reject_unknown_variables
from dsa_dispatch._registry.availability import installation_declines, probe
from dsa_dispatch._registry.control import hook_plugins
from dsa_dispatch._registry.faults import raised, traced
from dsa_dispatch._registry.registry import PluginFailure, Registered
from dsa_dispatch._runtime import Runtime, current
from dsa_dispatch._stages import Stage
from dsa_dispatch.errors import PluginError


def available_devices() -> tuple[torch.device, ...]:
    """The CPU, and every CUDA device that is here."""
    cuda = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return (torch.device("cpu"), *(torch.device("cuda", index) for index in cuda))


def doctor(
    tracebacks: Annotated[bool, typer.Option(help="Show the tracebacks of failures.")] = True,
) -> None:
    """Import and self-test every stage of every backend on every device; report plugins that failed to load, and hooks
    that fail on a sample call. Exit status 1 when a plugin or an installed backend is broken; a missing package,
    another device or an unsupported version is no fault."""
    console = results_console(soft_wrap=True)
    runtime = current()
    reject_unknown_variables()
    failures = (*runtime.snapshot.failures, *hook_failures(runtime))
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
    skipped: list[str] = []
    mismatches: list[str] = []
    missing: list[str] = []
    broken = False
    for entry in runtime.snapshot.ranked():
        for stage, spec in entry.spec.stages.items():
            for device in available_devices():
                state, detail = _state(entry, stage, device, spec.capability.devices)
                table.add_row(entry.spec.name, stage, str(device), escape(state))
                reason = _skipped(entry, stage, device)
                if reason:
                    skipped.append(f"{entry.spec.name} {stage} on {device}: self-test skipped: {reason}")
                if detail:
                    broken = True
                    details.append(f"{entry.spec.name} {stage} on {device}, {entry.origin}:\n{detail}")
        missing += _missing(entry)
        mismatch = _api_mismatch(entry)
        if mismatch:
            mismatches.append(f"backend {entry.spec.name!r}, {entry.origin}: {mismatch}")
    console.print(table)
    for line in [*map(str, hook_plugins()), *missing, *skipped]:
        console.print(line, markup=False)
    for mismatch in mismatches:
        console.print(mismatch, markup=False)
    if tracebacks:
        for detail in dict.fromkeys(details):
            console.print(detail, markup=False)
    for device in available_devices():
        info = device_info(device)
        capability = f", compute capability {info.compute_capability}" if info.compute_capability else ""
        console.print(f"{device}: {info.name}{capability}, {info.total_memory / 2**30:.1f} GiB", markup=False)
    console.print(f"torch {torch.__version__}; environment variables read: {', '.join(VARIABLES)}")
    if failures or mismatches or broken:
        raise typer.Exit(1)


def hook_failures(runtime: Runtime) -> Iterator[PluginFailure]:
    """Call every policy and observer hook once, each by itself, with a sample call: dispatch itself passes over one
    that raises, and says so in the log only."""
    manager = runtime.snapshot.plugins
    call = CallSpec("run_fused_qk_topk")
    order = tuple(entry.spec.name for entry in runtime.snapshot.ranked())
    for plugin in manager.get_plugins():
        others = [other for other in manager.get_plugins() if other is not plugin]
        name = manager.get_name(plugin) or repr(plugin)
        for hook, arguments in (
            ("dsa_dispatch_order", {"call": call, "candidates": order}),
            ("dsa_dispatch_on_decision", {"decision": explain_call(call)}),
        ):
            try:
                result = manager.subset_hook_caller(hook, others)(**arguments)
                if hook == "dsa_dispatch_order" and result is not None and sorted(result) != sorted(order):
                    raise PluginError(f"{hook} returned {result!r}, not a permutation of {order!r}")
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                yield PluginFailure(
                    name, runtime.snapshot.distribution_of(plugin), hook, raised(error), traced(error)
                )


def _api_mismatch(entry: Registered) -> str:
    declines = installation_declines(entry.spec, next(iter(entry.spec.stages)))
    return "; ".join(str(decline) for decline in declines if decline.code == DeclineCode.API_MISMATCH)


def _missing(entry: Registered) -> list[str]:
    """What the stages of a backend miss, each said once, then how to get it."""
    declines = [why for stage in entry.spec.stages for why in installation_declines(entry.spec, stage)]
    shown = [why for why in declines if why.code is not DeclineCode.API_MISMATCH]
    lines = [f"{entry.spec.name}: {why.without_hint()}" for why in shown]
    return list(dict.fromkeys([*lines, *(f"  {why.hint.removesuffix('.')}" for why in shown if why.hint)]))


def _state(
    entry: Registered, stage: Stage, device: torch.device, devices: frozenset[str] | None
) -> tuple[str, str]:
    """What to print in the table, and a traceback where there is one."""
    runtime = current()
    spec = entry.spec
    missing = installation_declines(spec, stage)
    if missing:
        return ", ".join(dict.fromkeys(decline.code.value for decline in missing)), ""
    if devices is not None and device.type not in devices:
        return f"not for {device.type}", ""
    found = probe(runtime, spec, stage, device)
    if found.declines:
        return "; ".join(str(decline) for decline in found.declines), found.traceback
    faults = rule_faults(spec.stages[stage].capability, stage, device.type)
    if faults:
        return "; ".join(str(fault.decline) for fault in faults), "\n".join(
            fault.traceback for fault in faults
        )
    tested = ", self-test skipped" if found.skipped else ""
    return f"ready{' (' + found.provider + ')' if found.provider else ''}{tested}", ""


def _skipped(entry: Registered, stage: Stage, device: torch.device) -> str:
    """Why a self-test was left out, of a stage whose state has been asked for."""
    known = current().availability.get((entry.spec.name, stage, str(device)))
    return known.skipped if known is not None else ""
