"""The two plain building blocks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Projection(nn.Linear):
    """A linear map without bias, initialised to keep the variance of its input."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=gain * inputs**-0.5)


class Norm(nn.RMSNorm):
    """RMSNorm in the type of its scale: torch's own warns, and is slow, for bf16 activations beside an fp32 scale."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.weight.dtype)
        return functional.rms_norm(wide, (x.shape[-1],), self.weight, self.eps).to(x.dtype)
