"""Training as a stream of records. Nothing is printed here."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dsa_dispatch._quickstart.attention import Kernels
from dsa_dispatch._quickstart.model import LanguageModel, next_token_loss
from dsa_dispatch._quickstart.text import Corpus
from dsa_dispatch._run_config import ModelShape, TrainingRecipe


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimiser step. ``indexer_loss`` is the mean KL divergence in nats over the computing layers."""

    step: int
    loss: float
    indexer_loss: float
    learning_rate: float
    tokens: int
    seconds: float


def build_model(
    shape: ModelShape, recipe: TrainingRecipe, vocabulary: int, config: object, device: torch.device
) -> LanguageModel:
    """A model with weights drawn from the recipe's seed, alike on every device; torch's generator stays as it was."""
    wide = device.type != "cuda" or recipe.cuda_dtype == "float32"
    kernels = Kernels(
        config=config,
        loss_coeff=recipe.indexer_loss_coeff,
        sparse_loss=recipe.sparse_loss,
        dtype=torch.float32 if wide else torch.bfloat16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = LanguageModel(shape, vocabulary, kernels)
    return model.to(device)


def train(model: LanguageModel, corpus: Corpus, recipe: TrainingRecipe, steps: int) -> Iterator[StepRecord]:
    """Train in place and yield a record after each step. The seed fixes the batches."""
    device = model.embedding.weight.device
    language, indexer = list(model.language_parameters()), list(model.indexer_parameters())
    optimizer = _optimizer(model, recipe)
    generator = torch.Generator().manual_seed(recipe.seed)
    model.train()
    for step in range(steps):
        begin = time.perf_counter()
        factor = _schedule(step, steps, recipe.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak"]
        starts = torch.randint(
            corpus.training.numel() - recipe.sequence, (recipe.batch,), generator=generator
        )
        inputs, targets = _batch(corpus.training, starts, recipe.sequence, device)
        with model.precision():
            output = model(inputs)
            loss = next_token_loss(output.logits, targets)
        indexer_loss = torch.stack(output.indexer_losses).sum()
        optimizer.zero_grad(set_to_none=True)
        (loss + indexer_loss).backward()
        # Clipped apart: a steep indexer loss must not slow the language model, nor the other way round.
        nn.utils.clip_grad_norm_(language, recipe.gradient_clip)
        nn.utils.clip_grad_norm_(indexer, recipe.gradient_clip)
        optimizer.step()
        divergence = indexer_loss.item() / (recipe.indexer_loss_coeff * len(output.indexer_losses))
        yield StepRecord(
            step + 1,
            loss.item(),
            divergence,
            factor * recipe.learning_rate,
            inputs.numel(),
            time.perf_counter() - begin,
        )


@torch.no_grad()
def held_out_loss(model: LanguageModel, corpus: Corpus, recipe: TrainingRecipe) -> float:
    """Mean next-token loss in nats over evenly spaced held-out sequences. Leaves the model in its mode."""
    training, device = model.training, model.embedding.weight.device
    model.eval()
    last = corpus.held_out.numel() - recipe.sequence - 1
    count = recipe.held_out_batches * recipe.batch
    starts = torch.linspace(0, last, count).long()
    losses = []
    for group in torch.split(starts, recipe.batch):
        inputs, targets = _batch(corpus.held_out, group, recipe.sequence, device)
        with model.precision():
            losses.append(next_token_loss(model(inputs).logits, targets).item())
    model.train(training)
    return math.fsum(losses) / len(losses)


def _optimizer(model: LanguageModel, recipe: TrainingRecipe) -> torch.optim.AdamW:
    """Weight decay acts on matrices only; decaying a norm's scale would shrink the signal."""
    parts = (
        (model.language_parameters(), recipe.learning_rate),
        (model.indexer_parameters(), recipe.indexer_learning_rate),
    )
    groups: list[dict[str, object]] = []
    for parameters, peak in parts:
        values = list(parameters)
        matrices = [value for value in values if value.dim() > 1]
        scales = [value for value in values if value.dim() <= 1]
        groups += [
            {"params": matrices, "weight_decay": recipe.weight_decay, "peak": peak},
            {"params": scales, "weight_decay": 0.0, "peak": peak},
        ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))


def _schedule(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.55 + 0.45 * math.cos(math.pi * progress)


def _batch(tokens: Tensor, starts: Tensor, sequence: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and the tokens one further on, both ``[sequence, batch]``."""
    rows = torch.stack([tokens[start : start + sequence + 1] for start in starts.tolist()], dim=1).to(device)
    return rows[:-1], rows[1:]


def tokens_per_second(records: list[StepRecord]) -> float:
    """Speed without the first step, which pays for choosing and warming up."""
    counted = records[1:] or records
    return sum(record.tokens for record in counted) / sum(record.seconds for record in counted)


def mean_loss(records: list[StepRecord]) -> tuple[float, float]:
    """Language and indexer loss, averaged over the records."""
    return (
        math.fsum(record.loss for record in records) / len(records),
        math.fsum(record.indexer_loss for record in records) / len(records),
    )
