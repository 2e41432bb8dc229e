"""The main job: train a small sparse-attention language model through the dispatch layer, and tell how it went."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

import torch
from rich.console import Console

import dsa_dispatch as dsa
from dsa_dispatch._dispatch.table import policy_of
from dsa_dispatch._policy.config import config_from_mapping
from dsa_dispatch._quickstart import report as reports
from dsa_dispatch._quickstart.generate import choose_prompt, generate
from dsa_dispatch._quickstart.report import RunReport, StageRun
from dsa_dispatch._quickstart.text import load_corpus
from dsa_dispatch._quickstart.train import build_model, held_out_loss, mean_loss, tokens_per_second, train
from dsa_dispatch._run_config import RunConfig, TrainingRecipe
from dsa_dispatch._runtime import current
from dsa_dispatch._stages import STAGES
from dsa_dispatch.errors import ConfigError

_LAST_STEPS: Final = 10
"""A single step's loss is mostly the luck of its batch."""


def run(
    config: RunConfig,
    *,
    text: Path | None = None,
    device: str = "cpu",
    steps: int | None = None,
    backend: str | None = None,
    fallback: str | None = None,
    json: bool = False,
    output: TextIO | None = None,
    console: Console | None = None,
) -> RunReport:
    """Train the model of ``config`` on a text, sample from it, print the report and return it.

    ``text``: a file; None takes the sources of Python's standard library on this machine. ``device``: ``"cpu"`` or a
    CUDA device. ``steps``, ``backend`` and ``fallback`` override the configuration. ``json``: write the report to
    ``output`` (standard output by default) as one JSON document; ``console`` then shows the progress only, on standard
    error by default.
    Raises ``ConfigError`` for a configuration without a training section, a device that is not there, an unknown
    backend, a setting that cannot be meant, or a text too short; the library's own errors pass through.
    """
    begin = time.perf_counter()
    console = Console(stderr=json) if console is None else console
    recipe = _recipe(config, steps)
    where = _device(device)
    kernels = config_from_mapping(_kernel_settings(config, backend, fallback), "kernels section")
    policy_of(current(), kernels.text)  # names nobody registered are refused before the text is read
    before = dsa.stats()
    with _threads(recipe.threads):
        corpus = load_corpus(
            text,
            corpus_bytes=recipe.corpus_bytes,
            held_out_fraction=recipe.held_out_fraction,
            vocabulary=recipe.vocabulary,
            sequence=recipe.sequence,
        )
        model = build_model(config.model, recipe, len(corpus.vocabulary), kernels, where)
        parameters = sum(value.numel() for value in model.parameters())
        console.print(
            f"{config.name}: {config.model.layers} layers, {parameters:,} parameters; each token attends to at most "
            f"{config.model.index_width} of {recipe.sequence} keys\n"
            f"text: {corpus.text.origin}, {corpus.training.numel():,} tokens to train on, "
            f"{corpus.held_out.numel():,} held out (digest {corpus.text.digest})",
            highlight=False,
            markup=False,
        )
        held_out_before = held_out_loss(model, corpus, recipe)
        records = list(
            reports.show_progress(train(model, corpus, recipe, recipe.steps), recipe.steps, console)
        )
        held_out_after = held_out_loss(model, corpus, recipe)
        prompt = choose_prompt(corpus, recipe.prompt_tokens)
        continuation = generate(model, prompt, recipe.new_tokens, recipe.temperature, recipe.seed)
    after = dsa.stats()
    last = mean_loss(records[-_LAST_STEPS:])
    report = RunReport(
        config=config.name,
        device=str(where),
        dtype=str(model.kernels.dtype).removeprefix("torch."),
        text=corpus.text.origin,
        text_digest=corpus.text.digest,
        training_tokens=corpus.training.numel(),
        held_out_tokens=corpus.held_out.numel(),
        vocabulary=len(corpus.vocabulary),
        parameters=parameters,
        steps=len(records),
        first_loss=records[0].loss,
        last_loss=last[0],
        held_out_before=held_out_before,
        held_out_after=held_out_after,
        first_indexer_loss=records[0].indexer_loss,
        last_indexer_loss=last[1],
        tokens_per_second=tokens_per_second(records),
        training_seconds=sum(record.seconds for record in records),
        seconds=time.perf_counter() - begin,
        backends=_stage_runs(before, after),
        decisions=sum(after.decisions.values()) - sum(before.decisions.values()),
        decisions_anew=sum(after.misses.values()) - sum(before.misses.values()),
        prompt=corpus.vocabulary.decode(prompt),
        continuation=corpus.vocabulary.decode(continuation),
        records=tuple(records),
    )
    if json:
        (output or sys.stdout).write(report.to_json() + "\n")
    else:
        reports.show_report(report, console)
    return report


def _recipe(config: RunConfig, steps: int | None) -> TrainingRecipe:
    if config.training is None:
        raise ConfigError(
            f"configuration {config.name!r} has no training section: it describes the shapes of a large model, for "
            f"`dsa-dispatch explain`. Run the preset 'quickstart', or a file made from it"
        )
    if steps is None:
        return config.training
    if steps < 1:
        raise ConfigError(f"steps: got {steps}, needs at least 1")
    return config.training.model_copy(update={"steps": steps})


def _kernel_settings(config: RunConfig, backend: str | None, fallback: str | None) -> dict[str, object]:
    overrides = {"dsa_kernel_backend": backend, "dsa_kernel_fallback": fallback}
    return {**config.kernels, **{key: value for key, value in overrides.items() if value is not None}}


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is no device name; use 'cpu', 'cuda' or 'cuda:1'") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r}: this job runs on 'cpu' and 'cuda'")
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"device {name!r}: torch {torch.__version__} sees {count} CUDA devices. Use --device cpu, or install a "
            f"torch built for CUDA where there is a GPU"
        )
    return device


def _stage_runs(before: dsa.Stats, after: dsa.Stats) -> tuple[StageRun, ...]:
    grown = {key: count - before.runs.get(key, 0) for key, count in after.runs.items()}
    order: dict[str, int] = {stage: place for place, stage in enumerate(STAGES)}
    rows = [StageRun(*key, runs) for key, runs in grown.items() if runs > 0]
    return tuple(sorted(rows, key=lambda row: (order.get(row.stage, len(order)), row.backend)))


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(count, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
