"""TileLang on a GPU: the conformance suite, and the public reports that name its kernels or selectors."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dsa_dispatch.testing import BackendConformance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="needs tilelang"),
]


class TestTileLangOnGpu(BackendConformance):
    backend = "tilelang"


def exact_best(scores, topk):
    return [
        torch.sort(-(row + 0.0), stable=True).indices[:topk].sort().values.tolist() for row in scores.cpu()
    ]


def bits(rows, columns, low, high):
    return torch.randint(low, high, (rows, columns), dtype=torch.int32, device="cuda").view(torch.float32)


def scores_of(kind):
    """Rows whose threshold bin holds more than a fixed list of candidates would."""
    if kind == "tilelang 1351: one bin of 10 bits":
        return bits(5, 16384, 0x3F900000, 0x3F900400)
    if kind == "sglang 36807: monotone":
        return torch.arange(16448, dtype=torch.float32, device="cuda").repeat(3, 1) / 16448
    if kind == "vllm 51782: 33 rows in [1.0, 1.245)":
        return 1 + 0.245 * torch.rand(33, 16388, device="cuda")
    return torch.randn(3, 40000, device="cuda").relu()


@pytest.mark.parametrize(
    "kind",
    [
        "tilelang 1351: one bin of 10 bits",
        "sglang 36807: monotone",
        "vllm 51782: 33 rows in [1.0, 1.245)",
        "thousands of exact zeros at the cut",
    ],
)
@pytest.mark.parametrize("topk", [2048, 21000])
def test_no_candidate_is_dropped_and_ties_fall_to_the_lower_id(kind, topk):
    from dsa_backends.tilelang_kernels.indexer_topk import select_from_scores

    scores = scores_of(kind)
    starts = torch.zeros(len(scores), dtype=torch.int32, device="cuda")
    ids, length = select_from_scores(scores, starts, starts + scores.shape[1], topk)
    for row, wanted in enumerate(exact_best(scores, topk)):
        assert ids[row, : int(length[row])].sort().values.tolist() == wanted
        assert bool((ids[row, len(wanted) :] == -1).all())
