"""Time and memory of one call on one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

Call = Callable[[], object]

_LEAD_CYCLES: Final = 4_000_000
"""About 2 ms: work is put in a CUDA stream while it waits, so that the host's time is not counted as the kernel's."""


class Clock(Protocol):
    """``once`` runs a call and returns its milliseconds; ``scratch`` the bytes that a call held at its height beyond
    its inputs and outputs, None where that cannot be told; ``product`` the TFLOP/s of a matrix product."""

    @property
    def product_name(self) -> str: ...

    def once(self, call: Call) -> float: ...

    def scratch(self, call: Call) -> int | None: ...

    def product(self) -> float: ...


@dataclass(frozen=True, slots=True)
class CpuClock:
    """``perf_counter`` around the call."""

    product_name: str = "512³ float32"

    def once(self, call: Call) -> float:
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e3

    def scratch(self, call: Call) -> int | None:
        return None

    def product(self) -> float:
        return _product(self, 512, torch.float32, torch.device("cpu"))


class CudaClock:
    """CUDA events around the call. With ``flush`` the L2 cache is overwritten before each."""

    product_name = "8192³ bfloat16"

    def __init__(self, device: torch.device, flush: bool) -> None:
        self.device = device
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self.cache = torch.empty(max(size, 1 << 26), dtype=torch.int8, device=device) if flush else None

    def once(self, call: Call) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_LEAD_CYCLES)
        if self.cache is not None:
            self.cache.zero_()
        begin.record()
        result = call()
        end.record()
        end.synchronize()
        del result
        return float(begin.elapsed_time(end))

    def scratch(self, call: Call) -> int | None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = call()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_allocated(self.device) - before - nbytes(result))

    def product(self) -> float:
        return _product(self, 8192, torch.bfloat16, self.device)


def clock_for(device: torch.device, flush: bool) -> Clock:
    return CudaClock(device, flush) if device.type == "cuda" else CpuClock()


def nbytes(result: object) -> int:
    """Bytes of all tensors in nested tuples and lists."""
    if isinstance(result, Tensor):
        return result.nbytes
    return sum(nbytes(part) for part in result) if isinstance(result, (tuple, list)) else 0


def _product(clock: Clock, size: int, dtype: torch.dtype, device: torch.device) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = sorted(clock.once(lambda: left @ right) for _ in range(12))
    return float(2 * size**3 / (times[len(times) // 2] * 1e9))
