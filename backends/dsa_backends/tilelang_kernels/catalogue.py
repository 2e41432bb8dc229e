"""Every kernel that the adapters can ask for on a GPU, so that all can be compiled ahead. Imports no TileLang."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from dsa_backends.tilelang_kernels.attention_forward import forward_form
from dsa_backends.tilelang_kernels.launch import HOPPER
from dsa_backends.tilelang_kernels.scratch import FEW

Kernel = tuple[str, tuple[object, ...]]
"""``("module:function", constants)``, as ``compiler.kernel`` takes them."""

TAILS: Final = (64, 0)
TYPES: Final = ("bfloat16", "float16")
INDEX_HEADS: Final = (16, 32, 64)
INDEX_CHANNELS: Final = (64, 128)
KEY_HEADS: Final = (64, 128)
"""Heads that the key kernel takes at once, above the few."""


def kernels(gpu: tuple[int, int]) -> tuple[Kernel, ...]:
    """The kernels for a compute capability, each once; neither lengths nor scales are among their constants."""
    return tuple(dict.fromkeys(itertools.chain(_forward(gpu), _backward(gpu), _indexer(gpu))))


def _forward(gpu: tuple[int, int]) -> Iterator[Kernel]:
    for heads, tail, dtype in itertools.product((FEW, FEW + 1), TAILS, TYPES):
        form = forward_form(gpu, heads, tail, dtype)
        yield form.where, form.static


def _backward(gpu: tuple[int, int]) -> Iterator[Kernel]:
    if gpu != HOPPER:
        return
    dtype = TYPES[0]
    yield "pairs_kernels:row_shift", (dtype,)
    for head_major in (False, True):
        yield "balance_kernel:balance", (head_major, dtype)
    for tail in TAILS:
        yield "hopper_few_backward_kernel:hopper_few_backward", (tail, dtype)
        yield "pairs_kernels:hopper_pairs", (tail, dtype)
        yield "query_gradient_kernel:hopper_query_gradient", (tail, dtype)
        yield "key_gradient_kernel:hopper_key_gradient", (FEW, tail, dtype, True)
        for heads in KEY_HEADS:
            yield "key_gradient_kernel:hopper_key_gradient", (heads, tail, dtype, False)


def _indexer(gpu: tuple[int, int]) -> Iterator[Kernel]:
    yield "select_kernel:select_best", ()
    for heads, channels, relu in itertools.product(INDEX_HEADS, INDEX_CHANNELS, (True, False)):
        for dtype in TYPES:
            yield "score_kernel:index_scores", (heads, channels, dtype, relu, gpu == HOPPER)
        if gpu == HOPPER:
            yield "loss_kernel:index_loss", (heads, channels, relu)
