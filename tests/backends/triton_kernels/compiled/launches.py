"""Launches that end before anything is compiled or run: what each would have compiled is kept."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from unittest import mock

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from dsa_backends.triton_kernels import (
    attention_backward,
    attention_forward,
    indexer_loss,
    indexer_target,
    indexer_topk,
)

_MODULES = (attention_backward, attention_forward, indexer_loss, indexer_target, indexer_topk)


class _Driver:
    """A GPU that is not there, as far as a launch asks before it compiles."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch

    def get_current_stream(self, device):
        return 0


@contextmanager
def recorded_launches(arch, capability):
    """Kernel name to the set of cache keys it was launched with: as many compilations on a GPU of this kind."""
    variants = defaultdict(set)

    def keep(*, key, fn, **_):
        variants[fn.name].add(str(key))
        return True  # do not compile; the launch then returns without running

    # Never reset: that asks for a real GPU, and this process has no other use for one.
    driver.set_active(_Driver(capability))
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(knobs.runtime, "jit_cache_hook", keep))
        # The default is about to change, and warns; a launch does not say which it wants.
        patches.enter_context(mock.patch.dict(os.environ, {"TRITON_DEFAULT_FP_FUSION": "1"}))
        for module in _MODULES:
            if hasattr(module, "device_architecture"):
                patches.enter_context(mock.patch.object(module, "device_architecture", return_value=arch))
        yield variants
