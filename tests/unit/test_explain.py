"""``explain`` says what runs, for generated registries, policies and calls, and leaves no trace."""

from __future__ import annotations

import dataclasses
import json
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.calls import arguments, attention, run_attention

import dsa_dispatch
from dsa_dispatch import (
    CallSpec,
    Channels,
    Decline,
    DeclineCode,
    DeviceInfo,
    Heads,
    IndexWidth,
    Requirement,
    StageSpec,
    explain,
    use_backend,
)
from dsa_dispatch._dispatch.decision import describe_call
from dsa_dispatch._operations.public import OPERATIONS
from dsa_dispatch._stages import GROUP_STAGES, OPERATION_GROUPS, STAGES
from dsa_dispatch.errors import InvalidInputError, NoBackendError
from dsa_dispatch.testing import FakeBackend, isolated_registry

HOPPER = DeviceInfo("cuda", "NVIDIA H200", (9, 0), 1 << 37, 232448)


def odd_rows_only(call):
    return None if call.rows % 2 else Decline(DeclineCode.EXTRA_CHECK, "rows", str(call.rows), "odd numbers")


narrowings = st.fixed_dictionaries(
    {},
    optional={
        "heads": st.sampled_from(
            [Heads(values=frozenset({2})), Heads(minimum=4, pad=True), Heads(maximum=1)]
        ),
        "channels": st.sampled_from([Channels(multiple_of=8, pad=True), Channels(maximum=4)]),
        "width": st.sampled_from([IndexWidth(multiple_of=4, pad=True), IndexWidth(multiple_of=3)]),
        "index_form": st.sampled_from(["any", "prefix"]),
        "dtypes": st.just(frozenset({"bfloat16"})),
        "deterministic": st.booleans(),
        "partial_gradients": st.booleans(),
        "bounds": st.just(frozenset({"causal"})),
        "max_rows": st.sampled_from([2, 3, 4]),
        "max_elements": st.sampled_from([20, 40, 60]),
        "extra_check": st.just(odd_rows_only),
    },
)
FAULTS = st.sampled_from([None] * 6 + ["missing", "api", "import", "self-test"])


@st.composite
def fakes(draw, name):
    stages = draw(st.lists(st.sampled_from(STAGES), min_size=1, unique=True) | st.just(list(STAGES)))
    fault = draw(FAULTS)
    fake = FakeBackend(
        name,
        stages,
        rank=draw(st.integers(0, 2)),
        packages=(Requirement("no-such-dist", "no_such_module"),) if fault == "missing" else (),
        families=draw(st.sampled_from([(), ("family",)])),
        self_test=fault == "self-test",
        raises=RuntimeError("wrong") if fault == "self-test" else None,
        **draw(narrowings),
    )
    if fault == "api":
        fake.spec = dataclasses.replace(fake.spec, api_version=2)
    if fault == "import":
        broken = {
            stage: StageSpec(spec.capability, "math:nothing") for stage, spec in fake.spec.stages.items()
        }
        fake.spec = dataclasses.replace(fake.spec, stages=broken)
    return fake


registries = st.tuples(fakes("a"), fakes("b"), fakes("c"), fakes("torch_dense"))
known = st.lists(st.sampled_from(["a", "b", "c", "torch_dense"]), min_size=1, max_size=3, unique=True)
choices = known | st.sampled_from(["auto", "none"])
policies = st.fixed_dictionaries(
    {},
    optional={
        "dsa_kernel_backend": choices | st.dictionaries(st.sampled_from(STAGES), choices, min_size=1),
        "dsa_kernel_fallback": st.sampled_from(["next", "error"]),
        "deterministic": st.booleans(),
    },
)


def call_of(operation, grads, config):
    """Arguments with gradients wanted of the inputs whose place is in ``grads``, and ``config`` in its place."""
    positional, keywords = arguments(operation)
    tensors = [value for value in (*positional, *keywords.values()) if torch.is_tensor(value)]
    for place, tensor in enumerate(tensors):
        if tensor.is_floating_point() and place in grads:
            tensor.requires_grad_()
    if keywords:
        return (), {**keywords, "config": config}
    return (config, *positional[1:]), keywords


