"""What is kept of a run: where it ran, on what, how, and every result; and the table for a reader."""

from __future__ import annotations

import dataclasses
import json
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import torch

from dsa_dispatch._bench.clock import Clock
from dsa_dispatch._bench.measure import REFERENCE_TFLOPS, Effort, Result
from dsa_dispatch._capability import AnyOf
from dsa_dispatch._registry.packages import installed_version
from dsa_dispatch._runtime import current
from dsa_dispatch._version import __version__


def record(
    results: Sequence[Result],
    clock: Clock,
    device: torch.device,
    effort: Effort,
    command: Sequence[str],
    commit: str,
) -> str:
    """JSON of a run."""
    document: dict[str, Any] = {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if device.type == "cuda"
        else "",
        "versions": _versions(),
        "command": shlex.join(command),
        "commit": commit or _output("git", "rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "effort": dataclasses.asdict(effort),
        "product": clock.product_name,
        "results": [
            {
                **{
                    key: value for key, value in dataclasses.asdict(result).items() if value not in (None, "")
                },
                "flops": result.case.flops,
            }
            for result in results
        ],
    }
    return json.dumps(document, indent=1, ensure_ascii=False)


def _processor() -> str:
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    """The interpreter, and every package that a registered backend asks for, where it is installed."""
    names = {"torch", "triton"}
    for entry in current().snapshot.ranked():
        needed = [*entry.spec.packages]
        for stage in entry.spec.stages.values():
            needed += stage.capability.packages
        for package in needed:
            options = package.alternatives if isinstance(package, AnyOf) else (package,)
            names |= {option.distribution for option in options}
    found = {"python": platform.python_version(), "dsa-dispatch": __version__}
    for name in sorted(names):
        release = installed_version(name)
        if release:
            found[name] = release
    return found


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def table(results: Sequence[Result], clock: Clock) -> str:
    """Markdown, aligned, so that it reads in a terminal and in a document; below it who sat out, and why."""
    scaled = any(result.scaled_tflops is not None for result in results)
    heads = [
        "case",
        "peer",
        "ms",
        "TFLOP/s",
        *([f"at {REFERENCE_TFLOPS:.0f}"] if scaled else []),
        "scratch MiB",
    ]
    rows = []
    for result in results:
        if result.state == "measured":
            figures = [_figure(result.median), _figure(result.tflops)]
            figures += [_figure(result.scaled_tflops)] if scaled else []
            figures.append("" if result.scratch is None else f"{result.scratch / 2**20:.1f}")
            rows.append([result.case.title, result.peer, *figures])
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    rule = ["-" * width if column < 2 else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    lines = [_line(heads, widths), _line(rule, widths), *(_line(row, widths) for row in rows)]
    others: dict[tuple[str, str, str], int] = {}
    for result in results:
        if result.state != "measured":
            key = (result.state, result.peer, result.note)
            others[key] = others.get(key, 0) + 1
    notes = [
        f"{peer} {state} {count} case{'s' if count > 1 else ''}: {note}"
        for (state, peer, note), count in others.items()
    ]
    products = [result.product_tflops for result in results if result.product_tflops]
    if products:
        low, high = (f"{product:.3g}" for product in (min(products), max(products)))
        notes.append(f"{clock.product_name} product: {low} to {high} TFLOP/s in the same run")
    return "\n".join([*notes, "", *lines])


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"
