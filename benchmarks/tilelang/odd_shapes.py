"""Every TileLang kernel on small odd shapes, for compute-sanitizer: rows, keys, widths and heads that fill no tile.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python benchmarks/tilelang/odd_shapes.py

Without the cache every tensor is an allocation of its own, whose end is guarded. The stages are called as the core
calls them, with ids outside the keys, holes, an empty row, and the last key in the last slot: one step further is out
of bounds. The values are judged by the conformance suite, not here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from dsa_backends.tilelang_kernels.attention_backward import attention_backward
from dsa_backends.tilelang_kernels.attention_forward import Form, attention_forward, launch_forward
from dsa_backends.tilelang_kernels.indexer_loss import indexer_loss
from dsa_backends.tilelang_kernels.indexer_topk import indexer_topk, select_from_scores
from dsa_dispatch._call import RowLayout, StageOptions

ATTENTION = (
    # heads, channels, rows, keys, width
    *((1, 512, 3, 1, 1), (7, 576, 5, 131, 83), (16, 576, 5, 131, 83)),
    *((17, 576, 5, 131, 83), (65, 512, 5, 131, 83), (130, 576, 3, 67, 129), (20, 576, 2, 33, 601)),
)
INDEXER = (
    # heads, channels, rows, keys, width
    *(
        (1, 64, 5, 131, 37),
        (7, 128, 33, 131, 37),
        (50, 128, 5, 261, 200),
        (64, 64, 3, 1301, 300),
        (3, 64, 1, 1, 5),
    ),
)
SELECTION = ((1, 1), (36, 64), (1300, 700), (9004, 5000))
"""Columns and top-k."""
BUDGET = 1 << 18
"""Bytes of scratch: several chunks of every call."""


class Shapes:
    def __init__(self, device: torch.device, gpu: tuple[int, int]) -> None:
        self.device, self.gpu = device, gpu
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def ids(self, rows: int, keys: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(-9, keys + 9, (rows, width), generator=self.generator, dtype=torch.int32)
        ids[:, -1] = -1
        ids[0, -1] = keys - 1
        length = torch.full((rows,), width, dtype=torch.int32)
        length[rows // 2] = width // 3
        if rows > 1:
            length[-1] = 0
        return ids.to(self.device), length.to(self.device)

    def attention(self, heads: int, channels: int, rows: int, keys: int, width: int) -> None:
        q, kv, dout = self.draw(rows, heads, channels), self.draw(keys, channels), self.draw(rows, heads, 512)
        ids, length = self.ids(rows, keys, width)
        layout, options = RowLayout(1, rows, keys, "ranges"), StageOptions(memory_budget=BUDGET)
        out, lse = attention_forward(
            q, kv, ids, length, scale=0.1, v_channels=512, rows=layout, options=options
        )
        if self.gpu == (9, 0):
            dkv = torch.zeros(keys, channels, device=self.device)
            attention_backward(
                *(q, kv, ids, length, out, lse, dout),
                scale=0.1,
                v_channels=512,
                need_dq=True,
                dkv=dkv,
                rows=layout,
                options=options,
            )
        for block in (16, 32):
            form = Form(
                "portable_forward_kernel:portable_forward", (block, channels - 512, "bfloat16"), block
            )
            launch_forward(q, kv, ids, length, scale=0.1, v_channels=512, form=form)

    def indexer(self, heads: int, channels: int, rows: int, keys: int, width: int) -> None:
        q, k, w = (
            self.draw(rows, heads, channels),
            self.draw(keys, channels),
            self.draw(rows, heads, dtype=torch.float32),
        )
        starts = torch.arange(rows, dtype=torch.int32, device=self.device).clamp(max=keys)
        ends = torch.full_like(starts, keys)
        options = StageOptions(memory_budget=BUDGET)
        layout = RowLayout(1, rows, keys, "ranges")
        indexer_topk(q, k, w, starts, ends, rows=layout, topk=width, use_relu=True, options=options)
        if self.gpu != (9, 0):
            return
        ids, length = self.ids(rows, keys, width)
        indexer_loss(
            *(q, k, w),
            indices=ids,
            length=length,
            starts=torch.zeros_like(starts),
            ends=ends,
            mass=torch.rand(rows, width, generator=self.generator).to(self.device),
            rows=layout,
            use_relu=True,
            need_dq=True,
            need_dw=True,
            dk=torch.zeros(keys, channels, device=self.device),
            options=options,
        )

    def selection(self, columns: int, topk: int) -> None:
        """Scores that mostly tie: of 9004 columns more lie in the bin of the cut than the list holds."""
        scores = (
            torch.randint(0, 3, (2, -(-columns // 4) * 4), generator=self.generator).float().to(self.device)
        )
        starts = torch.tensor([0, min(3, columns)], dtype=torch.int32, device=self.device)
        select_from_scores(scores, starts, torch.full_like(starts, columns), topk)

    def calls(self) -> Iterator[Callable[[], None]]:
        yield from (partial(self.attention, *shape) for shape in ATTENTION)
        yield from (partial(self.indexer, *shape) for shape in INDEXER)
        yield from (partial(self.selection, *shape) for shape in SELECTION)


def main() -> None:
    for call in Shapes(torch.device("cuda"), torch.cuda.get_device_capability()).calls():
        call()
    torch.cuda.synchronize()
    sys.stdout.write("every kernel ran\n")


if __name__ == "__main__":
    main()
