"""The spec of torch_dense: every stage, each function where the spec says, nothing that it declines."""

from __future__ import annotations

import importlib

import pytest

from dsa_backends.torch_dense.spec import SPEC
from dsa_dispatch._capability import FLOATS
from dsa_dispatch._stages import STAGES


def test_it_provides_every_stage():
    assert set(SPEC.stages) == set(STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_each_function_is_where_the_spec_says(stage):
    module, _, name = SPEC.stages[stage].function.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("stage", STAGES)
def test_it_accepts_whatever_is_legal(stage):
    capability = SPEC.stages[stage].capability
    assert capability.devices is None
    assert capability.compute_capabilities is None
    assert capability.dtypes == capability.weights_dtypes == FLOATS
    assert all(capability.heads.runs(count) and capability.kv_heads.runs(count) for count in (1, 3, 24, 129))
    assert all(capability.channels.fit(qk, v) == qk for qk, v in ((1, 1), (577, 511)))
    assert all(capability.width.fit(width) == width for width in (1, 2051))
    assert capability.layouts == {"bshd", "thd"}
    assert capability.bounds == {"causal", "ranges"}
    assert capability.context_parallel == {"none", "contiguous", "zigzag"}
    assert capability.index_form == "any"
    assert capability.tie_rule == "lower_index"
    assert capability.deterministic
    assert capability.max_rows is capability.max_keys is capability.max_elements is None
