"""Checks and times the Triton kernels on one GPU: correctness first, then variants of the tiles, a table last.

Run from the repository root: ``PYTHONPATH=.:backends python benchmarks/triton/h200.py --out FOLDER [--only forward,...]``.
``--warm K/N`` compiles and checks every N-th variant from the K-th and stops: run N of them side by side first.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.testing import do_bench

from dsa_backends.triton_kernels.attention_backward import launch_backward
from dsa_backends.triton_kernels.attention_forward import launch_forward
from dsa_backends.triton_kernels.tiles import AttentionTile, BackwardTiles

SCALE = 576**-0.5
KEYS, WIDTH = 8192, 2048
RESULTS: list[dict[str, Any]] = []


def note(**fields: Any) -> None:
    RESULTS.append(fields)
    print(" ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in fields.items()), flush=True)


def attention_inputs(rows: int, heads: int) -> dict[str, torch.Tensor]:
    make = torch.Generator("cuda").manual_seed(heads)
    q = torch.randn(rows, heads, 576, generator=make, device="cuda").bfloat16()
    kv = torch.randn(KEYS, 576, generator=make, device="cuda").bfloat16()
    indices = torch.rand(rows, KEYS, generator=make, device="cuda").topk(WIDTH, sorted=False).indices.int()
    length = torch.full((rows,), WIDTH, dtype=torch.int32, device="cuda")
    return {"q": q, "kv": kv, "indices": indices, "length": length}


def reference(q, kv, indices, length, dout):
    q64 = q.double().requires_grad_()
    kv64 = kv.double().requires_grad_()
    valid = (indices >= 0) & (indices < len(kv)) & (torch.arange(indices.shape[1], device="cuda") < length[:, None])
    picked = kv64[torch.where(valid, indices, 0).long()]
    scores = (SCALE * q64 @ picked.transpose(1, 2)).masked_fill(~valid[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    out = torch.softmax(scores, -1).nan_to_num() @ picked[..., :512]
    dq, dkv = torch.autograd.grad((out * dout.double()).sum(), (q64, kv64))
    return out.detach(), lse.detach(), dq, dkv


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


FORWARD: dict[int, list[tuple[AttentionTile, int]]] = {
    128: [(AttentionTile(64, 32, 8, 3, 2), 1)],
    64: [
        (AttentionTile(64, 32, 8, 3, 2), 1),
        (AttentionTile(64, 32, 8, 3, 1), 1),
        (AttentionTile(64, 32, 8, 4, 2), 1),
        (AttentionTile(64, 64, 8, 2, 2), 1),
    ],
    16: [
        (AttentionTile(16, 64, 4, 3, 2), 1),
        (AttentionTile(16, 32, 4, 2, 2), 1),
        (AttentionTile(16, 32, 4, 3, 2), 1),
        (AttentionTile(16, 32, 4, 4, 2), 1),
        (AttentionTile(16, 32, 4, 3, 1), 1),
        (AttentionTile(16, 64, 8, 3, 2), 1),
        (AttentionTile(16, 32, 2, 3, 2), 1),
        (AttentionTile(16, 32, 8, 3, 2), 1),
    ],
    8: [(AttentionTile(16, 64, 4, 3, 2), 1), (AttentionTile(16, 32, 4, 3, 2), 1)],
}
_KEY = AttentionTile(128, 64, 8, 2, 128)
_QUERY = AttentionTile(128, 64, 8, 3, 256)
BACKWARD: dict[int, list[BackwardTiles]] = {
    128: [
        BackwardTiles(AttentionTile(64, 32, 4, 2, 2), _KEY, _QUERY),
        BackwardTiles(AttentionTile(64, 32, 4, 2, 1), _KEY, AttentionTile(64, 64, 4, 3, 256)),
    ],
    64: [
        BackwardTiles(AttentionTile(64, 32, 4, 2, 2), AttentionTile(64, 64, 4, 3, 128), _QUERY),
        BackwardTiles(AttentionTile(64, 16, 4, 3, 2), AttentionTile(64, 64, 8, 3, 256), AttentionTile(64, 64, 8, 3, 256)),
        BackwardTiles(AttentionTile(32, 32, 8, 3, 2), AttentionTile(64, 64, 8, 3, 128)),
    ],
    16: [
        BackwardTiles(AttentionTile(16, 32, 4, 3, 2), AttentionTile(16, 64, 4, 3, 128)),
        BackwardTiles(AttentionTile(16, 32, 4, 4, 2), AttentionTile(16, 64, 4, 3, 256)),
        BackwardTiles(AttentionTile(16, 32, 8, 3, 2), AttentionTile(16, 64, 8, 3, 256)),
    ],
    8: [BackwardTiles(AttentionTile(16, 32, 4, 3, 2), AttentionTile(16, 64, 4, 3, 128))],
}


def check_attention(select: Callable[[], bool]) -> None:
    for heads in (64, 16, 128, 8, 24):
        data = attention_inputs(40, heads)
        data["indices"][3] = -1
        data["indices"][5, ::3] = -1
        data["indices"][6, 1::7] = KEYS + 9
        data["length"][7] = 1000
        dout = torch.randn(40, heads, 512, device="cuda").bfloat16()
        want = None
        for tile, splits in [*FORWARD.get(heads, FORWARD[16][:1]), (AttentionTile(16, 32, 4, 3, 2), 4)]:
            if not select():
                continue
            want = want or reference(*data.values(), dout)
            try:
                out, lse = launch_forward(**data, scale=SCALE, v_channels=512, tile=tile, splits=splits)
            except Exception as problem:
                note(check="forward", heads=heads, tile=str(tile), problem=str(problem)[:200])
                continue
            wrong = float((lse.double() - want[1]).nan_to_num(0, 0, 0).abs().max())
            note(check="forward", heads=heads, tile=str(tile), splits=splits, out=error(out, want[0]), lse=wrong)
        for tiles in BACKWARD.get(heads, BACKWARD[16][:1]):
            for deterministic in (False, True):
                if not select():
                    continue
                want = want or reference(*data.values(), dout)
                dkv = torch.zeros(KEYS, 576, device="cuda")
                try:
                    dq = launch_backward(
                        **data, out=want[0].bfloat16(), lse=want[1].float(), dout=dout, scale=SCALE, v_channels=512,
                        need_dq=True, dkv=dkv, tiles=tiles, deterministic=deterministic, budget=1 << 26,
                    )  # fmt: skip
                except Exception as problem:
                    note(check="backward", heads=heads, tiles=str(tiles), problem=str(problem)[:200])
                    continue
                note(check="backward", heads=heads, tiles=str(tiles), deterministic=deterministic, dq=error(dq, want[2]), dkv=error(dkv, want[3]))


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return {e.key[:40]: round(e.self_device_time_total / 1000, 3) for e in profile.key_averages() if e.self_device_time_total > 20}


def time_attention(rows: int = 4096) -> None:
    for heads in (64, 16, 8, 128):
        data = attention_inputs(rows, heads)
        dout = torch.randn(rows, heads, 512, device="cuda").bfloat16()
        out = lse = None
        for tile, splits in FORWARD[heads]:
            try:
                call = lambda: launch_forward(**data, scale=SCALE, v_channels=512, tile=tile, splits=splits)  # noqa: B023, E731
                out, lse = call()
                ms = do_bench(call, warmup=20, rep=150, return_mode="median")
            except Exception as problem:
                note(time="forward", heads=heads, tile=str(tile), problem=str(problem)[:100])
                continue
            note(time="forward", heads=heads, tile=str(tile), ms=ms, tflops=2e-9 * rows * heads * WIDTH * 1088 / ms)
        for tiles in BACKWARD[heads]:
            dkv = torch.zeros(KEYS, 576, device="cuda")
            for deterministic in (False, True):
                call = lambda: launch_backward(  # noqa: B023, E731
                    **data, out=out, lse=lse, dout=dout, scale=SCALE, v_channels=512, need_dq=True, dkv=dkv, tiles=tiles,
                    deterministic=deterministic, budget=1 << 30,
                )  # fmt: skip
                try:
                    call()
                    ms = do_bench(call, warmup=20, rep=200, return_mode="median")
                except Exception as problem:
                    note(time="backward", heads=heads, tiles=str(tiles), problem=str(problem)[:100])
                    continue
                flops = 2e-9 * rows * heads * WIDTH * (3 * 576 + 2 * 512)
                note(time="backward", heads=heads, tiles=str(tiles), deterministic=deterministic, ms=ms, tflops=flops / ms, kernels=kernel_times(call))


def time_card() -> None:
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    b = torch.randn(8192, 8192, device="cuda").bfloat16()
    note(time="matmul 8192", tflops=2e-9 * 8192**3 / do_bench(lambda: a @ b, return_mode="median"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="attention")
    parser.add_argument("--warm", default="")
    arguments = parser.parse_args()
    counter = iter(range(1 << 30))
    part, of = (int(x) for x in arguments.warm.split("/")) if arguments.warm else (0, 1)
    started = time.time()
    only = arguments.only.split(",")
    if "attention" in only:
        check_attention(lambda: next(counter) % of == part)
    if not arguments.warm:
        time_card()
        if "attention" in only:
            time_attention()
    record = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.time() - started, 1),
        "results": RESULTS,
    }
    name = f"triton-{arguments.only.replace(',', '-')}{'-warm' + str(part) if arguments.warm else ''}.json"
    (arguments.out / name).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
