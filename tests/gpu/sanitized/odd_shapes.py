"""Every Triton stage on small odd shapes, for compute-sanitizer: rows, keys, widths and heads that fill no tile.

With an argument K/N only every N-th call, from the K-th. Run with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``: every tensor
is then an allocation of its own, whose end is guarded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

import dsa_dispatch as dsa
from dsa_dispatch.testing import assert_backend_ran

ATTENTION = (
    # heads, query and key channels, value channels
    (1, 80, 64),
    (7, 576, 512),
    (24, 576, 512),
    (65, 576, 512),
    (130, 512, 512),
    (20, 320, 256),
)
INDEXER = ((1, 64), (7, 128), (64, 128), (127, 128))


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def attention(heads: int, qk: int, v: int, rows: int, keys: int, width: int) -> None:
    query, key = draw(rows, 1, heads, qk).requires_grad_(), draw(keys, 1, 1, qk).requires_grad_()
    ids = torch.randint(-9, keys + 9, (1, rows, width), device="cuda", dtype=torch.int32)
    ids[:, -1] = -1
    # The last key is named, in the last slot too: one step further is out of bounds.
    ids[0, 0, -1] = keys - 1
    length = torch.full((1, rows), width, dtype=torch.int32, device="cuda")
    length[0, rows // 2] = width // 3
    with assert_backend_ran("triton", "attention_forward", "attention_backward"):
        out = dsa.run_fused_absorbed_sparse_attention(None, query, key, ids, 0.1, v, length)
        torch.autograd.grad(out, (query, key), torch.ones_like(out))


def indexer(heads: int, channels: int, rows: int, keys: int, topk: int, sparse: bool) -> None:
    q, k = draw(rows, 1, heads, channels).requires_grad_(), draw(keys, 1, channels).requires_grad_()
    weights = torch.randn(rows, 1, heads, device="cuda", requires_grad=True)
    query, key = draw(rows, 1, heads, 576), draw(keys, 1, 1, 576)
    with assert_backend_ran("triton", "indexer_topk", "indexer_target", "indexer_loss"):
        result = dsa.run_fused_qk_topk_with_loss(
            None, q, k, weights, topk, None, None, None, query, key, 0.1, 1.0, sparse_loss=sparse
        )
        torch.autograd.grad(result.loss, (q, k, weights))


def calls() -> Iterator[Callable[[], None]]:
    for deterministic in (False, True):
        for shape in ATTENTION:
            yield partial(pinned, deterministic, partial(attention, *shape, rows=5, keys=131, width=83))
        yield partial(pinned, deterministic, partial(attention, 7, 576, 512, rows=3, keys=33, width=601))
        for heads, channels in INDEXER:
            yield partial(
                pinned,
                deterministic,
                partial(indexer, heads, channels, rows=5, keys=131, topk=37, sparse=True),
            )
        yield partial(
            pinned, deterministic, partial(indexer, 7, 128, rows=3, keys=1301, topk=300, sparse=False)
        )


def pinned(deterministic: bool, call: Callable[[], None]) -> None:
    with dsa.use_backend("triton", fallback="error", deterministic=deterministic, memory_budget="1MiB"):
        call()


def main() -> None:
    part, _, parts = sys.argv[1].partition("/") if len(sys.argv) > 1 else ("0", "", "1")
    torch.manual_seed(0)
    for place, call in enumerate(calls()):
        if place % int(parts) == int(part):
            call()
    torch.cuda.synchronize()
    sys.stdout.write("every stage ran\n" if parts == "1" else "")


if __name__ == "__main__":
    main()