def run(operation, positional, keywords):
    """Forward and, where something needs it, backward."""
    result = OPERATIONS[operation](*positional, **keywords)
    results = result if isinstance(result, tuple) else (result,)
    total = sum(part.sum() for part in results if part.requires_grad)
    if torch.is_tensor(total):
        total.backward()


@settings(max_examples=250)
@given(
    registries,
    policies,
    policies,
    st.sampled_from(list(OPERATIONS)),
    st.frozensets(st.integers(0, 6), max_size=7),
)
def test_explain_and_what_ran_agree_always(backends, outer, config, operation, grads):
    with isolated_registry(*(fake.spec for fake in backends)) as runtime:
        names = {
            "dsa_kernel_backend": "backend",
            "dsa_kernel_fallback": "fallback",
            "deterministic": "deterministic",
        }
        with use_backend(**{names[name]: value for name, value in outer.items()}):
            positional, keywords = call_of(operation, grads, config)
            said = explain(operation, *positional, **keywords)
            assert not runtime.plans
            assert not runtime.counters
            assert not runtime.warned
            assert not any(fake.calls for fake in backends if not fake.spec.self_test)
            try:
                run(operation, positional, keywords)
            except NoBackendError as error:
                assert not said.served
                missing = [stage for stage, backend in error.decision.backends().items() if backend is None]
                assert missing
                for stage in error.decision.stages:
                    (same,) = [entry for entry in said.stages if entry.stage == stage.stage]
                    assert same == stage
                assert not dsa_dispatch.stats().runs
                return
            ran = {stage: list(dsa_dispatch.stats().ran(stage)) for stage in STAGES}
            assert said.served
            assert ran == {
                stage: [said.backends()[stage]] if said.backends().get(stage) else [] for stage in STAGES
            }
            assert explain(operation, *positional, **keywords) == said
            by_data = explain(operation, call=said.call, config=config)
            for stage, backend in said.backends().items():
                assert by_data.backends()[stage] == backend


@settings(max_examples=100)
@given(registries, policies, st.sampled_from(list(OPERATIONS)))
def test_who_serves_has_no_reason_not_to_and_who_does_not_has_one(backends, config, operation):
    with isolated_registry(*(fake.spec for fake in backends)):
        positional, keywords = call_of(operation, {0, 1}, config)
        for stage in explain(operation, *positional, **keywords).stages:
            assert len(stage.candidates) == len(backends)
            for candidate in stage.candidates:
                assert bool(candidate.declines) is (candidate.status == "declined")
                assert bool(candidate.legalization) is (candidate.status != "declined")
            asked = [candidate.status for candidate in stage.candidates if candidate.status != "declined"]
            assert asked == ["chosen"] * bool(asked) + ["not needed"] * (len(asked) - 1)


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_every_operation_is_explained_by_its_arguments_and_by_data(registry, operation):
    positional, keywords = arguments(operation, grad=True)
    said = explain(operation, *positional, **keywords)
    assert said.served
    expected = {
        stage: "torch_dense" for group in OPERATION_GROUPS[operation] for stage in GROUP_STAGES[group]
    }
    assert said.backends() == expected
    assert said.call.operation == operation
    by_data = explain(operation, call=said.call)
    assert by_data.backends() == expected


def test_explain_warns_of_nothing_and_raises_no_missing_backend(registry, caplog):
    with isolated_registry(FakeBackend("narrow", heads=Heads(minimum=64)).spec, FakeBackend("other").spec):
        with use_backend("narrow"):
            said = explain("run_fused_absorbed_sparse_attention", None, *attention())
            assert said.backends() == {"attention_forward": "other"}
        with use_backend("narrow", fallback="error"):
            said = explain("run_fused_absorbed_sparse_attention", None, *attention())
            assert said.backends() == {"attention_forward": None}
    assert not caplog.records


