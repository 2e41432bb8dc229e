"""The adapter over every published signature: each claim of the contract."""

from __future__ import annotations

import dataclasses

import fake_providers
import pytest
import torch

from dsa_backends.flash_mla.attention_forward import attention_forward, provider
from dsa_backends.flash_mla.spec import SPEC
from dsa_dispatch._call import CallSpec, DeviceInfo, RowLayout, StageOptions
from dsa_dispatch._decline import DeclineCode
from dsa_dispatch._dispatch.check import declines
from dsa_dispatch._registry import selftest
from dsa_dispatch.testing.checks import softmax_checks
from dsa_dispatch.testing.operands import Subject

CPU = torch.device("cpu")
CAPABILITY = SPEC.stages["attention_forward"].capability
SIGNATURES = (
    fake_providers.main_signature,
    fake_providers.base_two_signature,
    fake_providers.branch_signature,
    fake_providers.hopper_signature,
    fake_providers.oldest_signature,
)


def checks():
    subject = Subject(
        SPEC.name, "attention_forward", dataclasses.replace(CAPABILITY, devices=None), attention_forward, CPU
    )
    return [pytest.param(check, id=name.replace(" ", "_")) for name, check in softmax_checks(subject)]


@pytest.mark.parametrize("check", checks())
@pytest.mark.parametrize("signature", SIGNATURES[1:4])
def test_the_contract_holds_over_a_provider_that_misbehaves_as_the_real_ones(signature, check):
    with fake_providers.flash_mla(signature):
        check()


@pytest.mark.parametrize("signature", SIGNATURES)
def test_the_self_test_passes_over_every_signature(signature):
    with fake_providers.flash_mla(signature):
        selftest.reason_left_out(attention_forward, CAPABILITY, "attention_forward", CPU)


@pytest.mark.parametrize(("signature", "base"), list(zip(SIGNATURES, "e2eee", strict=True)))
def test_the_base_of_the_lse_is_read_from_an_answer_and_named(signature, base):
    with fake_providers.flash_mla(signature):
        assert provider().endswith(f"lse base {base}")


def test_heads_beyond_128_run_in_groups_that_do_not_change_an_answer():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 320, 576, generator=generator).bfloat16()
    kv = torch.randn(9, 576, generator=generator).bfloat16()
    ids = torch.full((3, 128), -1, dtype=torch.int32)
    ids[:2, :4] = torch.randint(0, 9, (2, 4), generator=generator)
    length = torch.tensor([4, 2, 0], dtype=torch.int32)
    arguments = {"scale": 0.1, "v_channels": 512, "rows": RowLayout(1, 3, 9), "options": StageOptions()}
    with fake_providers.flash_mla(fake_providers.base_two_signature):
        out, lse = attention_forward(q, kv, ids, length, **arguments)
        for first in range(0, 320, 64):
            part = slice(first, first + 64)
            one, one_lse = attention_forward(q[:, part], kv, ids, length, **arguments)
            # 64 and 128 heads are other matrix products on a CPU: their sums differ in order.
            assert float((out[:, part].float() - one.float()).abs().max()) < 2e-2
            assert float((lse[:2, part] - one_lse[:2]).abs().max()) < 1e-4
    assert bool((lse[2] == -torch.inf).all())
    assert not out[2].any()


@pytest.mark.parametrize(
    ("heads", "run"), [(1, 64), (8, 64), (64, 64), (65, 128), (96, 128), (128, 128), (129, 192), (256, 256)]
)
def test_heads_are_padded_to_what_the_kernel_knows(heads, run):
    assert CAPABILITY.heads.fit(heads) == run


@pytest.mark.parametrize(
    ("capability", "served"),
    [((8, 9), False), ((9, 0), True), ((10, 0), True), ((10, 3), True), ((10, 7), False), ((12, 0), False)],
)
def test_gpus_are_a_list(capability, served):
    call = CallSpec("run_fused_absorbed_sparse_attention", device="cuda", width=2048, heads=64)
    info = DeviceInfo("cuda", "gpu", capability, 1 << 37, 1 << 18)
    codes = [decline.code for decline in declines(CAPABILITY, "attention_forward", call, info)]
    assert codes == ([] if served else [DeclineCode.COMPUTE_CAPABILITY])
