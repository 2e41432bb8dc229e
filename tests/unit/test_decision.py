"""What runs when the user named something: strictly that, or the next one with one warning, or an error."""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from unit.calls import CPU, arguments, attention, chosen, indexer, plan_attention, run_attention

import dsa_dispatch
from dsa_dispatch import (
    CallSpec,
    Capability,
    Decline,
    DeclineCode,
    DeviceInfo,
    Heads,
    RowLayout,
    unregister_backend,
    use_backend,
)
from dsa_dispatch._dispatch.decide import decide, plan, replan
from dsa_dispatch._policy.policy import policy_key, resolve_policy
from dsa_dispatch._runtime import current
from dsa_dispatch.errors import NoBackendError
from dsa_dispatch.testing import FakeBackend, assert_backend_ran, isolated_registry

FORWARD = ("attention_forward",)


def test_error_runs_what_is_named():
    named = FakeBackend("named")
    with (
        isolated_registry(named.spec, FakeBackend("better", rank=9).spec),
        use_backend("named", fallback="error"),
        assert_backend_ran("named", "attention_forward"),
    ):
        run_attention()


def test_error_never_runs_another_backend():
    named = FakeBackend("named", heads=Heads(values=frozenset({64})))
    other = FakeBackend("other", rank=9, self_test=True)
    with isolated_registry(named.spec, other.spec):
        with use_backend("named", fallback="error"), pytest.raises(NoBackendError):
            run_attention()
        assert not named.calls
        assert not other.calls


@pytest.mark.parametrize(
    "operation", ["run_fused_absorbed_sparse_attention", "run_fused_gqa_sparse_attention"]
)
def test_error_raises_in_the_forward_when_only_the_backward_is_missing(operation):
    group = "gqa" if "gqa" in operation else "attention"
    named = FakeBackend("named", (f"{group}_forward",))
    with isolated_registry(named.spec, FakeBackend("other").spec):
        positional, _ = arguments(operation)
        with use_backend("named", fallback="error"):
            getattr(dsa_dispatch, operation)(*positional)
            named.calls.clear()
            positional, _ = arguments(operation, grad=True)
            with pytest.raises(NoBackendError, match=f"no backend may serve {group}_backward of this call"):
                getattr(dsa_dispatch, operation)(*positional)
            assert not named.calls
            with torch.no_grad():
                getattr(dsa_dispatch, operation)(*positional)


def test_error_in_the_composed_operation_raises_before_anything_runs():
    named = FakeBackend("named", ("indexer_topk", "indexer_target", "indexer_loss", "attention_forward"))
    with isolated_registry(named.spec, FakeBackend("other").spec):
        with (
            use_backend("named", fallback="error"),
            pytest.raises(NoBackendError, match="attention_backward"),
        ):
            dsa_dispatch.run_fused_dsa_attention(**arguments("run_fused_dsa_attention", grad=True)[1])
        assert not named.calls


def hinted_mapping(text):
    (mapping,) = set(
        re.findall(r"STAGE_NOT_PROVIDED.*? Write dsa_kernel_backend=(\{.*?\}) to leave this stage", text)
    )
    return ast.literal_eval(mapping)


@pytest.mark.parametrize(
    ("backend", "mapping"),
    [
        ("named", {"indexer_topk": "named", "attention_forward": "named"}),
        (
            ["named", "second"],
            {
                "indexer_topk": ["named", "second"],
                "attention_forward": ["named", "second"],
                "gqa_forward": ["named", "second"],
            },
        ),
        ({"attention_forward": "named", "attention_backward": "named"}, {"attention_forward": "named"}),
        (
            {"attention_backward": "named", "gqa_forward": "none", "indexer_topk": "named"},
            {"indexer_topk": "named", "gqa_forward": "none"},
        ),
    ],
    ids=["a name", "a list", "a mapping", "a mapping with none"],
)
def test_the_hint_of_a_missing_stage_is_the_mapping_that_works(backend, mapping):
    named = FakeBackend("named", ("indexer_topk", "attention_forward"))
    second = FakeBackend("second", ("gqa_forward",))
    other = FakeBackend("other", rank=9)
    with isolated_registry(named.spec, second.spec, other.spec):
        config = {"dsa_kernel_backend": backend, "dsa_kernel_fallback": "error"}
        with pytest.raises(NoBackendError) as caught:
            run_attention(config, grad=True)
        assert hinted_mapping(str(caught.value)) == mapping
        repaired = {**config, "dsa_kernel_backend": hinted_mapping(str(caught.value))}
        run_attention(repaired, grad=True).sum().backward()
        forward = "named" if "attention_forward" in mapping else "other"
        assert dsa_dispatch.stats().ran("attention_forward") == {forward: 1}
        assert dsa_dispatch.stats().ran("attention_backward") == {"other": 1}