def test_explain_raises_what_the_operation_raises_on_bad_input(registry):
    query, key, indices, *_ = attention()
    with pytest.raises(InvalidInputError) as explained:
        explain("run_fused_absorbed_sparse_attention", None, query, key, indices, None, 4)
    with pytest.raises(InvalidInputError) as ran:
        dsa_dispatch.run_fused_absorbed_sparse_attention(None, query, key, indices, None, 4)
    assert str(explained.value) == str(ran.value)


@pytest.mark.parametrize("keywords", [{}, {"call": CallSpec("")}])
def test_an_unknown_operation_is_named_with_the_known(registry, keywords):
    with pytest.raises(InvalidInputError) as caught:
        explain("run_fused_attention", **keywords)
    assert "explain: unknown operation 'run_fused_attention'; known: run_fused_qk_topk, " in str(caught.value)


MIXED = {
    "device= is for a call as data": {"tensors": True, "device": HOPPER},
    "got Tensor, Tensor, Tensor, float, int beside call=": {"tensors": True, "call": CallSpec("")},
    "got indexer_topk beside call=": {"call": CallSpec(""), "indexer_topk": 3},
    "call: got dict, expected a CallSpec": {"call": {"rows": 3}},
    "device: got 'cuda', expected a DeviceInfo": {"call": CallSpec(""), "device": "cuda"},
    "call, field heads: got '8', expected int": {"call": CallSpec("", heads="8")},
    "call, field dtype: got torch.bfloat16, expected str": {"call": CallSpec("", dtype=torch.bfloat16)},
    "call, field needs_grad: got 'querry', expected names of inputs: q, k, weights, query, key, value, up_v_weight. "
    "Did you mean 'query'?": {"call": CallSpec("", needs_grad=frozenset({"querry", "key"}))},
    "call, field dtype: got 'bf16', expected a floating-point type by its name in torch: bfloat16, float16, float32, "
    "float64. Did you mean 'bfloat16'?": {"call": CallSpec("", dtype="bf16")},
    "call, field dtype: got 'int32'": {"call": CallSpec("", dtype="int32")},
    "call, field dtype: got 'half'": {"call": CallSpec("", dtype="half")},
    "call, field weights_dtype: got ''": {"call": CallSpec("", weights_dtype="")},
    "call, field teacher_dtype: got 'float'": {"call": CallSpec("", teacher_dtype="float")},
    "call, field index_dtype: got 'int16', expected int32 or int64.": {
        "call": CallSpec("", index_dtype="int16")
    },
    "call, field device: got 'cudaa', expected a type of device without an index, such as cpu or cuda. Did you mean "
    "'cuda'?": {"call": CallSpec("", device="cudaa")},
    "call, field device: got 'cuda:0'": {"call": CallSpec("", device="cuda:0")},
    "device, field type: got 'gpu'": {"call": CallSpec(""), "device": DeviceInfo("gpu", "x")},
    "device, field compute_capability: got 9.0": {
        "call": CallSpec(""),
        "device": DeviceInfo("cuda", "x", 9.0),
    },
}


@pytest.mark.parametrize("text", MIXED)
def test_what_explain_would_have_to_ignore_is_an_error(registry, text):
    keywords = dict(MIXED[text])
    positional = (None, *attention()) if keywords.pop("tensors", False) else ()
    with pytest.raises(InvalidInputError) as caught:
        explain("run_fused_absorbed_sparse_attention", *positional, **keywords)
    assert text in str(caught.value)


@pytest.mark.parametrize("operation", [[1], None, {}])
def test_an_operation_that_is_no_name_is_told_the_names(registry, operation):
    for keywords in ({}, {"call": CallSpec("")}):
        with pytest.raises(InvalidInputError, match="known: run_fused_qk_topk, "):
            explain(operation, **keywords)


def asked(operation, error=False, **keywords):
    """The first line of what an explanation or the error of a call says."""
    positional, named = arguments(operation, grad=True)
    named |= keywords
    if not error:
        return str(explain(operation, *positional, **named)).splitlines()[0].partition(": ")[2]
    with isolated_registry(), pytest.raises(NoBackendError) as caught:
        OPERATIONS[operation](*positional, **named)
    return str(caught.value).splitlines()[1].partition(": ")[2]


