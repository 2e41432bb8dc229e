"""A stage computes in full precision whatever the process has switched on, and leaves the switches as they were."""

from __future__ import annotations

import pytest
import torch

from dsa_backends.torch_dense._precision import ieee_products, stage_body
from dsa_backends.torch_dense.attention_forward import attention_forward
from dsa_dispatch._call import RowLayout, StageOptions


@pytest.fixture
def medium_precision():
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def precisions():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


def test_tf32_and_bf16_products_are_off_inside_and_back_afterwards(medium_precision):
    outside = precisions()
    assert "tf32" in outside
    with ieee_products():
        with ieee_products():
            assert precisions() == ("ieee", "ieee")
        assert precisions() == ("ieee", "ieee")
    assert precisions() == outside
    assert torch.get_float32_matmul_precision() == "medium"


def test_the_switches_come_back_after_an_error(medium_precision):
    outside = precisions()

    @stage_body
    def failing(tensor):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing(torch.ones(1))
    assert precisions() == outside


def test_autocast_and_grad_mode_change_nothing():
    generator = torch.Generator().manual_seed(0)
    q, kv = torch.randn(6, 2, 8, generator=generator), torch.randn(10, 8, generator=generator)
    indices = torch.randint(0, 10, (6, 5), generator=generator, dtype=torch.int32)
    length = torch.full((6,), 5, dtype=torch.int32)

    def run():
        return attention_forward(
            q, kv, indices, length, scale=0.3, v_channels=6, rows=RowLayout(1, 6, 10), options=StageOptions()
        )

    plain = run()
    q.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run()
    assert all(torch.equal(a, b) and not b.requires_grad for a, b in zip(plain, cast, strict=True))
