"""``dsa-dispatch bench``: what every backend that is here, and any function beside it, needs for the same call."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console

from dsa_dispatch._bench.case import MEASURED, Case
from dsa_dispatch._bench.clock import clock_for
from dsa_dispatch._bench.measure import Effort, Result, measure_all
from dsa_dispatch._bench.peers import Peer, backend_peer, external_peer
from dsa_dispatch._bench.record import record, table
from dsa_dispatch._bench.suites import SUITES
from dsa_dispatch._cli.output import emit
from dsa_dispatch._policy.values import nearest
from dsa_dispatch._registry.availability import installation_declines
from dsa_dispatch._runtime import current
from dsa_dispatch.errors import ConfigError, UnknownBackendError

REFERENCE: Final = "torch_dense"


class DType(str, Enum):
    """Types of a case."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


_DEFAULTS: Final = {field.name: field.default for field in dataclasses.fields(Case)}


def _default(name: str) -> str:
    return f"Default: {_DEFAULTS[name]}"


def bench(
    suite: Annotated[
        str | None,
        typer.Option(
            help=f"A list of cases: {', '.join(SUITES)}. Default: quick, or the one case described."
        ),
    ] = None,
    stage: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(MEASURED)}; of a suite, only these. Repeatable.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help=f"Query rows. {_default('rows')}, of decode 1.")
    ] = None,
    keys: Annotated[int | None, typer.Option(min=1, help=f"Keys. {_default('keys')}.")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help=f"Keys chosen per row. {_default('topk')}.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help=f"Query heads. {_default('heads')}.")] = None,
    qk_channels: Annotated[
        int | None, typer.Option(min=1, help=f"Channels of query and key. {_default('qk_channels')}.")
    ] = None,
    v_channels: Annotated[
        int | None, typer.Option(min=1, help=f"Channels of the output. {_default('v_channels')}.")
    ] = None,
    index_heads: Annotated[
        int | None, typer.Option(min=1, help=f"Heads of the indexer. {_default('index_heads')}.")
    ] = None,
    index_channels: Annotated[
        int | None, typer.Option(min=1, help=f"Channels of the indexer. {_default('index_channels')}.")
    ] = None,
    dtype: Annotated[DType | None, typer.Option(help=f"{_default('dtype')}.")] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            help="random, local (a window, sinks and a slowly changing rest), or a .pt or .npy file of ids. "
            f"{_default('pattern')}."
        ),
    ] = None,
    deterministic: Annotated[
        bool | None, typer.Option(help="Ask for bitwise reproducible kernels. Default: no.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only these. Repeatable. Default: all that are installed; on CUDA without {REFERENCE}, which is slow."
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=module:function, given the inputs, returns a call, or None to sit out. Repeatable."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N. Default: cuda where there is one.")
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option(help="Of the backends, such as 4GiB. Default: the settings' own.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Calls of each peer before the rounds.")] = 3,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="A peer gets fewer rounds where they would take longer.")
    ] = 10,
    flush: Annotated[
        bool, typer.Option(help="Overwrite the L2 cache before every timed call (CUDA).")
    ] = True,
    commit: Annotated[str, typer.Option(help="For the record. Default: git's, of the current folder.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write the record here, as JSON.")] = None,
) -> None:
    """Time backends and other functions on the same calls, in turn. Exit status 1 when one fails, or when none
    serves any of the cases.

    A backend runs through the public operations, pinned, and its figure counts only if it ran.
    """
    sizes = {
        "rows": rows,
        "keys": keys,
        "topk": topk,
        "heads": heads,
        "qk_channels": qk_channels,
        "v_channels": v_channels,
        "index_heads": index_heads,
        "index_channels": index_channels,
        "dtype": dtype.value if dtype else None,
        "pattern": pattern,
        "deterministic": deterministic,
        "memory_budget": memory_budget,
    }
    cases = _cases(suite, stage or [], {name: value for name, value in sizes.items() if value is not None})
    place = _device(device)
    peers = _peers(backend or [], peer or [], place)
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {str(out)!r}: there is no folder {str(out.parent)!r}")
    clock, effort = clock_for(place, flush), Effort(repeats, warmup, seconds)
    progress = Console(stderr=True, soft_wrap=True)
    results: list[Result] = []
    for group in measure_all(cases, peers, clock, place, effort):
        results += group
        shown = ", ".join(
            f"{result.peer} {result.median:.4g} ms"
            if result.median is not None
            else f"{result.peer} {result.state}"
            for result in group
        )
        progress.print(f"{group[0].case.title}: {shown}", markup=False, highlight=False)
        if out is not None:
            # After every case: what was measured is kept when the machine's time ends.
            emit(record(results, clock, place, effort, ["dsa-dispatch", *sys.argv[1:]], commit), out)
    emit(table(results, clock))
    nothing = not any(result.state == "measured" for result in results)
    if nothing:
        progress.print("nothing was measured: the reason of each peer stands above the table", markup=False)
    if nothing or any(result.state == "failed" for result in results):
        raise typer.Exit(1)


def _cases(suite: str | None, stages: Sequence[str], sizes: dict[str, Any]) -> list[Case]:
    for name in stages:
        if name not in MEASURED:
            raise ConfigError(
                f"--stage: got {name!r}, supports {', '.join(MEASURED)}.{nearest(name, MEASURED)}"
            )
    if suite is None and (stages or sizes):
        return [
            Case(stage, **{**({"rows": 1} if stage == "decode" else {}), **sizes})
            for stage in MEASURED
            if stage in (stages or ["attention_forward"])
        ]
    suite = suite or "quick"
    if suite not in SUITES:
        raise ConfigError(f"--suite: got {suite!r}, supports {', '.join(SUITES)}.{nearest(suite, SUITES)}")
    own = [
        f"--{name.replace('_', '-')}" for name in sizes if name not in ("dtype", "pattern", "memory_budget")
    ]
    if own:
        raise ConfigError(
            f"--suite {suite} has sizes of its own: leave out {', '.join(own)}, or leave out --suite"
        )
    chosen = [case for case in SUITES[suite]() if not stages or case.stage in stages]
    # A pattern that replaces two would measure everything twice.
    return list(dict.fromkeys(dataclasses.replace(case, **sizes) for case in chosen))


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device: got {name!r}, supports cpu, cuda and cuda:N")
    if device.type == "cpu":
        return device
    index = device.index or 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise ConfigError(f"--device {name}: torch {torch.__version__} sees {count} CUDA devices here")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _peers(names: Sequence[str], others: Sequence[str], device: torch.device) -> list[Peer]:
    known = current().snapshot.backends
    for name in names:
        if name not in known:
            raise UnknownBackendError(
                f"--backend: unknown backend {name!r}; registered: {', '.join(sorted(known))}.{nearest(name, known)}"
            )
    peers = []
    for entry in current().snapshot.ranked():
        spec = entry.spec
        if spec.name not in names if names else spec.name == REFERENCE and device.type == "cuda":
            continue
        missing = {
            stage: "; ".join(map(str, declines))
            for stage in spec.stages
            if (declines := installation_declines(spec, stage))
        }
        usable = frozenset(spec.stages) - missing.keys()
        if usable or names:
            peers.append(backend_peer(spec.name, usable, missing))
    peers += [external_peer(text) for text in others]
    if not peers:
        raise ConfigError(
            f"no backend to measure on {device}: name one with --backend, or a function with --peer"
        )
    repeated = {peer.name for peer in peers if sum(other.name == peer.name for other in peers) > 1}
    if repeated:
        raise ConfigError(
            f"--peer: {', '.join(sorted(repeated))} would stand for two; give each a name of its own"
        )
    return peers
