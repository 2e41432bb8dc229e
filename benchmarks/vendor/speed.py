"""What dispatching and padding cost: each function in turn with the others, medians of one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from common import SCALE, VENDOR, guarded, note
from torch import Tensor

import dsa_dispatch
from dsa_backends.cudnn_dsa import frontend
from dsa_backends.flash_mla.providers import usable
from dsa_dispatch._bench.clock import CudaClock
from dsa_dispatch._execution import attention as execution

ROWS, KEYS, WIDTH = 4096, 8192, 2048
REPEATS = 25
CONFIGS = {"": {**VENDOR, "memory_budget": 8 << 30}, " default budget": VENDOR}


def in_turn(calls: dict[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, float]:
    """Median milliseconds of each, all of them once per round: drift of the clock meets all alike."""
    clock = CudaClock(torch.device("cuda"), flush=False)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(clock.once(call))
    return {name: statistics.median(found) for name, found in times.items()}


class Case:
    def __init__(self, heads: int) -> None:
        make = torch.Generator("cuda").manual_seed(heads)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=make, device="cuda").bfloat16()

        self.heads = heads
        self.query, self.key = draw(ROWS, 1, heads, 576), draw(KEYS, 1, 1, 576)
        self.dout = draw(ROWS, 1, heads, 512)
        self.ids = torch.rand(ROWS, KEYS, generator=make, device="cuda").topk(WIDTH, sorted=False).indices
        self.ids = self.ids.int()[None].contiguous()
        self.length = torch.full((ROWS,), WIDTH, dtype=torch.int32, device="cuda")

    def forward(self, config) -> Callable[[], object]:
        return lambda: dsa_dispatch.run_fused_absorbed_sparse_attention(
            config, self.query, self.key, self.ids, SCALE, 512
        )

    def backward(self, config) -> Callable[[], object]:
        query, key = self.query.detach().requires_grad_(), self.key.detach().requires_grad_()
        out = dsa_dispatch.run_fused_absorbed_sparse_attention(config, query, key, self.ids, SCALE, 512)
        return lambda: torch.autograd.grad(out, (query, key), self.dout, retain_graph=True)

    def direct(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Provider and frontend called as they are, for 64 and 128 heads."""
        found = usable(self.query.device)
        kernels = frontend.load(frontend.ATTENTION_BACKWARD)
        q, kv, ids = self.query[:, 0], self.key[:, 0], self.ids[0]

        def forward() -> tuple[Tensor, Tensor]:
            return found.provider.run(q, kv, ids[:, None], SCALE, 512, self.length)

        out, lse = forward()
        natural = lse * found.answer.lse_factor
        sink = torch.full((self.heads,), -torch.inf, device="cuda")
        return forward, lambda: kernels.sparse_attention_backward_wrapper(
            q, kv[:, 0], out, self.dout[:, 0], natural, sink, ids, SCALE, self.length
        )


def check_dispatch() -> None:
    """The operation beside the kernels that it ends in."""
    for heads in (128, 64):
        with guarded(f"speed heads={heads}"):
            case = Case(heads)
            forward, backward = case.direct()
            calls = {"forward direct": forward, "backward direct": backward}
            for name, config in CONFIGS.items():
                calls |= {f"forward{name}": case.forward(config), f"backward{name}": case.backward(config)}
            times = in_turn(calls)
            note(
                f"speed heads={heads} (ms)",
                **{name.replace(" ", "_"): value for name, value in times.items()},
                **{
                    f"{name}_ratio".replace(" ", "_"): times[f"{name.split()[0]} direct"] / value
                    for name, value in times.items()
                    if not name.endswith("direct")
                },
            )


def copied(query: Tensor, legal) -> Tensor:
    """``pad_query`` that writes each element once, where ``F.pad`` fills the whole and then copies."""
    heads, channels = legal.heads, legal.channels
    if heads[0] == heads[1] and channels[0] == channels[1]:
        return query
    padded = query.new_empty(query.shape[0], heads[1], channels[1])
    padded[:, : heads[0], : channels[0]] = query
    padded[:, : heads[0], channels[0] :] = 0
    padded[:, heads[0] :] = 0
    return padded


def concatenated(query: Tensor, legal) -> Tensor:
    """``pad_query`` in one launch, for heads alone."""
    heads, channels = legal.heads, legal.channels
    if heads[0] == heads[1] or channels[0] != channels[1]:
        return copied(query, legal)
    return torch.cat((query, query.new_zeros(1).expand(query.shape[0], heads[1] - heads[0], channels[1])), 1)


def padded_by(pad, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        before = execution.pad_query
        execution.pad_query = pad
        try:
            return call()
        finally:
            execution.pad_query = before

    return run


def check_padding() -> None:
    """Few heads beside 64, with other ways of padding the query."""
    with guarded("padding"):
        cases = {heads: Case(heads) for heads in (64, 32, 16, 8)}
        config = CONFIGS[""]
        calls: dict[str, Callable[[], object]] = {}
        for heads, case in cases.items():
            calls[f"forward {heads}"] = case.forward(config)
            calls[f"backward {heads}"] = case.backward(config)
            if heads < 64:
                calls[f"forward {heads}, copied"] = padded_by(copied, case.forward(config))
                calls[f"forward {heads}, concatenated"] = padded_by(concatenated, case.forward(config))
        times = in_turn(calls)
        note(
            "padding (ms)", **{name.replace(" ", "_").replace(",", ""): time for name, time in times.items()}
        )
        note(
            "padding over 64 heads",
            **{
                name.replace(" ", "_").replace(",", ""): time / times[f"{name.split()[0]} 64"] - 1
                for name, time in times.items()
                if not name.endswith("64")
            },
        )
    with guarded("padding, its parts"):
        query = cases[32].query[:, 0]
        out = torch.empty(ROWS, 64, 512, dtype=torch.bfloat16, device="cuda")
        found = usable(query.device)
        whole, kv, ids = cases[64].query[:, 0], cases[64].key[:, 0], cases[64].ids[0][:, None]
        calls = {
            "F.pad of the query": lambda: torch.nn.functional.pad(query, (0, 0, 0, 32)),
            "output sliced and copied": lambda: out[:, :32].contiguous(),
            "kernel of 64 heads": lambda: found.provider.run(whole, kv, ids, SCALE, 512, cases[64].length),
            "kernel on overlapping rows": overlapping(found, query, kv, ids, cases[64].length),
        }
        note("padding 32 heads, its parts (ms)", **in_turn(calls))


def overlapping(found, query: Tensor, kv: Tensor, ids: Tensor, length: Tensor) -> Callable[[], object]:
    """No padded copy: 64 heads of a view whose second half are the next row's; the last row by itself."""
    rows, heads, channels = query.shape
    view = query.as_strided((rows - 1, 64, channels), (heads * channels, channels, 1))
    last = torch.nn.functional.pad(query[-1:], (0, 0, 0, 64 - heads))

    def run() -> object:
        main = found.provider.run(view, kv, ids[:-1], SCALE, 512, length[:-1])
        return main, found.provider.run(last, kv, ids[-1:], SCALE, 512, length[-1:])

    return run


def check_speed(quick: bool) -> None:
    check_dispatch()
    check_padding()
