"""``dsa-dispatch conformance NAME``: whether a backend honours the contract, claim by claim."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from dsa_dispatch._cli.output import emit, progress_console
from dsa_dispatch.testing import ConformanceCheck, ConformanceError, conformance_checks
from dsa_dispatch.testing.extent import Size
from dsa_dispatch.testing.judge import DeclinedHere, NotHere


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check and how it ended."""

    stage: str
    device: str
    check: str
    result: Literal["passed", "failed", "declined", "not here"]
    text: str = ""


def outcome_of(check: ConformanceCheck) -> Outcome:
    try:
        check.run()
    except ConformanceError as error:
        return Outcome(check.stage, check.device, check.name, "failed", str(error))
    except DeclinedHere as error:
        return Outcome(check.stage, check.device, check.name, "declined", str(error))
    except NotHere as error:
        return Outcome(check.stage, check.device, check.name, "not here", str(error))
    return Outcome(check.stage, check.device, check.name, "passed")


def conformance(
    name: Annotated[str, typer.Argument(help="The backend to check.")],
    stage: Annotated[str | None, typer.Option(help="Only this stage.")] = None,
    dtypes: Annotated[
        str,
        typer.Option(
            help="Run only these types, such as float16,float32: for a device that is wrong in others."
        ),
    ] = "",
    size: Annotated[
        str,
        typer.Option(help="small: every check on smaller cases, for a slow device such as an interpreter."),
    ] = "full",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List every check.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Check a backend against the contract. Exit status 1 when a check fails or a stage cannot run here.

    A declared call that the backend itself declines at run time is listed with its reason, and fails where nothing ran.
    """
    only = tuple(part.strip() for part in dtypes.split(",") if part.strip())
    every = conformance_checks(name, dtypes=only, size=cast(Size, size))
    checks = [check for check in every if stage in (None, check.stage)]
    if not checks:
        raise typer.BadParameter(f"{name} does not provide {stage}", param_hint="--stage")
    console = progress_console(json_, soft_wrap=True)
    outcomes = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=len(checks))
        for check in checks:
            progress.update(task, description=f"{check.stage}: {check.name}")
            outcomes.append(outcome_of(check))
            progress.advance(task)
    if json_:
        emit(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=2))
    else:
        limits = [*only, *([f"size {size}"] if size != "full" else [])]
        _show(console, f"{name} ({', '.join(limits)})" if limits else name, outcomes, verbose)
    if any(outcome.result in ("failed", "not here") for outcome in outcomes):
        raise typer.Exit(1)


def _show(console: Console, what: str, outcomes: Sequence[Outcome], verbose: bool) -> None:
    table = Table(
        Column("stage", no_wrap=True),
        "device",
        *(Column(name, justify="right", no_wrap=True) for name in ("passed", "declined", "failed")),
        Column("", no_wrap=True),
        title=f"Conformance of {what}",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for stage, device in dict.fromkeys((outcome.stage, outcome.device) for outcome in outcomes):
        mine = [outcome for outcome in outcomes if (outcome.stage, outcome.device) == (stage, device)]
        counts = Counter(outcome.result for outcome in mine)
        state = "[green]ok[/]"
        if counts["failed"]:
            state = "[red]BREAKS THE CONTRACT[/]"
        elif counts["not here"]:
            state = "[yellow]NOT CHECKED HERE[/]"
        table.add_row(
            stage, device, str(counts["passed"]), str(counts["declined"]), str(counts["failed"]), state
        )
    console.print(table)
    for checks, outcome in _grouped(outcomes):
        if outcome.result != "passed":
            console.print(f"{outcome.result.upper()} [{checks}] {outcome.text}", markup=False)
        elif verbose:
            console.print(f"passed {outcome.stage} {outcome.device} [{outcome.check}]", markup=False)
    failed = sum(outcome.result == "failed" for outcome in outcomes)
    if failed:
        console.print(
            f"{failed} of {len(outcomes)} checks failed. Each names a claim of the contract (dsa_dispatch._contract); "
            f"a value the kernel cannot do must leave the capability.",
            markup=False,
        )


def _grouped(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, Outcome]]:
    """The outcomes, those that differ in the declared value alone as one: a stage that fails its self-test is not
    served for any value, and says so once."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        value = outcome.check.removeprefix("accepts ")
        alike = outcome.text.replace(f": {value} is declared", ": it is declared")
        key = (outcome.stage, outcome.device, alike or outcome.check)
        groups.setdefault(key, []).append(outcome)
    for mine in groups.values():
        names = [mine[0].check, *(outcome.check.removeprefix("accepts ") for outcome in mine[1:])]
        yield ", ".join(names), mine[0]
