"""``dsa-dispatch run``: train the small model of a configuration through the dispatch layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsa_dispatch._cli.output import progress_console, results
from dsa_dispatch._run_config import load_preset


def run(
    config: Annotated[
        str, typer.Argument(help="A preset with a training section, or a YAML file.")
    ] = "quickstart",
    text: Annotated[
        Path | None,
        typer.Option(help="Train on this file. Default: the sources of Python's standard library here."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    backend: Annotated[
        str | None, typer.Option(help="dsa_kernel_backend: auto, none, a name, a list, or stage=name;...")
    ] = None,
    fallback: Annotated[str | None, typer.Option(help="dsa_kernel_fallback: next or error.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps, instead of the recipe's.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Train a small language model on real text and show what ran."""
    from dsa_dispatch._quickstart import run as train_and_report  # the model is not needed by other commands

    train_and_report(
        load_preset(config),
        text=text,
        device=device,
        steps=steps,
        backend=backend,
        fallback=fallback,
        json=json_,
        output=results(),
        console=progress_console(json_),
    )
