"""What query chunks, the checkpoint policy and offload do to memory and time of a training step on one GPU.

Run from the repository root::

    PYTHONPATH=.:backends python benchmarks/training_memory.py --out benchmarks

First the attention alone, forward and backward, in one piece and in chunks: as the backend's kernels take it, and with
its heads padded to 64 as kernels that run nothing smaller need it. Then a stack of checkpointed layers of
``dsa_dispatch.nn`` with the sizes of GLM-5.3-Flash (8 local heads, index width 2051). Peaks are of
``torch.cuda.max_memory_allocated`` above what was allocated before the step. Results that disagree end the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import importlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsa_dispatch as dsa
from dsa_dispatch import BackendSpec, Heads, StageSpec
from dsa_dispatch.checkpointing import save_topk_policy
from dsa_dispatch.index_sharing import IndexShareSchedule
from dsa_dispatch.nn import AbsorbedSparseAttention, Indexer, Selection
from dsa_dispatch.offload import offload_topk

GIB = 1 << 30
ATTENTION = ("attention_forward", "attention_backward")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the measurement; the defaults are the issue's and GLM-5.3-Flash's at 8 heads per rank."""

    rows: int = 65536
    heads: int = 8
    qk_channels: int = 512
    v_channels: int = 512
    width: int = 2051
    hidden: int = 4096
    query_rank: int = 1536
    nope: int = 256
    index_heads: int = 32
    index_channels: int = 128
    layers: int = 4


def register(names: list[str]) -> None:
    """Without an installed distribution there are no entry points to find the backends by."""
    known = {info.name for info in dsa.list_backends()}
    for name in names:
        spec = importlib.import_module(f"dsa_backends.{name}.spec").SPEC
        if spec.name not in known:
            dsa.register_backend(spec)
        known.add(spec.name)


def padded(spec: BackendSpec, heads: int) -> BackendSpec:
    """The same kernels behind a capability that takes ``heads`` heads and nothing else."""
    stages = {
        stage: StageSpec(
            dataclasses.replace(
                spec.stages[stage].capability, heads=Heads(values=frozenset({heads}), pad=True)
            ),
            spec.stages[stage].function,
        )
        for stage in ATTENTION
    }
    return dataclasses.replace(
        spec, name=f"{spec.name}_{heads}", stages=stages, rank=-(10**6), self_test=False
    )


class Meter:
    """Peak memory above the start, and seconds, of a step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, step: Callable[[], Any], repeats: int) -> tuple[float | None, float, Any]:
        result, peak, seconds = step(), None, []
        for _ in range(repeats):
            del result
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            result = step()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                peak = (torch.cuda.max_memory_allocated() - before) / GIB
            seconds.append(time.perf_counter() - start)
        return peak, sorted(seconds)[len(seconds) // 2], result


def causal_ids(rows: int, width: int, device: torch.device) -> Tensor:
    """``[1, rows, width]``: random keys before each row, -1 where a row has fewer than ``width``."""
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.empty((1, rows, width), dtype=torch.int32, device=device)
    for first in range(0, rows, 4096):
        part = ids[0, first : first + 4096]
        row = torch.arange(first, first + part.shape[0], device=device)[:, None]
        drawn = torch.rand(part.shape, generator=generator, device=device) * (row + 1)
        slots = torch.arange(width, device=device)
        part.copy_(torch.where(slots <= row, drawn.int().clamp_max(row.int()), -1))
    return ids


def difference(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest relative Frobenius norm, one tensor at a time in fp32."""
    worst = 0.0
    for mine, other in zip(got, wanted, strict=True):
        scale = other.float().norm().clamp_min(1e-30)
        worst = max(worst, float((mine.float() - other.float()).norm() / scale))
    return worst


