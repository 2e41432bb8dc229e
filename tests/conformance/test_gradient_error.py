"""A declared ``gradient_error`` widens the limit of gradients to that figure, and of nothing else; it is shown."""

from __future__ import annotations

import json

import pytest

import dsa_dispatch as dsa
from dsa_backends.torch_dense.attention_backward import attention_backward as right
from dsa_dispatch.testing import ConformanceError, FakeBackend, conformance_checks, isolated_registry
from dsa_dispatch.testing.judge import limit_of

STAGE = "attention_backward"
OFF = 0.02


def two_per_cent_off(*operands, **options):
    dq = right(*operands, **options)
    return None if dq is None else dq * (1 + OFF)


def failures(dtype="bfloat16", **declared):
    """Name of every failing check to its message, of a backward whose query gradient is 2 % too large."""
    fake = FakeBackend(
        "candidate", [STAGE], replace={STAGE: two_per_cent_off}, dtypes=frozenset({dtype}), **declared
    )
    found = {}
    with isolated_registry(fake.spec, installed=True):
        for check in conformance_checks("candidate"):
            try:
                check.run()
            except ConformanceError as error:
                found[check.name] = str(error)
    return found


def test_without_a_declaration_the_contract_is_the_limit():
    assert "limit 0.006 for bfloat16" in failures()["values bfloat16"]


def test_within_the_declared_figure_every_check_passes():
    assert failures(gradient_error=0.03) == {}


def test_beyond_the_declared_figure_nothing_passes():
    found = failures(gradient_error=0.015)
    assert "limit 0.015 for bfloat16" in found["values bfloat16"]
    assert any(name.startswith("accepts") for name in found)


def test_a_figure_for_bfloat16_does_not_excuse_a_finer_type():
    # 0.1 in bfloat16 is 2**-16 of that in float32, below the limit of that type.
    assert "limit 1e-05 for float32" in failures("float32", gradient_error=0.1)["values float32"]


@pytest.mark.parametrize(
    ("what", "dtype", "declared", "limit"),
    [
        ("dq", "bfloat16", 0.0, 6e-3),
        ("dq", "bfloat16", 4e-3, 6e-3),
        ("dkv", "bfloat16", 12e-3, 12e-3),
        ("dq", "float16", 12e-3, 2e-3),
        ("dq", "float16", 32e-3, 4e-3),
        ("dq", "float64", 12e-3, 1e-11),
        ("out", "bfloat16", 12e-3, 4e-3),
    ],
)
def test_the_limit_of_a_gradient_is_the_larger_of_contract_and_declaration(what, dtype, declared, limit):
    assert limit_of(what, dtype, declared) == limit


def test_a_bound_is_also_checked_in_the_coarsest_type_at_large_scores():
    fake = FakeBackend("candidate", [STAGE], gradient_error=0.03)
    with isolated_registry(fake.spec, installed=True):
        assert "large scores bfloat16" in {check.name for check in conformance_checks("candidate")}


def test_explain_and_the_matrix_show_it():
    fake = FakeBackend("candidate", [STAGE], gradient_error=0.012)
    call = dsa.CallSpec("run_fused_absorbed_sparse_attention", needs_grad=frozenset({"query"}))
    with isolated_registry(fake.spec, installed=True):
        decision = dsa.explain(call.operation, {"dsa_kernel_backend": "candidate"}, call=call)
        row = next(row for row in dsa.capability_matrix().rows if row.backend == "candidate")
    text = "candidate: chosen, gradient error up to 0.012 in bf16"
    assert f"  - {text}" in str(decision).splitlines()
    assert "gradient error up to 0.012 in bf16" in decision.to_markdown()
    backward = next(stage for stage in json.loads(decision.to_json())["stages"] if stage["stage"] == STAGE)
    errors = {entry["backend"]: entry["gradient_error"] for entry in backward["candidates"]}
    assert (errors["candidate"], errors["torch_dense"]) == (0.012, 0.0)
    assert row.promises.endswith("gradient error up to 0.012 in bf16")