def test_a_mapping_of_the_missing_stage_alone_is_told_to_drop_it():
    with isolated_registry(FakeBackend("named", FORWARD).spec, FakeBackend("other").spec):
        config = {"dsa_kernel_backend": {"attention_backward": "named"}, "dsa_kernel_fallback": "error"}
        with pytest.raises(NoBackendError, match="Take attention_backward out of dsa_kernel_backend"):
            run_attention(config, grad=True)


def test_a_list_of_which_one_has_the_stage_gets_no_mapping():
    lacking, narrow = FakeBackend("lacking", ("gqa_forward",)), FakeBackend("narrow", heads=Heads(minimum=64))
    with (
        isolated_registry(lacking.spec, narrow.spec, FakeBackend("other").spec),
        use_backend(["lacking", "narrow"], fallback="error"),
        pytest.raises(NoBackendError) as caught,
    ):
        run_attention()
    assert "Write dsa_kernel_backend=" not in str(caught.value)
    assert (
        "other could: name it for this stage (dsa_kernel_backend={'attention_forward': 'other', ...})"
        in str(caught.value)
    )


def test_no_backend_lists_every_backend_with_every_reason():
    narrow = FakeBackend("narrow", heads=Heads(values=frozenset({64})), dtypes=frozenset({"bfloat16"}))
    gpu = FakeBackend("gpu", devices=frozenset({"cuda"}), max_rows=1)
    partial = FakeBackend("partial", ("gqa_forward",))
    with isolated_registry(narrow.spec, gpu.spec, partial.spec), pytest.raises(NoBackendError) as caught:
        run_attention()
    text = str(caught.value)
    for part in (
        "no backend may serve attention_forward of this call.",
        "run_fused_absorbed_sparse_attention: batch 1, rows 3, keys 5, width 2, heads 2, channels 6/4, float32, cpu",
        "attention_forward: NO BACKEND",
        "- gpu: DEVICE device: got cpu, supports cuda. | LIMIT rows: got 3, supports up to 1.",
        "- narrow: DTYPE dtype: got float32, supports bfloat16. Cast the inputs to bfloat16. | HEADS query.heads: got "
        "2, supports 64. Use another backend.",
        "- partial: STAGE_NOT_PROVIDED stage: got attention_forward, supports gqa_forward.",
        "dsa_kernel_fallback = next (from default)",
        "What to do: change the call as a hint above says, allow more backends",
    ):
        assert part in text
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.decision.backends() == {"attention_forward": None}
    assert not caught.value.decision.served


def test_no_backend_at_all_points_to_the_doctor():
    with (
        isolated_registry(),
        pytest.raises(NoBackendError, match="No backend is registered: `dsa-dispatch doctor`"),
    ):
        run_attention()


@pytest.mark.parametrize(
    ("extra", "changes"),
    [
        ("mask", {"attn_mask_type": None}),
        ("mask", {"attn_mask_type": SimpleNamespace(name="arbitrary")}),
        ("key_positions", {"key_positions": torch.arange(5)}),
        ("explicit_values", {"value": torch.zeros(5, 1, 2, 4)}),
        ("explicit_values", {"absorbed_mla": False}),
    ],
)
def test_a_request_that_changes_the_answer_and_that_nobody_serves_is_never_computed_without_it(
    registry, extra, changes
):
    keywords = {**arguments("run_fused_dsa_attention")[1], **changes}
    with pytest.raises(NoBackendError, match=f"LAYOUT inputs: got {extra}, supports causal or ranged rows"):
        dsa_dispatch.run_fused_dsa_attention(**keywords)
    assert not dsa_dispatch.stats().runs


def test_next_warns_once_with_the_codes_when_the_named_one_declined(caplog):
    named = FakeBackend("named", heads=Heads(values=frozenset({64})), max_rows=2)
    with isolated_registry(named.spec, FakeBackend("other").spec), use_backend("named"):
        for rows in (3, 3, 4, 5):
            run_attention(rows=rows)
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("dsa_dispatch", logging.WARNING)
        text = record.getMessage()
        assert text.startswith(
            "run_fused_absorbed_sparse_attention: attention_forward runs on other, not as named by "
            "dsa_kernel_backend=named (dsa_kernel_fallback='error' would raise). named: HEADS query.heads: got 2"
        )
        assert "LIMIT rows: got 3, supports up to 2." in text
        assert text.endswith("(said once)")
        run_attention(rows=2)
        assert len(caplog.records) == 2, "other codes are another warning"
        run_attention(grad=True)
        assert [record.getMessage().split()[1] for record in caplog.records[2:]] == ["attention_backward"]