def test_only_sizes_that_the_call_has_are_told(registry):
    lengths, indexed = "batch 1, rows 3, keys 5, width 2, ", "index heads 2 × 4, float32, cpu"
    heads = "heads 2, channels 6/4, "
    assert asked("run_fused_qk_topk") == lengths + indexed
    with_loss = "run_fused_qk_topk_with_loss"
    assert asked(with_loss).startswith(lengths + "heads 2, channels 6, " + indexed)
    assert asked("run_fused_absorbed_sparse_attention").startswith(lengths + heads + "float32")
    grouped = "heads 2, key heads 1, channels 6/4, float32"
    assert asked("run_fused_gqa_sparse_attention").startswith(lengths + grouped)
    assert asked("run_fused_dsa_attention").startswith(lengths + heads + indexed)
    assert asked(with_loss, error=True) == lengths + indexed


def test_a_dense_loss_has_no_width():
    call = CallSpec("run_fused_qk_topk_with_loss", sparse_loss=False, width=7)
    assert "width" not in describe_call(call, DeviceInfo(), ["indexer_target", "indexer_loss"])
    assert "width 7" in describe_call(call, DeviceInfo(), ["indexer_topk"])


def test_hypothetical_hardware_is_judged_by_data_alone():
    gpu = FakeBackend(
        "gpu", devices=frozenset({"cuda"}), compute_capabilities=(((9, 0), (10, 0)),), self_test=True
    )
    call = CallSpec("run_fused_dsa_attention", needs_grad=frozenset({"query"}))
    with isolated_registry(gpu.spec) as runtime:
        assert set(explain(call.operation, call=call, device=HOPPER).backends().values()) == {"gpu"}
        newer = dataclasses.replace(HOPPER, compute_capability=(10, 0))
        assert set(explain(call.operation, call=call, device=newer).backends().values()) == {None}
        assert set(explain(call.operation, call=call).backends().values()) == {None}
        assert not runtime.availability
    assert not gpu.calls


def test_a_device_that_is_not_here_is_unknown_and_not_touched():
    gpu = FakeBackend("gpu", devices=frozenset({"cuda"}), compute_capabilities=(((9, 0), (10, 0)),))
    with isolated_registry(gpu.spec):
        call = CallSpec("run_fused_qk_topk", device="cuda" if not torch.cuda.is_available() else "xpu")
        text = explain(call.operation, call=call).to_text()
    assert "COMPUTE_CAPABILITY device: got unknown" in text or "DEVICE device: got xpu" in text


@pytest.mark.parametrize(
    ("needs_grad", "backward"),
    [({"query"}, True), ({"key"}, True), ({"weights"}, False), ({"up_v_weight"}, False), (set(), False)],
)
def test_only_the_gradients_of_its_own_inputs_ask_for_a_backward(registry, needs_grad, backward):
    call = CallSpec("run_fused_dsa_attention", needs_grad=frozenset(needs_grad))
    assert ("attention_backward" in explain(call.operation, call=call).backends()) is backward


def test_deterministic_of_the_policy_enters_the_call():
    with isolated_registry(FakeBackend("loose", deterministic=False).spec):
        call = CallSpec("run_fused_qk_topk")
        assert explain(call.operation, call=call).served
        assert not explain(call.operation, {"deterministic": True}, call=call).served
        assert not explain(call.operation, call=dataclasses.replace(call, deterministic=True)).served


def shown():
    """A backend that names what really runs."""
    fake = FakeBackend("fake", heads=Heads(values=frozenset({4}), pad=True), rank=1)
    named = {
        stage: dataclasses.replace(spec, provider="named_provider:what_runs")
        for stage, spec in fake.spec.stages.items()
    }
    return dataclasses.replace(fake.spec, stages=named)


