"""Sampling from the model, over the same sparse attention it was trained with."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_dispatch._quickstart.model import LanguageModel
from dsa_dispatch._quickstart.text import Corpus


def choose_prompt(corpus: Corpus, length: int) -> Tensor:
    """``length`` held-out tokens from the first paragraph, or else line, that begins after the middle of the text."""
    middle, last = corpus.held_out.numel() // 2, corpus.held_out.numel() - length
    places = range(min(middle, last), last)
    starts = [place for place in places if _breaks(corpus, place)]
    paragraphs = (place for place in starts if _breaks(corpus, place + 1))
    begin = next(paragraphs, next(iter(starts), last))
    return corpus.held_out[begin : begin + length]


def _breaks(corpus: Corpus, place: int) -> bool:
    return corpus.vocabulary.tokens[int(corpus.held_out[place])].startswith(b"\n")


@torch.no_grad()
def generate(model: LanguageModel, prompt: Tensor, count: int, temperature: float, seed: int) -> Tensor:
    """``count`` tokens that follow ``prompt [n]``, on the CPU. Temperature 0 takes the likeliest each time.

    Every token is drawn from a pass over all that stands before it, as far back as the model's context reaches.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    training = model.training
    model.eval()
    tokens = prompt
    for _ in range(count):
        window = tokens[-model.shape.context :].to(device)
        with model.precision():
            logits = model(window.unsqueeze(1)).logits[-1, 0]
        tokens = torch.cat([tokens, _draw(logits.float().cpu(), temperature, generator)])
    model.train(training)
    return tokens[prompt.numel() :]


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax().view(1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
