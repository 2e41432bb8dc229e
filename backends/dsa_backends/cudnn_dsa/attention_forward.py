"""``attention_forward`` through the frontend's own sparse forward, on the GPUs where this version has one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from dsa_backends.cudnn_dsa import frontend
from dsa_backends.cudnn_dsa.spec import HEAD_GROUP
from dsa_backends.flash_mla.messages import first_line
from dsa_backends.flash_mla.probe import ProbeError, ask
from dsa_backends.flash_mla.slots import (
    aligned,
    ids_within_length,
    natural_lse,
    on_device,
)
from dsa_dispatch._call import RowLayout, StageOptions
from dsa_dispatch._decline import Decline, DeclineCode
from dsa_dispatch.errors import BackendDeclined

NATIVE_128: Final = 512
"""Channels for which the kernel takes 128 heads at once."""


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
    """See ``dsa_dispatch._contract.AttentionForward``. bf16 or fp16, multiples of 64 heads."""
    dsa = frontend.load(frontend.ATTENTION_FORWARD)
    factor = _lse_factor(str(q.device))
    ids, keys = ids_within_length(indices, length), aligned(kv)
    step = 2 * HEAD_GROUP if q.shape[2] == NATIVE_128 and q.shape[1] % (2 * HEAD_GROUP) == 0 else HEAD_GROUP
    results = []
    with on_device(q):
        for first in range(0, q.shape[1], step):
            group = aligned(q[:, first : first + step])
            out, lse = _run(dsa, group, keys, ids, scale, length)
            results.append((out, natural_lse(lse, factor)))
    if len(results) == 1:
        return results[0]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def _run(dsa: Any, q: Tensor, kv: Tensor, ids: Tensor, scale: float, length: Tensor) -> tuple[Tensor, Tensor]:
    result = dsa.sparse_attention_forward_wrapper(q, kv, ids, topk_length=length, softmax_scale=scale)
    return result["out"], result["lse"]


@lru_cache(maxsize=64)
def _lse_factor(device: str) -> float:
    """Whether this version has a forward for this GPU is asked of it, not of a table: later versions have more."""
    dsa = frontend.load(frontend.ATTENTION_FORWARD)
    try:
        return ask(
            lambda q, kv, ids, scale, _, length: _run(dsa, q, kv[:, 0], ids[:, 0], scale, length),
            torch.device(device),
        ).lse_factor
    except ProbeError as wrong:
        raise BackendDeclined(
            Decline(
                DeclineCode.SELF_TEST_FAILED,
                frontend.title(),
                wrong.found,
                wrong.wanted,
                "Use backend flashmla or triton for this stage.",
            )
        ) from wrong
    except Exception as error:
        raise BackendDeclined(
            Decline(
                DeclineCode.COMPUTE_CAPABILITY,
                f"sparse forward of {frontend.title()}",
                f"{_gpu(device)}: {type(error).__name__}: {first_line(error)}",
                "the GPUs for which this version has a forward (10.x in 1.32; 9.0 from 1.33)",
                "Use backend flashmla or triton for this stage, or a later nvidia-cudnn-frontend.",
            )
        ) from error


def _gpu(device: str) -> str:
    found = torch.device(device)
    if found.type != "cuda":
        return device
    major, minor = torch.cuda.get_device_capability(found)
    return f"compute capability {major}.{minor}"


def provider() -> str:
    """What really runs. Raises ``BackendDeclined``."""
    factor = _lse_factor(str(frontend.probe_device()))
    return f"{frontend.title()}, lse base {'e' if factor == 1.0 else '2'}"
