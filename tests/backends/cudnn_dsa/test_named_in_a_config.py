"""``cudnn`` in a config: FlashMLA's forward and cuDNN's backward, each by the name of what really runs."""

from __future__ import annotations

import contextlib

import fake_frontend
import fake_providers
import torch
from traffic import anywhere

import dsa_dispatch as dsa
from dsa_backends.cudnn_dsa.spec import SPEC as CUDNN
from dsa_backends.flash_mla.spec import SPEC as FLASHMLA
from dsa_dispatch.testing import isolated_registry

CONFIG = {"dsa_kernel_backend": "cudnn", "dsa_kernel_fallback": "error"}


@contextlib.contextmanager
def vendors(signature, forward):
    with (
        isolated_registry(anywhere(CUDNN), anywhere(FLASHMLA)),
        fake_frontend.installed(forward=forward),
        fake_providers.flash_mla(signature),
    ):
        yield


def decided(signature, forward=False):
    query = torch.randn(3, 1, 16, 576).bfloat16().requires_grad_()
    key, ids = torch.randn(9, 1, 1, 576).bfloat16(), torch.zeros(1, 3, 128, dtype=torch.int32)
    with vendors(signature, forward):
        return dsa.explain("run_fused_absorbed_sparse_attention", CONFIG, query, key, ids, 0.05, 512)


def test_each_stage_names_its_backend_its_provider_and_the_base_of_its_lse():
    for signature, base in ((fake_providers.base_two_signature, "2"), (fake_providers.main_signature, "e")):
        text = str(decided(signature))
        assert f"flashmla (flash_mla, lse base {base}): chosen" in text
        assert "cudnn (cudnn-frontend without metadata): chosen" in text


def test_a_forward_of_cudnn_that_this_gpu_lacks_is_declined_with_its_reason():
    def broken(*arguments, **keywords):
        raise RuntimeError("Unsupported h_q: 64")

    decision = decided(broken)
    chosen = {stage.stage: stage.chosen for stage in decision.stages}
    assert chosen["attention_forward"] is None
    assert chosen["attention_backward"].backend == "cudnn"
    text = str(decision)
    assert "found SM90" in text
    assert "API_MISMATCH flash_mla.flash_mla_sparse_fwd" in text


def test_the_rank_decides_where_both_have_a_forward():
    decision = decided(fake_providers.main_signature, forward=True)
    assert decision.stages[0].chosen.backend == "flashmla"
