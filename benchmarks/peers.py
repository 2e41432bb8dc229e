"""Vendors' kernels called directly, to be measured beside the backends that wrap them.

``PYTHONPATH=benchmarks:$PYTHONPATH dsa-dispatch bench --suite h200 --peer flashmla-direct=peers:flash_mla_forward
--peer cudnn-direct=peers:cudnn``. Each sits out where its kernel is not here or does not run the case as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsa_backends.cudnn_dsa import frontend
from dsa_backends.flash_mla.providers import usable
from dsa_dispatch.errors import BackendDeclined

Call = Callable[[], object]


def flash_mla_forward(inputs) -> Call | None:
    """The sparse forward of whichever FlashMLA build is here."""
    case = inputs.case
    if case.stage not in ("attention_forward", "decode") or case.heads % 64 or case.topk % 128:
        return None
    try:
        run = usable(inputs.query.device).provider.run
    except BackendDeclined:
        return None
    q, kv, ids = inputs.query[:, 0], inputs.key[:, 0], inputs.indices[0][:, None]
    length = torch.full((case.rows,), case.topk, dtype=torch.int32, device=q.device)
    return lambda: run(q, kv, ids, case.scale, case.v_channels, length)


def cudnn(inputs) -> Call | None:
    """cuDNN's sparse backward, and its scorer followed by its top-k."""
    case = inputs.case
    try:
        if case.stage == "attention_backward" and case.heads >= 64 and not case.deterministic:
            return _cudnn_backward(inputs)
        # The scores of the whole call are written at once.
        if case.stage == "indexer_topk" and case.rows * case.keys <= 1 << 28:
            return _cudnn_topk(inputs)
    except BackendDeclined:
        return None
    return None


def _cudnn_backward(inputs) -> Call:
    case = inputs.case
    kernels = frontend.load(frontend.ATTENTION_BACKWARD)
    found = usable(inputs.query.device)
    q, kv, ids = inputs.query[:, 0], inputs.key[:, 0, 0], inputs.indices[0]
    length = torch.full((case.rows,), case.topk, dtype=torch.int32, device=q.device)
    out, lse = found.provider.run(q, inputs.key[:, 0], ids[:, None], case.scale, case.v_channels, length)
    natural = lse * found.answer.lse_factor
    sink = torch.full((case.heads,), -torch.inf, device=q.device)
    return lambda: kernels.sparse_attention_backward_wrapper(
        q, kv, out, inputs.dout[:, 0], natural, sink, ids, case.scale, length
    )


def _cudnn_topk(inputs) -> Call:
    case = inputs.case
    kernels = frontend.load(frontend.ATTENTION_BACKWARD)
    q, k, w = (
        inputs.q.transpose(0, 1),
        inputs.k.transpose(0, 1)[:, :, None],
        inputs.weights.transpose(0, 1),
    )
    offset = torch.full((1,), case.keys - case.rows, dtype=torch.int32, device=q.device)
    ends = (torch.arange(case.rows, device=q.device) + case.keys - case.rows + 1).int()

    def call() -> object:
        scores = kernels.indexer_forward_wrapper(q, k, w, ratio=1, q_causal_offsets=offset)["scores"][0]
        return kernels.indexer_top_k_wrapper(scores, ends, case.topk, return_val=False, deterministic=False)

    return call
