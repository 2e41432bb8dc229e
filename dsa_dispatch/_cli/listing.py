"""``dsa-dispatch list``: who is registered, and what is missing. Reads metadata only."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from dsa_dispatch._cli.output import emit, results_console
from dsa_dispatch._registry.control import hook_plugins, list_backends
from dsa_dispatch._run_config import preset_names


def list_(json_: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """List backends, plugins that have a part in decisions, and presets."""
    backends = list_backends()
    if json_:
        entries = [{**dataclasses.asdict(info), "installed": info.installed} for info in backends]
        plugins = [dataclasses.asdict(plugin) for plugin in hook_plugins()]
        data = {"backends": entries, "plugins": plugins, "presets": preset_names()}
        emit(json.dumps(data, indent=2))
        return
    table = Table(
        Column("backend", no_wrap=True),
        "rank",
        "installed",
        "stages",
        "from",
        title="Backends, in the order of auto",
    )
    for info in backends:
        state = "yes" if info.installed else "no"
        table.add_row(info.name, str(info.rank), state, ", ".join(info.stages), escape(info.origin))
    console = results_console()
    console.print(table)
    for info in backends:
        for line in [
            *(f"{info.name}: {reason}" for reason in info.missing),
            *(f"  {how}" for how in info.install),
        ]:
            emit(line)
    for plugin in hook_plugins():
        emit(str(plugin))
    console.print("presets: " + ", ".join(preset_names()))
