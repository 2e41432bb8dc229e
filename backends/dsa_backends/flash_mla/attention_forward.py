"""``attention_forward`` through FlashMLA's sparse prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from dsa_backends.flash_mla.providers import usable
from dsa_backends.flash_mla.slots import (
    aligned,
    ids_within_length,
    natural_lse,
    on_device,
    packed,
)
from dsa_backends.flash_mla.spec import COMPUTE_CAPABILITIES, HEAD_GROUP
from dsa_dispatch._call import RowLayout, StageOptions


def attention_forward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    length: Tensor,
    *,
    scale: float,
    v_channels: int,
    rows: RowLayout,
    options: StageOptions,
) -> tuple[Tensor, Tensor]:
    """See ``dsa_dispatch._contract.AttentionForward``. ``q`` bf16 with a multiple of 64 heads, ``W`` of 128.

    The kernel knows 64 and 128 heads; more run in groups of 128, each a pass over the keys.
    """
    found = usable(q.device)
    ids = packed(indices) if found.answer.ends_at_length else ids_within_length(indices, length)
    keys = aligned(kv)[:, None]
    results = []
    with on_device(q):
        for first in range(0, q.shape[1], HEAD_GROUP):
            group = aligned(q[:, first : first + HEAD_GROUP])
            out, lse = found.provider.run(group, keys, ids[:, None], scale, v_channels, length)
            results.append((out, natural_lse(lse, found.answer.lse_factor)))
    if len(results) == 1:
        return results[0]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def provider() -> str:
    """What really runs, e.g. ``"sgl_kernel 0.4.5, lse base 2"``. Raises ``BackendDeclined``."""
    return usable(_device()).title


def _device() -> torch.device:
    """The current device, or the first one whose architecture the kernels know."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    current = torch.cuda.current_device()
    order = (current, *(index for index in range(torch.cuda.device_count()) if index != current))
    known = [index for index in order if _knows(torch.cuda.get_device_capability(index))]
    return torch.device("cuda", known[0] if known else current)


def _knows(capability: tuple[int, int]) -> bool:
    return any(low <= capability < high for low, high in COMPUTE_CAPABILITIES)