@pytest.fixture
def decision(monkeypatch):
    module = ModuleType("named_provider")
    module.what_runs = lambda: "kernels 1.2.3 | base 2"
    monkeypatch.setitem(sys.modules, "named_provider", module)
    narrow = FakeBackend("narrow", heads=Heads(maximum=1), rank=9)
    with isolated_registry(shown(), narrow.spec, FakeBackend("third").spec):
        with use_backend("third"):
            run_attention()
        yield explain("run_fused_absorbed_sparse_attention", {"dsa_kernel_fallback": "next"}, *attention())


def test_the_text_names_everyone_with_steps_reasons_and_sources(decision):
    assert str(decision).splitlines()[:5] == [
        "run_fused_absorbed_sparse_attention: batch 1, rows 3, keys 5, width 2, heads 2, channels 6/4, float32, cpu",
        "attention_forward: fake",
        "  - narrow: HEADS query.heads: got 2, supports any count up to 1. Use tensor parallel 2 (1 heads a rank) or "
        "another backend.",
        "  - fake (kernels 1.2.3 | base 2): chosen, after heads 2→4 (2.00× work)",
        "  - third: not needed",
    ]
    assert "  dsa_kernel_fallback = next (from config)" in str(decision).splitlines()


def test_a_command_to_install_is_given_once_for_all_stages():
    packages = (Requirement("first-dist", "no_first", ">=2"), Requirement("second-dist", "no_second"))
    call = CallSpec("run_fused_absorbed_sparse_attention", needs_grad=frozenset({"query"}))
    with isolated_registry(FakeBackend("bare", packages=packages).spec):
        decision = dsa_dispatch.explain(call.operation, call=call)
    for text in (decision.to_text(), decision.to_markdown()):
        assert text.count("NOT_INSTALLED packages first-dist, second-dist: got not installed") == 2
        assert text.count("pip install") == 1
        assert "To install bare: pip install 'first-dist>=2' 'second-dist'" in text.splitlines()


@pytest.mark.parametrize(("memory", "budget"), [(0, 1 << 30), (80 << 30, 1 << 30), (8 << 30, 1 << 29)])
def test_the_policy_shows_what_the_default_budget_comes_to_on_the_device(registry, memory, budget):
    call = CallSpec("run_fused_qk_topk", device="cuda")
    device = DeviceInfo("cuda", "a GPU", (9, 0), memory, 1 << 17)
    text = dsa_dispatch.explain(call.operation, call=call, device=device).to_text()
    assert f"memory_budget = {budget} (from min(1 GiB, device memory / 16))" in text
    mine = dsa_dispatch.explain(call.operation, {"memory_budget": 77}, call=call, device=device)
    assert "memory_budget = 77 (from config)" in mine.to_text()


def test_the_markdown_is_a_table_with_its_bars_escaped(decision):
    lines = decision.to_markdown().splitlines()
    assert "| stage | backend | outcome |" in lines
    rows = [line for line in lines if line.startswith("| attention_forward |")]
    assert [row.split(" | ")[1] for row in rows] == ["narrow", "fake", "third"]
    assert "| dsa_kernel_fallback | next | config |" in lines
    for line in lines:
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 4


def test_the_json_reads_back_with_the_same_content(decision):
    data = json.loads(decision.to_json())
    (stage,) = data["stages"]
    assert (stage["stage"], stage["backend"], stage["provider"]) == (
        "attention_forward",
        "fake",
        "kernels 1.2.3 | base 2",
    )
    assert [entry["status"] for entry in stage["candidates"]] == ["declined", "chosen", "not needed"]
    assert stage["candidates"][0]["declines"][0]["code"] == "HEADS"
    assert stage["candidates"][1]["legalization"] == ["heads 2→4 (2.00× work)"]
    assert data["call"]["heads"] == 2
    assert data["device"]["type"] == "cpu"
    assert {"name": "dsa_kernel_fallback", "value": "next", "source": "config"} in data["policy"]


def test_who_auto_would_ask_first_is_said_when_it_is_another():
    with isolated_registry(FakeBackend("a").spec, FakeBackend("b").spec):
        said = explain("run_fused_absorbed_sparse_attention", {"dsa_kernel_backend": "b"}, *attention())
    assert said.stages[0].auto_choice == "a"
    assert "(auto would ask a first)" in said.to_text()