def measure_chunks(
    sizes: Sizes, device: torch.device, backend: str, chunks: list[Any], meter: Meter, repeats: int
) -> list[dict[str, Any]]:
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    query = random(sizes.rows, 1, sizes.heads, sizes.qk_channels).requires_grad_()
    key = random(sizes.rows, 1, 1, sizes.qk_channels).requires_grad_()
    upstream = random(sizes.rows, 1, sizes.heads, sizes.v_channels)
    ids = causal_ids(sizes.rows, sizes.width, device)
    results, wanted = [], None
    for chunk in chunks:

        def step(chunk: Any = chunk) -> list[Tensor]:
            with dsa.use_backend(dict.fromkeys(ATTENTION, backend), fallback="error", query_chunk=chunk):
                out = dsa.run_fused_absorbed_sparse_attention(
                    None, query, key, ids, sizes.nope**-0.5, sizes.v_channels
                )
            return [out.detach(), *torch.autograd.grad(out, (query, key), upstream)]

        row: dict[str, Any] = {"backend": backend, "query_chunk": chunk}
        try:
            dsa.reset_stats()
            row["peak_gib"], row["seconds"], answer = meter(step, repeats)
        except torch.OutOfMemoryError as error:
            row["failed"] = str(error).splitlines()[0]
            results.append(row)
            continue
        row["chunking"] = {f"{stage} {outcome}": n for (stage, outcome), n in dsa.stats().chunking.items()}
        # bf16 results of another order of sums: half a unit in the last place of 8 bits, twice.
        wanted = [tensor.cpu() for tensor in answer] if wanted is None else wanted
        row["difference"] = difference([tensor.cpu() for tensor in answer], wanted)
        if row["difference"] > 4e-3:
            raise SystemExit(f"{backend}, query_chunk {chunk}: results differ by {row['difference']:.1e}")
        del answer
        results.append(row)
    return results


class Layer(nn.Module):
    """Residual layer of GLM-5.3-Flash's attention without its feed-forward: 8 heads, pooled indexer, no RoPE."""

    def __init__(self, sizes: Sizes, computes: bool) -> None:
        super().__init__()
        self.sizes = sizes
        indexer = None
        if computes:
            indexer = Indexer(
                sizes.hidden,
                sizes.query_rank,
                heads=sizes.index_heads,
                channels=sizes.index_channels,
                topk=(sizes.width - 3) // 4 * 4,
                pool=4,
            )
        self.query_down = nn.Linear(sizes.hidden, sizes.query_rank, bias=False)
        self.query_up = nn.Linear(sizes.query_rank, sizes.heads * sizes.nope, bias=False)
        self.latent = nn.Linear(sizes.hidden, sizes.v_channels, bias=False)
        self.norm = nn.RMSNorm(sizes.v_channels)
        self.core = AbsorbedSparseAttention(
            sizes.heads,
            sizes.nope,
            sizes.v_channels,
            sizes.nope,
            softmax_scale=sizes.nope**-0.5,
            indexer=indexer,
        )
        self.output = nn.Linear(sizes.heads * sizes.nope, sizes.hidden, bias=False)

    def forward(self, x: Tensor, shared: Selection | None) -> tuple[Tensor, Selection]:
        query_latent = self.query_down(x)
        query = self.query_up(query_latent).unflatten(-1, (self.sizes.heads, self.sizes.nope))
        out, selection = self.core(
            query, None, self.norm(self.latent(x)), None, shared=shared, hidden=x, query_latent=query_latent
        )
        return x + self.output(out.flatten(2)), selection


