"""What a run tells: frozen data, and how it looks on a terminal or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text as Styled

from dsa_dispatch._quickstart.train import StepRecord


@dataclass(frozen=True, slots=True)
class StageRun:
    """How often a backend ran a stage during the run; ``provider`` names the kernel where the backend tells."""

    stage: str
    backend: str
    provider: str
    runs: int


@dataclass(frozen=True, slots=True)
class RunReport:
    """One training run. Losses are in nats per token; ``last`` is the mean of the last steps."""

    config: str
    device: str
    dtype: str
    text: str
    text_digest: str
    training_tokens: int
    held_out_tokens: int
    vocabulary: int
    parameters: int
    steps: int
    first_loss: float
    last_loss: float
    held_out_before: float
    held_out_after: float
    first_indexer_loss: float
    last_indexer_loss: float
    tokens_per_second: float
    training_seconds: float
    seconds: float
    backends: tuple[StageRun, ...]
    decisions: int
    """Times a stage was decided, from the table or anew."""
    decisions_anew: int
    prompt: str
    continuation: str
    records: tuple[StepRecord, ...]

    def to_json(self) -> str:
        """All fields, one document, non-ASCII text as it stands."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=1)


def show_progress(records: Iterable[StepRecord], steps: int, console: Console) -> Iterator[StepRecord]:
    """Pass records on and move a bar with each."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("indexer {task.fields[indexer]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, loss=0.0, indexer=0.0, speed=0.0)
        for record in records:
            progress.update(
                task,
                advance=1,
                loss=record.loss,
                indexer=record.indexer_loss,
                speed=record.tokens / record.seconds,
            )
            yield record


def show_report(report: RunReport, console: Console) -> None:
    """The whole report on a terminal."""
    console.print(Group(_backend_table(report), _loss_table(report)))
    console.print(
        f"{report.tokens_per_second:,.0f} tokens/s in training, {report.seconds:.0f} s in all; "
        f"{report.decisions:,} stage decisions, {report.decisions_anew} of them not from the table",
        highlight=False,
    )
    sample = Styled(report.prompt.lstrip("\n"), style="dim") + Styled(report.continuation, style="bold")
    console.print(Panel(sample, title="held-out prompt, and what the model adds", title_align="left"))


def _backend_table(report: RunReport) -> Table:
    table = Table(title="backend that ran, per stage", title_justify="left")
    table.add_column("stage")
    table.add_column("backend")
    table.add_column("runs", justify="right")
    for entry in report.backends:
        name = f"{entry.backend} ({entry.provider})" if entry.provider else entry.backend
        table.add_row(entry.stage, name, f"{entry.runs:,}")
    return table


def _loss_table(report: RunReport) -> Table:
    table = Table(title="loss in nats", title_justify="left")
    for heading in ("", "first", "last"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = (
        ("next token, training", report.first_loss, report.last_loss),
        ("next token, held-out text", report.held_out_before, report.held_out_after),
        ("indexer against attention (KL)", report.first_indexer_loss, report.last_indexer_loss),
    )
    for label, first, last in rows:
        table.add_row(label, f"{first:.3f}", f"{last:.3f}")
    return table
