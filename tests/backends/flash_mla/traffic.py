"""What a call writes beside its kernels, by operator: every copy, fill and conversion between caller and provider."""

from __future__ import annotations

import dataclasses
from collections import Counter

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsa_dispatch._execution import attention


def anywhere(spec):
    """The backend without its packages and its devices: the fakes run on a CPU."""
    stages = {
        name: dataclasses.replace(stage, capability=dataclasses.replace(stage.capability, devices=None))
        for name, stage in spec.stages.items()
    }
    return dataclasses.replace(spec, packages=(), stages=stages)


BODIES = {
    "attention_forward": attention.attention_forward,
    "attention_backward": attention.attention_backward,
}
"""Of the opaque ops, which a mode sees from outside only."""
UNWRITTEN = ("empty", "new_empty", "_unsafe_view")


class Traffic(TorchDispatchMode):
    """While active, counts what operators write. A view writes nothing, nor does memory that is only reserved."""

    def __init__(self):
        super().__init__()
        self.written: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dsa_dispatch" and func._opname in BODIES:
            with self:
                return BODIES[func._opname](*args, **(kwargs or {}))
        # What an operator is made of, where it is: its schema may call a copy a view.
        with self:
            made = func.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        made = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func._opname.startswith(UNWRITTEN):
            results = made if isinstance(made, tuple | list) else (made,)
            for result, form in zip(results, func._schema.returns, strict=False):
                fresh = form.alias_info is None or form.alias_info.is_write
                if fresh and isinstance(result, Tensor):
                    self.written[func._opname] += result.nbytes
                    self.launches[func._opname] += 1
        return made

    @property
    def total(self):
        return self.written.total()
