"""What rounding explains is allowed, and no more: right kernels of every type pass, and infinities have a sign."""

from __future__ import annotations

import pytest
import torch
from conformance.candidates import failures

from dsa_dispatch.testing.judge import error_of


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_right_backward_with_delta_from_the_rounded_output_passes(dtype):
    assert failures("attention_backward", "", dtypes=frozenset({dtype})) == {}


def test_an_empty_row_whose_lse_is_plus_infinity_fails():
    wanted = torch.tensor([[-torch.inf, 1.0]])
    assert error_of("lse", wanted, wanted, "float32") == ""
    assert error_of("lse", -wanted.masked_fill(wanted.isfinite(), -1.0), wanted, "float32") == (
        "lse: inf at [0, 0], exact -inf"
    )


def test_an_allowance_is_added_to_the_limit_and_excuses_nothing_beyond_it():
    wanted, allowance = torch.ones(2, 4), torch.full((2, 4), 0.01)
    assert error_of("dq", wanted + 0.015, wanted, "bfloat16", allowance=allowance) == ""
    assert "limit 0.006 for bfloat16 and 0.01 for the rounding" in error_of(
        "dq", wanted + 0.017, wanted, "bfloat16", allowance=allowance
    )
