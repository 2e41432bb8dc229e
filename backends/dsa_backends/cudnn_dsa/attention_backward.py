"""``attention_backward`` through the frontend's sparse backward, with the caller's own head count."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from dsa_backends.cudnn_dsa import frontend
from dsa_backends.cudnn_dsa.plans import PLANS, signature, workspace_of
from dsa_backends.flash_mla.slots import ids_within_length, is_hopper, on_device, packed
from dsa_dispatch._call import RowLayout, StageOptions

MAX_ELEMENTS: Final = 2**31 - 1
"""Of ``q`` in one launch: the kernel for compute capability 9.0 addresses with 32 bits."""
ROW_STEP: Final = 64


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
    # The kernel for compute capability 9.0 loads no key at or past the length. 10.x has many, not all of them known to.
    ids = packed(indices) if is_hopper(q.device) else ids_within_length(indices, length)
    length = packed(length)
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
    """The fewest pieces of rows below the kernel's addressing limit. All but the last are of a multiple of 64 rows: the
    lengths of a piece begin at 16 bytes, as the kernel was compiled to expect."""
    most = max(MAX_ELEMENTS // row_elements // ROW_STEP, 1) * ROW_STEP
    count = -(-rows // most)
    size = -(-rows // count // ROW_STEP) * ROW_STEP
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))


def provider() -> str:
    """What really runs. Raises ``BackendDeclined``."""
    frontend.load(frontend.ATTENTION_BACKWARD)
    return frontend.title()