def test_next_does_not_warn_when_a_named_backend_runs(caplog):
    first = FakeBackend("first", FORWARD, heads=Heads(values=frozenset({64})))
    with isolated_registry(first.spec, FakeBackend("second").spec, FakeBackend("third", rank=9).spec):
        assert chosen({"dsa_kernel_backend": ["first", "second"]}) == "second"
        assert chosen({"dsa_kernel_backend": "auto"}) == "third"
    assert not caplog.records


def on_cuda(call, config=""):
    """A decision for a CUDA call, planned on this machine: the kernels are those of fakes."""
    runtime = current()
    snapshot = runtime.snapshot
    info = DeviceInfo("cuda", "NVIDIA H200", (9, 0), 1 << 37, 232448)
    policy = resolve_policy(policy_key(config, ""))
    decision = decide(runtime, snapshot, call, policy, CPU, info, FORWARD)
    return plan(runtime, snapshot, decision, CPU)


def test_auto_on_cuda_warns_once_when_it_lands_on_the_reference(caplog):
    call = CallSpec("run_fused_absorbed_sparse_attention", device="cuda", heads=3)
    narrow = FakeBackend("narrow", heads=Heads(power_of_two=True))
    with isolated_registry(narrow.spec, FakeBackend("torch_dense", rank=-100).spec):
        for rows in (1, 2):
            assert (
                on_cuda(dataclasses.replace(call, rows=rows)).stages["attention_forward"].backend
                == "torch_dense"
            )
        (record,) = caplog.records
        text = record.getMessage()
        assert "attention_forward runs on torch_dense, the slow reference" in text
        assert "under dsa_kernel_backend=auto no other backend serves it" in text
        assert "narrow: HEADS query.heads: got 3, supports powers of two." in text
        assert "fallback" not in text
        on_cuda(dataclasses.replace(call, heads=4))
        on_cuda(call, "dsa_kernel_backend:none")
        on_cuda(call, "dsa_kernel_backend:torch_dense")
        assert len(caplog.records) == 1


def test_auto_on_cuda_with_nothing_but_the_reference_says_so(caplog):
    with isolated_registry(FakeBackend("torch_dense").spec):
        on_cuda(CallSpec("run_fused_absorbed_sparse_attention", device="cuda"))
    assert "no other backend is registered" in caplog.text


def test_auto_on_a_cpu_lands_on_the_reference_in_silence(registry, caplog):
    run_attention()
    assert not caplog.records


def test_the_forward_is_resolved_without_looking_at_gradients():
    forward = FakeBackend("forward", FORWARD, rank=9)
    with isolated_registry(forward.spec, FakeBackend("whole").spec):
        assert chosen(grad=False) == chosen(grad=True) == "forward"
        assert chosen(grad=True, stage="attention_backward") == "whole"


def test_a_plan_without_gradients_has_no_backward():
    with (
        isolated_registry(FakeBackend("fake").spec),
        pytest.raises(RuntimeError, match="planned no attention_backward"),
    ):
        plan_attention().stage("attention_backward")


RUNTIME = Decline(DeclineCode.RUNTIME, "workspace", "busy", "idle")


def test_a_decline_at_run_time_moves_on_and_is_said_once(caplog):
    shy = FakeBackend("shy", rank=9, declines=RUNTIME)
    with isolated_registry(shy.spec, FakeBackend("other").spec), use_backend("shy"):
        for _ in range(3):
            run_attention()
        assert dsa_dispatch.stats().ran("attention_forward") == {"other": 3}
        assert dsa_dispatch.stats().declines["attention_forward", "shy", "RUNTIME"] == 3
    (record,) = caplog.records
    assert "shy: RUNTIME workspace: got busy, supports idle." in record.getMessage()


def test_a_decline_at_run_time_under_error_is_no_backend():
    shy = FakeBackend("shy", declines=RUNTIME)
    with (
        isolated_registry(shy.spec, FakeBackend("other").spec),
        use_backend("shy", fallback="error"),
        pytest.raises(NoBackendError, match="RUNTIME workspace"),
    ):
        run_attention()


