"""Run a stage in full precision: no graph, no TF32 or bf16 inside an fp32 product.

Autocast needs no switch: every product writes into a buffer (``out=``), and such calls it leaves alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_LOCK: Final = threading.Lock()
_depth = 0
_saved: list[tuple[Any, str]] = []


def _enter() -> None:
    global _depth
    with _LOCK:
        _depth += 1
        if _depth > 1:
            return
        mkldnn: Any = torch.backends.mkldnn  # the attribute is made at run time
        for switch in (torch.backends.cuda.matmul, mkldnn.matmul):
            found = switch.fp32_precision
            if found not in ("ieee", "none"):
                _saved.append((switch, found))
                switch.fp32_precision = "ieee"


def _leave() -> None:
    global _depth
    with _LOCK:
        _depth -= 1
        if _depth:
            return
        while _saved:
            switch, found = _saved.pop()
            switch.fp32_precision = "none"  # an inherited value must stay inherited
            if switch.fp32_precision != found:
                switch.fp32_precision = found


@contextmanager
def ieee_products() -> Iterator[None]:
    """fp32 products in fp32. The switches are process-wide, and backward has its own thread: so count."""
    _enter()
    try:
        yield
    finally:
        _leave()


def stage_body(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` without recording and without reduced-precision products."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), ieee_products():
            return function(*args, **kwargs)

    return run
