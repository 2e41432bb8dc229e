"""Checks and times the Triton kernels on one GPU: correctness first, then variants of the tiles, a table last.

Run from the repository root: ``PYTHONPATH=.:backends python benchmarks/triton/h200.py --out FOLDER [--only
forward,...]``.
``--warm K/N`` compiles and checks every N-th variant from the K-th and stops: run N of them side by side first.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from dsa_backends.triton_kernels.indexer_loss import launch_loss
from dsa_backends.triton_kernels.indexer_target import launch_target
from dsa_backends.triton_kernels.indexer_topk import indexer_topk, select_from_scores
from dsa_backends.triton_kernels.slots import Slots
from dsa_backends.triton_kernels.tiles import (
    AttentionTile,
    BackwardTiles,
    backward_tiles,
    forward_tile,
    loss_tiles,
    mass_tile,
)
from dsa_dispatch._call import RowLayout, StageOptions

SCALE = 576**-0.5
KEYS, WIDTH = 8192, 2048
RESULTS: list[dict[str, Any]] = []


def note(**fields: Any) -> None:
    RESULTS.append(fields)
    print(
        " ".join(
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in fields.items()
        ),
        flush=True,
    )


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
    valid = (
        (indices >= 0)
        & (indices < len(kv))
        & (torch.arange(indices.shape[1], device="cuda") < length[:, None])
    )
    picked = kv64[torch.where(valid, indices, 0).long()]
    scores = (SCALE * q64 @ picked.transpose(1, 2)).masked_fill(~valid[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    out = torch.softmax(scores, -1).nan_to_num() @ picked[..., :512]
    dq, dkv = torch.autograd.grad((out * dout.double()).sum(), (q64, kv64))
    return out.detach(), lse.detach(), dq, dkv


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


MANY = forward_tile("sm90", 128, 576, 512, 2)
FEW = forward_tile("sm90", 16, 576, 512, 2)
SOME = forward_tile("sm90", 32, 576, 512, 2)
FORWARD: dict[int, list[tuple[AttentionTile, int]]] = {
    128: [(MANY, 1)],
    64: [(MANY, 1), (AttentionTile(64, 64, 8, 2, 2), 1)],
    32: [(SOME, 1), (FEW, 1)],
    16: [(FEW, 1), (FEW, 3), (AttentionTile(16, 64, 4, 3, 2), 1), (AttentionTile(16, 32, 4, 3, 2), 1)],
    8: [(FEW, 1)],
}
BACKWARD: dict[int, list[BackwardTiles]] = {
    heads: [backward_tiles("sm90", heads, 576, 512, 2)] for heads in (128, 64, 32, 16, 8)
}
BACKWARD[16] += [
    BackwardTiles(AttentionTile(16, 32, 4, 2), AttentionTile(16, 64, 4, 3, 128)),
    BackwardTiles(AttentionTile(16, 32, 4, 5), AttentionTile(16, 64, 4, 3, 128)),
    BackwardTiles(AttentionTile(16, 64, 4, 3), AttentionTile(16, 64, 4, 3, 128)),
]
BACKWARD[64] += [dataclasses.replace(BACKWARD[64][0], query=AttentionTile(128, 64, 8, 5, 256))]


def check_attention(select: Callable[[], bool]) -> None:
    for heads in (64, 16, 128, 8, 24):
        data = attention_inputs(40, heads)
        data["indices"][3] = -1
        data["indices"][5, ::3] = -1
        data["indices"][6, 1::7] = KEYS + 9
        data["length"][7] = 1000
        data["kv"][17] = torch.nan  # no slot may name it; its memory must never count
        data["indices"][data["indices"] == 17] = -1
        dout = torch.randn(40, heads, 512, device="cuda").bfloat16()
        want = None
        for tile, splits in [*FORWARD.get(heads, FORWARD[32]), (AttentionTile(16, 32, 4, 3, 2), 4)]:
            if not select():
                continue
            want = want or reference(*data.values(), dout)
            try:
                out, lse = launch_forward(**data, scale=SCALE, v_channels=512, tile=tile, splits=splits)
            except Exception as problem:
                note(check="forward", heads=heads, tile=str(tile), problem=str(problem)[:200])
                continue
            wrong = float((lse.double() - want[1]).nan_to_num(0, 0, 0).abs().max())
            note(
                check="forward",
                heads=heads,
                tile=str(tile),
                splits=splits,
                out=error(out, want[0]),
                lse=wrong,
            )
        for tiles in BACKWARD.get(heads, BACKWARD[32]):
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
                note(
                    check="backward",
                    heads=heads,
                    tiles=str(tiles),
                    deterministic=deterministic,
                    dq=error(dq, want[2]),
                    dkv=error(dkv, want[3]),
                )


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return {
        e.key[:40]: round(e.self_device_time_total / 1000, 3)
        for e in profile.key_averages()
        if e.self_device_time_total > 20
    }


def time_attention(rows: int = 4096) -> None:
    for heads in (64, 32, 16, 8, 128):
        data = attention_inputs(rows, heads)
        dout = torch.randn(rows, heads, 512, device="cuda").bfloat16()
        out = lse = None
        for tile, splits in FORWARD[heads]:
            try:
                call = lambda: launch_forward(**data, scale=SCALE, v_channels=512, tile=tile, splits=splits)
                out, lse = call()
                ms = do_bench(call, warmup=20, rep=150, return_mode="median")
            except Exception as problem:
                note(time="forward", heads=heads, tile=str(tile), problem=str(problem)[:100])
                continue
            note(
                time="forward",
                heads=heads,
                tile=str(tile),
                ms=ms,
                tflops=2e-9 * rows * heads * WIDTH * 1088 / ms,
            )
        for tiles in BACKWARD[heads]:
            dkv = torch.zeros(KEYS, 576, device="cuda")
            for deterministic in (False, True):
                call = lambda: launch_backward(
                    **data, out=out, lse=lse, dout=dout, scale=SCALE, v_channels=512, need_dq=True, dkv=dkv,
                    tiles=tiles, deterministic=deterministic, budget=1 << 30,
                )  # fmt: skip
                try:
                    call()
                    ms = do_bench(call, warmup=20, rep=200, return_mode="median")
                except Exception as problem:
                    note(time="backward", heads=heads, tiles=str(tiles), problem=str(problem)[:100])
                    continue
                flops = 2e-9 * rows * heads * WIDTH * (3 * 576 + 2 * 512)
                note(
                    time="backward",
                    heads=heads,
                    tiles=str(tiles),
                    deterministic=deterministic,
                    ms=ms,
                    tflops=flops / ms,
                    kernels=kernel_times(call),
                )


def index_inputs(rows: int, keys: int, heads: int = 64) -> dict[str, torch.Tensor]:
    make = torch.Generator("cuda").manual_seed(rows)
    return {
        "q": torch.randn(rows, heads, 128, generator=make, device="cuda").bfloat16(),
        "k": torch.randn(keys, 128, generator=make, device="cuda").bfloat16(),
        "w": torch.randn(rows, heads, generator=make, device="cuda") * heads**-0.5 * 128**-0.5,
    }


def causal(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    ends = torch.arange(keys - rows + 1, keys + 1, device="cuda", dtype=torch.int32)
    return torch.zeros_like(ends), ends


def check_selection(name: str, scores: torch.Tensor, topk: int) -> None:
    rows, keys = scores.shape
    starts = torch.zeros(rows, dtype=torch.int32, device="cuda")
    ends = torch.full_like(starts, keys)
    ids, length = select_from_scores(scores, starts, ends, topk)
    want = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :topk].sort(1).values
    note(check="select", case=name, equal=bool((ids == want).all()), full=bool((length == topk).all()))


def check_indexer(select: Callable[[], bool]) -> None:
    make = torch.Generator("cuda").manual_seed(0)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=make, device="cuda")

    cases = {
        "33 x 16385 in [1, 1.245)": (1 + (uniform(33, 16385) * 2055000).floor() * 2.0**-23, 2048),
        "all equal": (torch.ones(5, 40000, device="cuda"), 2048),
        "8192 zeros and few positives": (torch.where(uniform(5, 8192) < 0.01, 1.0, 0.0), 2048),
        "2048 of 262209": (torch.randn(8, 262209, generator=make, device="cuda"), 2048),
        "4096 of 70000 integers": ((uniform(8, 70000) * 50).floor(), 4096),
        "odd width": (torch.randn(8, 1001, generator=make, device="cuda"), 17),
    }
    for name, (scores, topk) in cases.items():
        if select():
            check_selection(name, scores, topk)
    for heads, keys in ((64, 40000), (1, 3000), (128, 5000)):
        if not select():
            continue
        data = index_inputs(64, keys, heads)
        starts, ends = causal(64, keys)
        ids, _ = indexer_topk(
            **data,
            starts=starts,
            ends=ends,
            rows=RowLayout(1, 64, keys),
            topk=2048,
            use_relu=True,
            options=StageOptions(memory_budget=1 << 26),
        )
        exact = torch.einsum(
            "th,thj->tj",
            data["w"].double(),
            torch.einsum("thd,jd->thj", data["q"].double(), data["k"].double()).relu(),
        )
        columns = torch.arange(keys, device="cuda")
        exact = exact.masked_fill(columns >= ends[:, None], -torch.inf)
        chosen = torch.zeros_like(exact, dtype=torch.bool).scatter_(1, ids.long(), True)
        lowest = exact.masked_fill(~chosen, torch.inf).amin(1)
        highest = exact.masked_fill(chosen, -torch.inf).amax(1)
        unique = bool((chosen.sum(1) == 2048).all())
        note(
            check="topk",
            heads=heads,
            keys=keys,
            unique=unique,
            worst_inversion=float((highest - lowest).max()),
            spread=float(exact[exact > -1e30].std()),
        )
    for heads, index_heads in ((128, 64), (16, 16)):
        if not select():
            continue
        data = attention_inputs(24, heads)
        data["indices"][3] = -1
        data["indices"][5, ::3] = -1
        data["length"][7] = 1000
        q64, kv64 = data["q"].double(), data["kv"].double()
        valid = (data["indices"] >= 0) & (torch.arange(WIDTH, device="cuda") < data["length"][:, None])
        picked = torch.where(valid, data["indices"], 0).long()
        scores = (SCALE * q64 @ kv64[picked].transpose(1, 2)).masked_fill(~valid[:, None], -torch.inf)
        want = torch.softmax(scores, -1).nan_to_num().sum(1)
        bounds = torch.zeros(24, dtype=torch.int32, device="cuda")
        slots = Slots(data["indices"], data["length"], bounds, bounds, RowLayout(1, 24, KEYS))
        for lse in (None, torch.logsumexp(scores, -1).float()):
            mass = launch_target(
                data["q"],
                data["kv"],
                slots,
                lse=lse,
                scale=SCALE,
                tile=mass_tile("sm90", heads, 576, 2),
                budget=1 << 28,
            )
            note(check="target", heads=heads, lse=lse is not None, mass=error(mass, want))
        index = index_inputs(24, KEYS, index_heads)
        leaves = [index[name].double().requires_grad_() for name in ("q", "k", "w")]
        s = torch.einsum("thd,tjd->thj", leaves[0], leaves[1][picked]).relu()
        logits = torch.einsum("th,thj->tj", leaves[2], s).masked_fill(~valid, -torch.inf)
        goal = mass.double() / mass.double().sum(1, keepdim=True).clamp_min(1e-10)
        term = goal * (goal.clamp_min(1e-10).log() - torch.log_softmax(logits, 1))
        kl = torch.where(valid & (mass.double().sum(1, keepdim=True) > 0), term, 0.0).sum(1)
        exact = torch.autograd.grad(kl.sum(), leaves)
        for deterministic in (False, True):
            dk = torch.zeros(KEYS, 128, device="cuda")
            got = launch_loss(
                **index,
                slots=slots,
                mass=mass,
                use_relu=True,
                need_dq=True,
                need_dw=True,
                dk=dk,
                tiles=loss_tiles("sm90", index_heads, 2),
                options=StageOptions(deterministic=deterministic, memory_budget=1 << 26),
            )
            note(
                check="loss",
                heads=index_heads,
                deterministic=deterministic,
                kl=error(got.kl, kl.detach()),
                dq=error(got.dq, exact[0]),
                dk=error(dk, exact[1]),
                dw=error(got.dw, exact[2]),
            )


def time_indexer() -> None:
    for rows, keys, budget in ((4096, 8192, 1 << 26), (4096, 32768, 1 << 26)):
        data = index_inputs(rows, keys)
        starts, ends = causal(rows, keys)
        call = lambda: indexer_topk(
            **data,
            starts=starts,
            ends=ends,
            rows=RowLayout(1, rows, keys),
            topk=2048,
            use_relu=True,
            options=StageOptions(memory_budget=budget),
        )
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        scratch = torch.cuda.max_memory_allocated() - before - rows * 2049 * 4
        ms = do_bench(call, warmup=20, rep=200, return_mode="median")
        note(
            time="topk", rows=rows, keys=keys, ms=ms, scratch_mib=scratch / 2**20, kernels=kernel_times(call)
        )
    data = attention_inputs(4096, 128)
    bounds = torch.zeros(4096, dtype=torch.int32, device="cuda")
    slots = Slots(data["indices"], data["length"], bounds, bounds, RowLayout(1, 4096, KEYS))
    _, lse = launch_forward(**data, scale=SCALE, v_channels=512, tile=FORWARD[64][0][0], splits=1)
    for tile in MASS:
        try:
            call = lambda: launch_target(
                data["q"], data["kv"], slots, lse=lse, scale=SCALE, tile=tile, budget=1 << 30
            )
            mass = call()
            note(
                time="target",
                heads=128,
                tile=str(tile),
                ms=do_bench(call, warmup=20, rep=100, return_mode="median"),
            )
        except Exception as problem:
            note(time="target", tile=str(tile), problem=str(problem)[:100])
    index = index_inputs(4096, KEYS)
    for tiles in LOSS:
        for deterministic in (False, True):
            dk = torch.zeros(KEYS, 128, device="cuda")
            call = lambda: launch_loss(
                **index,
                slots=slots,
                mass=mass,
                use_relu=True,
                need_dq=True,
                need_dw=True,
                dk=dk,
                tiles=tiles,
                options=StageOptions(deterministic=deterministic),
            )
            call()
            ms = do_bench(call, warmup=20, rep=100, return_mode="median")
            note(
                time="loss",
                index_heads=64,
                tiles=str(tiles),
                deterministic=deterministic,
                ms=ms,
                kernels=kernel_times(call),
            )


def time_long_indexer(size: int = 131072) -> None:
    data = index_inputs(size, size)
    starts, ends = causal(size, size)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call = lambda: indexer_topk(
        **data,
        starts=starts,
        ends=ends,
        rows=RowLayout(1, size, size),
        topk=2048,
        use_relu=True,
        options=StageOptions(memory_budget=1 << 30),
    )
    call()
    torch.cuda.synchronize()
    scratch = torch.cuda.max_memory_allocated() - before - size * 2049 * 4
    note(
        time="topk",
        rows=size,
        keys=size,
        ms=do_bench(call, warmup=1, rep=1200, return_mode="median"),
        scratch_mib=scratch / 2**20,
        kernels=kernel_times(call),
    )


MASS = [mass_tile("sm90", 128, 576, 2), AttentionTile(64, 64, 4, 2, 2)]
LOSS = [loss_tiles("sm90", 64, 2)]


def check_guards() -> None:
    """No host synchronisation, graph capture, the same bits for any budget, splits against the whole."""
    data = attention_inputs(300, 64)
    dout = torch.randn(300, 64, 512, device="cuda").bfloat16()
    out, lse = launch_forward(**data, scale=SCALE, v_channels=512, tile=MANY, splits=1)

    def backward(dkv: torch.Tensor, deterministic: bool, budget: int = 1 << 28) -> torch.Tensor:
        dq = launch_backward(
            **data, out=out, lse=lse, dout=dout, scale=SCALE, v_channels=512, need_dq=True, dkv=dkv,
            tiles=BACKWARD[64][0], deterministic=deterministic, budget=budget,
        )  # fmt: skip
        assert dq is not None
        return dq

    runs = []
    for at in range(20):
        dkv = torch.zeros(KEYS, 576, device="cuda")
        runs.append((backward(dkv, True, 1 << (24 if at % 2 else 28)), dkv))
    same = all(torch.equal(runs[0][0], dq) and torch.equal(runs[0][1], dkv) for dq, dkv in runs)
    note(check="deterministic", runs=20, budgets=2, same_bits=same)

    index = index_inputs(300, KEYS)
    starts, ends = causal(300, KEYS)

    def everything() -> tuple[torch.Tensor, ...]:
        launch_forward(**data, scale=SCALE, v_channels=512, tile=MANY, splits=1)
        dkv = torch.zeros(KEYS, 576, device="cuda")
        dq = backward(dkv, True)
        backward(torch.zeros_like(dkv), False)
        layout = RowLayout(1, 300, KEYS)
        ids, _ = indexer_topk(
            **index, starts=starts, ends=ends, rows=layout, topk=2048, use_relu=True, options=StageOptions()
        )
        slots = Slots(data["indices"], data["length"], starts, ends, layout)
        mass = launch_target(data["q"], data["kv"], slots, lse=lse, scale=SCALE, tile=MASS[0], budget=1 << 28)
        terms = launch_loss(
            **index,
            slots=slots,
            mass=mass,
            use_relu=True,
            need_dq=True,
            need_dw=True,
            dk=None,
            tiles=LOSS[0],
            options=StageOptions(),
        )
        return dq, dkv, ids, terms.kl

    want = everything()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
        note(check="synchronisation", found=False)
    except RuntimeError as problem:
        note(check="synchronisation", found=True, problem=str(problem)[:150])
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    graph.replay()
    torch.cuda.synchronize()
    note(check="graph", same_bits=all(torch.equal(a, b) for a, b in zip(want, captured, strict=True)))


def time_decode() -> None:
    for rows in (1, 16):
        data = attention_inputs(rows, 16)
        for splits in (1, 8, 16, 32):
            ms = do_bench(
                lambda: launch_forward(**data, scale=SCALE, v_channels=512, tile=FEW, splits=splits),
                return_mode="median",
            )
            note(time="decode", rows=rows, heads=16, splits=splits, us=ms * 1000)


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
    if "indexer" in only:
        check_indexer(lambda: next(counter) % of == part)
    if not arguments.warm:
        time_card()
        if "indexer" in only:
            time_indexer()
        if "long" in only:
            time_long_indexer()
        if "attention" in only:
            check_guards()
            time_decode()
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