def test_moving_on_asks_for_the_limits_of_the_call_and_interns_no_plan():
    small = FakeBackend("small", rank=5, max_keys=4)
    with isolated_registry(FakeBackend("shy", rank=9).spec, small.spec, FakeBackend("other").spec):
        first = plan_attention()
        stage = first.stages["attention_forward"]
        layout = RowLayout(batch=1, rows=3, keys=5)
        moved = replan(first, stage, RUNTIME, layout)
        assert moved.stages["attention_forward"].backend == "other"
        assert moved.id == first.id
        assert (
            replan(first, stage, RUNTIME, RowLayout(batch=1, rows=3, keys=4))
            .stages["attention_forward"]
            .backend
            == "small"
        )


def test_a_decline_in_the_backward_leaves_the_forward_that_ran_alone():
    forward = FakeBackend("forward", FORWARD, rank=9)
    shy = FakeBackend("shy", ("attention_backward",), rank=9, declines=RUNTIME)
    named = {"attention_forward": "forward", "attention_backward": ["shy", "other"]}
    with isolated_registry(forward.spec, shy.spec, FakeBackend("other").spec):
        with use_backend(named, fallback="error"):
            result = run_attention(grad=True)
        unregister_backend("forward")
        result.sum().backward()
        assert dsa_dispatch.stats().ran("attention_forward") == {"forward": 1}
        assert dsa_dispatch.stats().ran("attention_backward") == {"other": 1}


def test_a_replan_resolves_only_the_stage_that_declined():
    with isolated_registry(FakeBackend("shy", rank=9).spec, FakeBackend("other").spec):
        first = plan_attention(grad=True)
        moved = replan(first, first.stages["attention_backward"], RUNTIME)
        assert list(moved.stages) == list(first.stages)
        assert moved.stages["attention_forward"] is first.stages["attention_forward"]
        assert moved.stages["attention_backward"].backend == "other"


def test_any_other_exception_of_a_kernel_is_the_callers(caplog):
    broken = FakeBackend("broken", rank=9, raises=ValueError("illegal memory access"))
    with isolated_registry(broken.spec, FakeBackend("other").spec):
        with pytest.raises(ValueError, match="illegal memory access") as caught:
            run_attention()
        assert any("backend broken" in note for note in caught.value.__notes__)
        assert not dsa_dispatch.stats().runs


def test_declines_are_counted_by_stage_backend_and_code():
    narrow = FakeBackend("narrow", rank=9, heads=Heads(minimum=64), dtypes=frozenset({"float16"}))
    with isolated_registry(narrow.spec, FakeBackend("other").spec):
        run_attention()
        run_attention()
        assert dict(dsa_dispatch.stats().declines) == {
            ("attention_forward", "narrow", "DTYPE"): 1,
            ("attention_forward", "narrow", "HEADS"): 1,
        }


def test_settings_reach_the_stage():
    seen = []

    def spy(q, kv, indices, length, *, options, **kwargs):
        seen.append(options)
        return q[..., :4].clone(), q.new_zeros(q.shape[:2])

    fake = FakeBackend("fake", FORWARD, replace={"attention_forward": spy}, deterministic=True)
    with isolated_registry(fake.spec):
        run_attention({"deterministic": True, "memory_budget": "3MiB"})
        run_attention()
    assert (seen[0].deterministic, seen[0].memory_budget) == (True, 3 << 20)
    assert not seen[1].deterministic
    assert 0 < seen[1].memory_budget <= 1 << 30


def test_a_backend_without_the_promise_is_not_eligible_under_deterministic():
    with isolated_registry(FakeBackend("loose", rank=9, deterministic=False).spec, FakeBackend("firm").spec):
        assert chosen() == "loose"
        assert chosen({"deterministic": True}) == "firm"


def test_an_arbitrary_tie_rule_is_not_eligible_under_deterministic():
    loose = FakeBackend("loose", rank=9, tie_rule="arbitrary")
    with isolated_registry(loose.spec, FakeBackend("firm").spec):
        dsa_dispatch.run_fused_qk_topk(None, *indexer(), 2)
        dsa_dispatch.run_fused_qk_topk({"deterministic": True}, *indexer(), 2)
        assert dsa_dispatch.stats().ran("indexer_topk") == {"loose": 1, "firm": 1}


def test_a_capability_with_open_fields_serves_attention():
    with isolated_registry(FakeBackend("fake", {"attention_forward": Capability()}).spec):
        out = run_attention()
        assert out.shape == (*attention()[0].shape[:3], 4)
