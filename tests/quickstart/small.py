"""A configuration of the quickstart's kind that trains in a second, and a text for it."""

from __future__ import annotations

import torch

import dsa_dispatch as dsa
from dsa_dispatch._quickstart.attention import Kernels
from dsa_dispatch._quickstart.model import LanguageModel
from dsa_dispatch._quickstart.text import Corpus, Text
from dsa_dispatch._quickstart.vocabulary import Vocabulary
from dsa_dispatch._run_config import ModelShape, RunConfig, TrainingRecipe

SHAPE = ModelShape(
    layers=3,
    hidden=32,
    heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope=8,
    qk_rope=4,
    v_head=8,
    softmax_scale=12**-0.5,
    rope="interleaved",
    index_heads=2,
    index_dim=8,
    index_topk=6,
    index_width=6,
    index_rope="half_split",
    dsa_layers=(0, 1, 2),
    computing_layers=(0, 2),
    context=32,
    ffn=64,
)
RECIPE = TrainingRecipe(
    steps=3,
    batch=4,
    sequence=24,
    learning_rate=0.01,
    indexer_learning_rate=0.02,
    vocabulary=300,
    corpus_bytes=20_000,
    held_out_batches=1,
    prompt_tokens=4,
    new_tokens=5,
)
CONFIG = RunConfig(name="small", model=SHAPE, training=RECIPE)
SENTENCE = "the cat sat on the mat, and the dog ran to the cat;\n"


def corpus(text: str = SENTENCE * 60) -> Corpus:
    words = Vocabulary.of(text, RECIPE.vocabulary)
    tokens = words.encode(text)
    cut = tokens.numel() * 3 // 4
    return Corpus(Text("a sentence", text, text, "0"), words, tokens[:cut], tokens[cut:])


def model(
    shape: ModelShape = SHAPE, vocabulary: int = 300, dtype: torch.dtype = torch.float32
) -> LanguageModel:
    torch.manual_seed(0)
    kernels = Kernels(config=dsa.DSAConfig(dsa_kernel_backend="none"), dtype=dtype)
    return LanguageModel(shape, vocabulary, kernels)


def tokens(rows: int, batch: int = 2, vocabulary: int = 300) -> torch.Tensor:
    return torch.randint(vocabulary, (rows, batch), generator=torch.Generator().manual_seed(1))
