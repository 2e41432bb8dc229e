"""Peak of live CPU tensor memory during a call, from the allocator's own events."""

from __future__ import annotations

import torch


def peak_bytes(call):
    """``call()``, and the most bytes that were allocated at once above what was live before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        result = call()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    live = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        live += change
        peak = max(peak, live)
    return result, peak


def nbytes(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
