"""What rounding explains is allowed, and no more: right kernels of every type pass, and infinities have a sign."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from conformance import faults

from dsa_backends.torch_dense.spec import SPEC
from dsa_dispatch import Capability, Channels, Decline, DeclineCode, Heads, IndexWidth
from dsa_dispatch._registry import selftest
from dsa_dispatch._registry.availability import resolve_reference
from dsa_dispatch._registry.selfcase import SelfTestError
from dsa_dispatch.testing import (
    ConformanceError,
    FakeBackend,
    accuracy,
    conformance_checks,
    isolated_registry,
)
from dsa_dispatch.testing.judge import error_of
from dsa_dispatch.testing.operands import Subject, make
from dsa_dispatch.testing.stage_run import allowances, run_stage

CPU = torch.device("cpu")
TYPES = ("bfloat16", "float16", "float32")


def backward(grouped, fault=""):
    """Gradients as published kernels compute them: delta from the ``out`` they are given, which is rounded, and
    probabilities and score gradients rounded to the inputs' type before they are multiplied with tensors of it."""

    def run(q, k, v, indices, length, out, lse, dout, scale, need_dq, dk, dv):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        ids = indices.long()
        valid = (ids >= 0) & (ids < len(k)) & (torch.arange(ids.shape[1]) < length[:, None])
        ids = torch.where(valid, ids, 0)
        group = q.shape[1] // k.shape[1]
        keys, values = (torch.where(valid[..., None, None], held[ids], 0.0).to(wide) for held in (k, v))
        keys, values = (held.repeat_interleave(group, 2) for held in (keys, values))
        score = torch.einsum("thd,twhd->thw", q.to(wide), keys) * scale
        probability = torch.where(valid[:, None], (score - lse[..., None]).exp(), 0.0)
        delta = (dout.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        if fault == "delta left out":
            delta = torch.zeros_like(delta)
        if fault == "delta of the row before":
            delta = delta.roll(1, 0)
        dscore = torch.einsum("thv,twhv->thw", dout.to(wide), values) - delta
        dscore = (probability * dscore * scale).to(q.dtype).to(wide)
        probability = probability.to(q.dtype).to(wide)
        for total, left, right in ((dk, dscore, q), (dv, probability, dout)):
            if total is not None:
                part = torch.einsum("thw,thd->twhd", left, right.to(wide))
                part = part.unflatten(2, (-1, group)).sum(3)
                total.index_add_(0, ids.flatten(), part.flatten(0, 1))
        return torch.einsum("thw,twhd->thd", dscore, keys).to(q.dtype) if need_dq else None

    def attention_backward(
        q, kv, indices, length, out, lse, dout, *, scale, v_channels, need_dq, dkv, rows, options
    ):
        key = kv[:, None]
        dk = dv = None
        if dkv is not None:
            dk, dv = dkv[:, None], dkv[:, None, :v_channels]
        return run(q, key, key[..., :v_channels], indices, length, out, lse, dout, scale, need_dq, dk, dv)

    def gqa_backward(q, k, v, indices, length, out, lse, dout, *, scale, need_dq, dk, dv, rows, options):
        return run(q, k, v, indices, length, out, lse, dout, scale, need_dq, dk, dv)

    return gqa_backward if grouped else attention_backward


def failures(stage, function, only=None, **declared):
    """Name of every failing check, of those that ``only`` picks, to its message."""
    fake = FakeBackend("candidate", [stage], replace={stage: function}, deterministic=False, **declared)
    found = {}
    with isolated_registry(fake.spec, installed=True):
        for check in conformance_checks("candidate"):
            if only is None or only(check.name):
                try:
                    check.run()
                except ConformanceError as error:
                    found[check.name] = str(error)
    return found


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("stage", ["attention_backward", "gqa_backward"])
def test_delta_from_a_rounded_out_passes(stage, dtype):
    right = backward(stage == "gqa_backward")
    assert failures(stage, right, dtypes=frozenset({dtype})) == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fault", ["delta left out", "delta of the row before"])
@pytest.mark.parametrize("stage", ["attention_backward", "gqa_backward"])
def test_a_wrong_delta_is_found_and_named(stage, fault, dtype):
    checks = (f"values {dtype}", "large scores")
    wrong = backward(stage == "gqa_backward", fault)
    found = failures(stage, wrong, checks.__contains__, dtypes=frozenset({dtype}))
    assert set(found) == set(checks)
    words = "delta (the sum of dout * out) " + fault.removeprefix("delta ")
    assert f"This is the answer with {words}" in found[f"values {dtype}"]


def plus_infinity(*args, **rest):
    out, lse = faults.forward()(*args, **rest)
    return out, lse.masked_fill(lse.isinf(), torch.inf)


def test_an_empty_row_whose_lse_is_plus_infinity_fails():
    found = failures(
        "attention_forward", plus_infinity, lambda name: name in ("lse", "empty rows", "self-test")
    )
    assert set(found) == {"lse", "empty rows", "self-test"}
    assert all("inf at [" in text and "-inf" in text for text in found.values())
    wanted = torch.tensor([[-torch.inf, 1.0]])
    assert error_of("lse", wanted, wanted, "float32") == ""
    assert error_of("out", -wanted, wanted, "float32") == "out: inf at [0, 0], exact -inf"


def test_an_allowance_is_added_to_the_limit_and_excuses_nothing_beyond_it():
    wanted, allowance = torch.ones(2, 4), torch.full((2, 4), 0.01)
    assert error_of("dq", wanted + 0.015, wanted, "bfloat16", allowance=allowance) == ""
    assert "limit 0.006 for bfloat16 and 0.01 for the rounding" in error_of(
        "dq", wanted + 0.017, wanted, "bfloat16", allowance=allowance
    )


CANCELLING = {
    "one slot": {"width": IndexWidth(maximum=1)},
    "two slots": {"width": IndexWidth(maximum=2)},
    "two keys": {"max_keys": 2},
}


@pytest.mark.parametrize("narrow", CANCELLING)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stage", ["attention_backward", "gqa_backward", "indexer_loss"])
def test_noise_beside_a_gradient_that_cancels_passes(stage, dtype, narrow):
    """Over one key, or two alike, gradients are differences of equal terms: what is left has their rounding."""
    right = resolve_reference(SPEC.stages[stage].function)
    if stage != "indexer_loss":
        right = backward(stage == "gqa_backward")
    checks = ("many rows on one key", "large scores", f"values {dtype}", "duplicates", "length")
    declared = {"dtypes": frozenset({dtype}), **CANCELLING[narrow]}
    assert failures(stage, right, checks.__contains__, **declared) == {}


def test_a_bf16_sum_over_many_rows_fails_where_the_key_gradient_cancels():
    def wrong(*args, dkv, **rest):
        fresh = torch.zeros_like(dkv)
        dq = faults.backward("sums dkv in bf16")(*args, dkv=fresh, **rest)
        dkv += fresh
        return dq

    found = failures("attention_backward", wrong, "many rows on one key".__eq__, width=IndexWidth(maximum=1))
    assert "is summed in fp32" in found["many rows on one key"]


PUBLISHED = {
    "attention_backward": (Heads(values=frozenset({64})), Channels(pairs=((576, 512),))),
    "gqa_backward": (Heads(values=frozenset({16})), Channels(pairs=((128, 128),))),
}
"""Shapes of published kernels: over so many channels the rounding of ``out`` exceeds a gradient that almost cancels."""


@pytest.mark.parametrize("large", [False, True], ids=["first use", "check"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("stage", PUBLISHED)
def test_the_self_test_tells_a_rounded_delta_from_a_wrong_one(stage, dtype, large):
    capability = Capability(dtypes=frozenset({dtype}))
    if not large:
        heads, channels = PUBLISHED[stage]
        capability = dataclasses.replace(capability, heads=heads, channels=channels)

    def worst(fault):
        kernel = backward(stage == "gqa_backward", fault)
        return max(selftest.measure(kernel, capability, stage, CPU, dtype, large).values())

    assert worst("") < selftest.TOLERANCE[dtype]
    assert worst("delta left out") > selftest.TOLERANCE[dtype]
    assert worst("delta of the row before") > selftest.TOLERANCE[dtype]


def test_the_allowance_is_the_error_of_a_rounded_output_and_hardly_more():
    """Even at large scores over many channels, where a bound by absolute terms alone would excuse half a gradient."""
    heads, channels = PUBLISHED["attention_backward"]
    capability = Capability(dtypes=frozenset({"bfloat16"}), heads=heads, channels=channels)
    subject = Subject("candidate", "attention_backward", capability, backward(False), CPU)
    sizes = dataclasses.replace(subject.sizes, rows=2, keys=8)
    operands = make(subject, sizes=sizes, amplify=accuracy.AMPLIFIED, adjust=accuracy._tie_in_pairs)
    granted = allowances(operands.stage, operands.plain, operands.ids, operands.host, operands.dtype)
    got, exact = run_stage(subject, operands), operands.exact()
    for name in ("dq", "dkv"):
        # Beside it the kernel rounds probabilities and score gradients, within the limit of the type.
        error = float((got[name] - exact[name]).norm() / exact[name].norm())
        assert 0.5 * error < float(granted[name].norm() / exact[name].norm()) < 1.5 * error


def only_where(field, accepted):
    """A capability whose ``extra_check`` declines calls of other sizes."""

    def rule(call):
        value = getattr(call, field)
        return None if accepted(value) else Decline(DeclineCode.EXTRA_CHECK, field, str(value), "others")

    return Capability(extra_check=rule)


ODD = {
    "rows by 64": only_where("rows", lambda count: count % 64 == 0),
    "a key for every slot": Capability(
        extra_check=lambda call: (
            None
            if call.keys >= call.width
            else Decline(DeclineCode.EXTRA_CHECK, "keys", str(call.keys), "a key for every slot")
        ),
        width=IndexWidth(multiple_of=64),
    ),
    "wide selections": only_where("width", lambda count: count >= 512),
    "many heads": only_where("heads", lambda count: count >= 16),
    "one row": only_where("rows", lambda count: count == 1),
    "few elements": Capability(max_elements=40),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("stage", ["indexer_topk", "indexer_loss", "attention_forward", "gqa_backward"])
def test_the_self_test_makes_a_call_that_the_declaration_accepts(stage, odd):
    seen = []

    def recorded(q, *args, rows, **rest):
        key = args[0]
        seen.append((q.shape, key.shape))
        assert ODD[odd].max_elements is None or max(q.numel(), key.numel()) <= ODD[odd].max_elements
        assert odd != "rows by 64" or rows.rows % 64 == 0
        assert odd != "one row" or rows.rows == 1
        assert odd != "many heads" or q.shape[1] >= 16
        return resolve_reference(SPEC.stages[stage].function)(q, *args, rows=rows, **rest)

    selftest.reason_left_out(recorded, ODD[odd], stage, CPU)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "capability",
    [only_where("rows", lambda count: False), Capability(dtypes=frozenset()), Capability(max_elements=1)],
    ids=["extra_check", "no dtype", "one element"],
)
def test_a_stage_that_accepts_no_small_call_is_used_without_a_self_test_and_the_log_says_why(
    capability, caplog
):
    def never(*args, **rest):
        raise AssertionError("called outside the declaration")

    narrow = dataclasses.replace(capability, channels=dataclasses.replace(capability.channels, multiple_of=2))
    with caplog.at_level(logging.WARNING, logger="dsa_dispatch"):
        selftest.reason_left_out(never, narrow, "attention_forward", CPU)
    assert "The self-test of attention_forward on cpu is left out: " in caplog.text


def test_the_self_test_names_the_sign_of_an_infinite_lse():
    with pytest.raises(SelfTestError, match=r"lse .*: inf at \[3, 0\], expected -inf"):
        selftest.reason_left_out(plus_infinity, Capability(), "attention_forward", CPU)
