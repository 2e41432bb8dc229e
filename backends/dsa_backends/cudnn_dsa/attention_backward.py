"""``attention_backward`` through the frontend's sparse backward, with the caller's own head count."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from dsa_backends.cudnn_dsa import frontend
from dsa_backends.cudnn_dsa.plans import PLANS, signature, workspace_of
from dsa_backends.flash_mla.slots import ids_within_length, on_device, packed
from dsa_dispatch._call import RowLayout, StageOptions

MAX_ELEMENTS: Final = 2**31 - 1
"""Of ``q`` in one launch: the kernel for compute capability 9.0 addresses with 32 bits."""


def attention_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    length: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    scale: float,
    v_channels: int,
    need_dq: bool,
    dkv: Tensor | None,
    rows: RowLayout,
    options: StageOptions,
) -> Tensor | None:
    """See ``dsa_dispatch._contract.AttentionBackward``. bf16 or fp16, even head counts, ``W`` a multiple of 128.

    The kernel always makes both gradients. It sums the keys' in fp32 and hands them over in the inputs' type, once per
    call; over several calls they are added up in ``dkv``.
    """
    dsa = frontend.load(frontend.ATTENTION_BACKWARD)
    q, kv, out, dout, lse = (packed(tensor) for tensor in (q, kv, out, dout, lse))
    ids, length = ids_within_length(indices, length), packed(length)
    sink = torch.full((q.shape[1],), -torch.inf, dtype=torch.float32, device=q.device)
    dq, part, dsink = torch.empty_like(q), torch.empty_like(kv), torch.empty_like(sink)
    with on_device(q):
        for piece in row_pieces(q.shape[0], q.shape[1] * q.shape[2]):
            operands = (q[piece], kv, out[piece], dout[piece], lse[piece], sink, ids[piece])
            plan = PLANS.get(
                ("attention_backward", signature(*operands)),
                functools.partial(_build, dsa, operands, length[piece]),
            )
            plan.execute(
                *operands,
                dq[piece],
                part,
                topk_length=length[piece],
                softmax_scale=scale,
                workspace=workspace_of(plan, q.device),
                d_sink=dsink,
            )
            if dkv is not None:
                dkv.add_(part)
    return dq if need_dq else None


def _build(dsa: Any, operands: tuple[Tensor, ...], length: Tensor) -> Any:
    q, kv, out, dout, lse, sink, ids = operands
    return dsa.SparseAttentionBackward(
        sample_q=q,
        sample_kv=kv,
        sample_out=out,
        sample_dout=dout,
        sample_lse=lse,
        sample_attn_sink=sink,
        sample_topk_idxs=ids,
        sample_topk_length=length,
    )


def row_pieces(rows: int, row_elements: int) -> Iterator[slice]:
    """The fewest equal pieces of rows that stay below the kernel's addressing limit."""
    count = -(-rows * row_elements // MAX_ELEMENTS)
    size = -(-rows // count)
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))


def provider() -> str:
    """What really runs. Raises ``BackendDeclined``."""
    frontend.load(frontend.ATTENTION_BACKWARD)
    return frontend.title()
