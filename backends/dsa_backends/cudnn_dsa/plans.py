"""The frontend's plan objects, kept in a bounded table.

Its convenience functions keep one plan for every distinct shape and never drop any, so variable-length training grows
them without bound. The compiled kernels behind the plans do not depend on lengths and are the frontend's to keep.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

import torch
from torch import Tensor


class Plans:
    """Least recently used plans; safe to share between the forward's thread and autograd's."""

    def __init__(self, limit: int = 256) -> None:
        self.limit = limit
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()

    def get(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """The plan under ``key``; built, checked and compiled where it is new. Raises what the frontend raises."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                return plan
        plan = build()
        if not plan.check_support():
            raise RuntimeError(f"{type(plan).__name__} does not support {key}")
        plan.compile()
        with self._lock:
            self._plans[key] = plan
            while len(self._plans) > self.limit:
                self._plans.popitem(last=False)
        return plan


PLANS = Plans()


def signature(*tensors: Tensor) -> Hashable:
    """What a plan depends on: it is specialised to shapes, strides, types and device."""
    return tuple((tensor.device, tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors)


def workspace_of(plan: Any, device: torch.device) -> Tensor:
    return torch.empty(plan.scratch_workspace_bytes(), dtype=torch.uint8, device=device)
