"""Time of a short call on a machine that others use too."""

from __future__ import annotations

import gc
import statistics
import time

WINDOW = 300e-6
"""Seconds of one reading: shorter than the slice after which a busy machine gives the processor to somebody else."""


def microseconds(*functions, rounds=300, enough=None):
    """Microseconds per call of each function, measured in turns in one run: the least of the medians of a few windows.

    Another process can only add time, so the least is the function's own; the median inside a group of windows keeps
    one lucky reading of the clock from deciding. Ends early once the first function needs ``enough`` or less.
    """
    least = [float("inf")] * len(functions)
    collecting = gc.isenabled()
    gc.disable()
    try:
        calls = [
            max(1, round(WINDOW / min(_seconds(function, 1) for _ in range(20)))) for function in functions
        ]
        for _ in range(rounds):
            for place, function in enumerate(functions):
                readings = [_seconds(function, calls[place]) / calls[place] for _ in range(3)]
                least[place] = min(least[place], statistics.median(readings) * 1e6)
            if enough is not None and least[0] <= enough:
                break
    finally:
        if collecting:
            gc.enable()
    return least


def _seconds(function, calls):
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - begin
