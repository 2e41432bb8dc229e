"""``indexer_loss``: KL terms in PyTorch around the frontend's scores and its indexer backward."""

from __future__ import annotations

from torch import Tensor

from dsa_backends.cudnn_dsa import frontend
from dsa_backends.cudnn_dsa.dense_loss import dense_loss
from dsa_backends.cudnn_dsa.sparse_loss import sparse_loss
from dsa_backends.flash_mla.slots import on_device, packed
from dsa_dispatch._call import RowLayout, StageOptions
from dsa_dispatch._contract import LossTerms


def indexer_loss(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    *,
    indices: Tensor | None,
    length: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    mass: Tensor,
    rows: RowLayout,
    use_relu: bool,
    need_dq: bool,
    need_dw: bool,
    dk: Tensor | None,
    options: StageOptions,
) -> LossTerms:
    """See ``dsa_dispatch._contract.IndexerLoss``. bf16, multiples of 64 heads of 128 channels, ``W`` of 128.

    The KL terms see the weights in full; the backward kernel reads them in bf16 and gives the gradients of ``q`` and
    ``w`` in bf16. It always makes all three gradients.
    """
    dsa = frontend.load(frontend.INDEXER_LOSS)
    q, k, w = packed(q), packed(k), packed(w)
    backward = need_dq or need_dw or dk is not None
    with on_device(q):
        if indices is None or length is None:
            kl, dq, dw = dense_loss(dsa, q, k, w, starts, ends, mass, rows, dk, backward)
        else:
            kl, dq, dw = sparse_loss(dsa, q, k, w, indices, length, mass, dk, backward)
    return LossTerms(
        kl,
        dq.float() if need_dq and dq is not None else None,
        dw.float() if need_dw and dw is not None else None,
    )


def provider() -> str:
    """What really runs. Raises ``BackendDeclined``."""
    frontend.load(frontend.INDEXER_LOSS)
    return frontend.title()
