"""What this backend provides, as data, and the kernel behind it. Listing backends imports this file: keep it light."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsa_dispatch import (
    BackendSpec,
    CallSpec,
    Capability,
    Heads,
    IndexWidth,
    RowLayout,
    Scratch,
    StageOptions,
    StageSpec,
    hookimpl,
)


def _scratch(call: CallSpec) -> Scratch:
    """Bytes a row needs beside its result: the core makes its chunks small enough for them."""
    gathered = 3 * call.width * call.qk_channels * 4
    return Scratch(per_row=(("gathered keys", gathered), ("scores", 4 * call.heads * call.width * 4)))


SPEC = BackendSpec(
    name="example",
    version="0.1.0",
    rank=-200,  # below the reference: under `auto` nobody gets the template by accident
    doc="A template: attention over gathered keys through torch's scaled_dot_product_attention, forward only.",
    stages={
        "attention_forward": StageSpec(
            Capability(
                dtypes=frozenset({"float32", "bfloat16"}),
                heads=Heads(multiple_of=4, maximum=128, pad=True),
                width=IndexWidth(maximum=4096),
                index_form="any",
                deterministic=False,
                scratch=_scratch,
            ),
            f"{__name__}:attention_forward",
        )
    },
)


@hookimpl
def dsa_dispatch_backends() -> list[BackendSpec]:
    return [SPEC]


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
    """See ``dsa_dispatch._contract.AttentionForward``: ``q [T, H, Dqk]``, ``kv [S, Dqk]``, ``indices [T, W]``."""
    slots = torch.arange(indices.shape[1], device=q.device)
    valid = (indices >= 0) & (indices < kv.shape[0]) & (slots < length[:, None])
    some = valid.any(dim=1)
    # Masked by selection and not by a product: what an invalid slot's memory holds may be NaN.
    keys = torch.where(valid[..., None], kv[torch.where(valid, indices, 0)], 0.0)
    query, keys = q.float()[:, :, None], keys.float()[:, None].expand(-1, q.shape[1], -1, -1)
    # A row without a key attends to slot 0, so that its softmax is not one over nothing, and is cleared below.
    mask = (valid | ~some[:, None])[:, None, None]
    out = F.scaled_dot_product_attention(query, keys, keys[..., :v_channels], attn_mask=mask, scale=scale)
    out = torch.where(some[:, None, None], out[:, :, 0], 0.0).to(q.dtype)
    scores = torch.einsum("thd,thwd->thw", q.float(), keys) * scale
    return out, scores.masked_fill(~valid[:, None], -torch.inf).logsumexp(dim=-1)