def measure_policy(
    sizes: Sizes, device: torch.device, meter: Meter, repeats: int, computing: list[int]
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    schedule = IndexShareSchedule.explicit(sizes.layers, computing)
    layers = nn.ModuleList(Layer(sizes, schedule.computes(number)) for number in range(sizes.layers))
    layers.to(device, torch.bfloat16)
    x = torch.randn(sizes.rows, 1, sizes.hidden, device=device, dtype=torch.bfloat16)
    upstream = torch.randn_like(x)
    parameters = [p for name, p in layers.named_parameters() if ".indexer." not in name]
    variants: dict[str, tuple[Callable[[], Any] | None, bool]] = {
        "no checkpoint": (None, False),
        "checkpoint": (dict, False),
        "checkpoint, policy": (lambda: {"context_fn": save_topk_policy()}, False),
        "checkpoint, policy, offload": (lambda: {"context_fn": save_topk_policy()}, True),
    }
    results, wanted = [], None
    for name, (keywords, offloading) in variants.items():
        moved: list[Any] = []

        def step(keywords: Any = keywords, offloading: bool = offloading, moved: list[Any] = moved) -> Any:
            hidden, selections = x, {}
            with offload_topk() if offloading else nullcontext() as window:
                for number, layer in enumerate(layers):
                    source = schedule.source(number)
                    shared = selections[source].shared() if source < number else None
                    if keywords is None:
                        hidden, selections[number] = layer(hidden, shared)
                    else:
                        hidden, selections[number] = checkpoint(
                            layer, hidden, shared, use_reentrant=False, **keywords()
                        )
            del selections, shared
            moved[:] = [window]
            dsa.reset_stats()
            return torch.autograd.grad(hidden, parameters, upstream)

        row: dict[str, Any] = {"variant": name, "computing_layers": list(schedule.computing)}
        try:
            row["peak_gib"], row["seconds"], answer = meter(step, repeats)
        except torch.OutOfMemoryError as error:
            row["failed"] = str(error).splitlines()[0]
            results.append(row)
            continue
        row["selections_in_backward"] = sum(dsa.stats().ran("indexer_topk").values())
        row["backends"] = {stage: sorted(dsa.stats().ran(stage)) for stage in ATTENTION}
        if offloading:
            row["offloaded"] = {"storages": moved[0].storages, "gib": moved[0].bytes / GIB}
        wanted = list(answer) if wanted is None else wanted
        row["difference"] = difference(list(answer), wanted)
        if row["difference"] > 1e-2:  # bf16, and atomics may order the sums into a key's gradient
            raise SystemExit(f"{name}: gradients differ by {row['difference']:.1e}")
        results.append(row)
    return results


def command_output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "tilelang"):
        try:
            versions[name] = importlib.import_module(name).__version__
        except ImportError:
            continue
    cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name(device) if cuda else "cpu",
        "driver": command_output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ).splitlines()[0]
        if cuda
        else "none",
        "versions": versions,
        "command": " ".join(["python", *sys.argv]),
        "commit": commit or command_output("git", "rev-parse", "HEAD"),
    }


def table(record: dict[str, Any]) -> str:
    def amounts(row: dict[str, Any]) -> str:
        if "failed" in row:
            return "| out of memory | – |"
        peak = "–" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
        return f"| {peak} | {row['seconds'] * 1e3:.0f} |"

    lines = ["| attention on | query_chunk | peak GiB | ms | difference |", "|---|---|---|---|---|"]
    for row in record["chunks"]:
        last = "–" if "failed" in row else f"{row['difference']:.1e}"
        lines.append(f"| {row['backend']} | {row['query_chunk']} {amounts(row)} {last} |")
    lines += ["", "| layers that select | step | peak GiB | ms | selections in backward | offloaded |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in record["policy"]:
        moved = row.get("offloaded")
        moved = f"{moved['storages']} storages, {moved['gib']:.2f} GiB" if moved else "–"
        runs = row.get("selections_in_backward", "–")
        computing = ", ".join(map(str, row["computing_layers"]))
        lines.append(f"| {computing} | {row['variant']} {amounts(row)} {runs} | {moved} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--backends", default="torch_dense,triton_kernels", help="packages of dsa_backends, by name"
    )
    parser.add_argument("--attention", default="triton", help="the backend whose attention is measured")
    parser.add_argument("--commit")
    parser.add_argument("--repeats", type=int, default=3)
    for entry in dataclasses.fields(Sizes):
        parser.add_argument(f"--{entry.name.replace('_', '-')}", type=int, default=entry.default)
    arguments = parser.parse_args()
    sizes = Sizes(**{entry.name: getattr(arguments, entry.name) for entry in dataclasses.fields(Sizes)})
    device = torch.device(arguments.device)
    register(arguments.backends.split(","))
    spec = next(
        module.SPEC
        for name in arguments.backends.split(",")
        if (module := importlib.import_module(f"dsa_backends.{name}.spec")).SPEC.name == arguments.attention
    )
    wide = padded(spec, 64)
    dsa.register_backend(wide)
    meter = Meter(device)
    chunks: list[Any] = ["off", "auto", max(sizes.rows // 16, 1)]
    record = {"environment": environment(device, arguments.commit), "sizes": dataclasses.asdict(sizes)}
    record["chunks"] = [
        row
        for backend in (spec.name, wide.name)
        for row in measure_chunks(sizes, device, backend, chunks, meter, arguments.repeats)
    ]
    dsa.unregister_backend(wide.name)
    with dsa.use_backend(dict.fromkeys(ATTENTION, spec.name)):
        record["policy"] = [
            row
            for computing in (list(range(sizes.layers)), [0])
            for row in measure_policy(sizes, device, meter, arguments.repeats, computing)
        ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "training_memory.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["environment"], indent=1))
    print(table(record))


if __name__ == "__main__":
    main()
