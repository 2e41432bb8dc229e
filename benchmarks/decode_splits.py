"""The Triton forward of few rows under every number of splits: the figures behind ``tiles.split_count``.

``python benchmarks/decode_splits.py [--out FILE]`` on a GPU; W = 2048 of 8192 keys, 576/512 channels, bf16.
Microseconds: the median of 50 calls, each after the L2 cache was overwritten, all numbers of splits in turn; ``*``
marks the number chosen.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from dsa_backends.triton_kernels.attention_forward import launch_forward
from dsa_backends.triton_kernels.launch import device_architecture, processors
from dsa_backends.triton_kernels.tiles import forward_tile, split_count
from dsa_dispatch._bench.clock import CudaClock

ROWS, HEADS, SPLITS = (1, 4, 16, 64), (16, 32, 128), (1, 2, 4, 8, 16, 32)
KEYS, WIDTH, CHANNELS, VALUES = 8192, 2048, 576, 512


def sweep(rows: int, heads: int, clock: CudaClock) -> dict[str, object]:
    q = torch.randn(rows, heads, CHANNELS, device="cuda").bfloat16()
    kv = torch.randn(KEYS, CHANNELS, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(KEYS, device="cuda")[:WIDTH].int() for _ in range(rows)])
    length = torch.full((rows,), WIDTH, dtype=torch.int32, device="cuda")
    tile = forward_tile(device_architecture(q), heads, CHANNELS, VALUES, 2)
    blocks = -(-heads // tile.heads)
    chosen = split_count(rows, blocks, WIDTH, tile.keys, processors(q), False)

    def call(splits: int) -> object:
        return launch_forward(
            q, kv, ids, length, scale=CHANNELS**-0.5, v_channels=VALUES, tile=tile, splits=splits
        )

    times: dict[int, list[float]] = {splits: [] for splits in sorted({*SPLITS, chosen})}
    for _ in range(53):
        for splits, taken in times.items():
            taken.append(clock.once(lambda splits=splits: call(splits)) * 1e3)
    medians = {splits: round(statistics.median(taken[3:]), 2) for splits, taken in times.items()}
    return {"rows": rows, "heads": heads, "chosen": chosen, "microseconds": medians}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    clock = CudaClock(torch.device("cuda"), flush=True)
    results = [sweep(rows, heads, clock) for heads in HEADS for rows in ROWS]
    if chosen.out:
        chosen.out.write_text(
            json.dumps({"card": torch.cuda.get_device_name(), "results": results}, indent=1)
        )
    for result in results:
        times = "  ".join(
            f"{splits}{'*' if splits == result['chosen'] else ''}: {taken}"
            for splits, taken in result["microseconds"].items()
        )
        print(f"{result['heads']} heads, {result['rows']} rows  {times}")


if __name__ == "__main__":
    main()
