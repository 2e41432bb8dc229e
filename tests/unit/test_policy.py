"""Who may serve: backends named in every way, and settings field by field from the layer that is nearest."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from unit.calls import chosen, run_attention

import dsa_dispatch
from dsa_dispatch import CallSpec, DSAConfig, configure, explain, use_backend
from dsa_dispatch._policy.policy import policy_key, resolve_policy
from dsa_dispatch._stages import STAGES
from dsa_dispatch.errors import ConfigError, NoBackendError
from dsa_dispatch.testing import FakeBackend, isolated_registry

ATTENTION = CallSpec("run_fused_absorbed_sparse_attention", dtype="float32", needs_grad=frozenset({"query"}))


@pytest.fixture
def three():
    """``high`` before ``low`` before ``torch_dense``; all serve everything."""
    backends = [
        FakeBackend("high", rank=2),
        FakeBackend("low", rank=1),
        FakeBackend("torch_dense", rank=-100),
    ]
    with isolated_registry(*(backend.spec for backend in backends)):
        yield


def order(config):
    """The candidates of the forward in the order in which they are asked."""
    return [
        entry.backend for entry in explain(ATTENTION.operation, config, call=ATTENTION).stages[0].candidates
    ]


def allowed(config, stage=0):
    """Those of them that may serve."""
    decision = explain(ATTENTION.operation, config, call=ATTENTION).stages[stage]
    return [entry.backend for entry in decision.candidates if entry.status != "declined"]


@pytest.mark.parametrize(
    ("backend", "asked"),
    [
        (None, ["high", "low", "torch_dense"]),
        ("auto", ["high", "low", "torch_dense"]),
        ("low", ["low", "high", "torch_dense"]),
        (["torch_dense", "low"], ["torch_dense", "low", "high"]),
        ({"attention_forward": "low"}, ["low", "high", "torch_dense"]),
        ({"attention_backward": "low"}, ["high", "low", "torch_dense"]),
        ({"attention_forward": "auto", "attention_backward": "low"}, ["high", "low", "torch_dense"]),
    ],
)
def test_what_is_named_is_asked_first_and_then_the_rest_by_rank(three, backend, asked):
    assert order({"dsa_kernel_backend": backend}) == asked
    assert allowed({"dsa_kernel_backend": backend}) == asked


@pytest.mark.parametrize("fallback", ["next", "error"])
def test_none_allows_the_reference_alone(three, fallback):
    config = {"dsa_kernel_backend": "none", "dsa_kernel_fallback": fallback}
    assert allowed(config) == allowed(config, 1) == ["torch_dense"]


def test_none_for_one_stage_leaves_the_others_to_auto(three):
    config = {"dsa_kernel_backend": {"attention_backward": "none"}}
    assert allowed(config, 0)[0] == "high"
    assert allowed(config, 1) == ["torch_dense"]


def test_none_without_the_reference_is_no_backend():
    with (
        isolated_registry(FakeBackend("fake").spec),
        pytest.raises(NoBackendError, match="dsa_kernel_backend=none"),
    ):
        run_attention({"dsa_kernel_backend": "none"})


def test_equal_ranks_are_asked_by_name():
    with isolated_registry(*(FakeBackend(name).spec for name in ("b", "c", "a"))):
        assert order(None) == ["a", "b", "c"]


def test_error_allows_only_what_is_named(three):
    assert allowed({"dsa_kernel_backend": "low", "dsa_kernel_fallback": "error"}) == ["low"]
    assert allowed({"dsa_kernel_backend": ["low", "high"], "dsa_kernel_fallback": "error"}) == ["low", "high"]


def test_error_under_auto_names_nothing_and_forbids_nothing(three):
    assert allowed({"dsa_kernel_fallback": "error"}) == ["high", "low", "torch_dense"]


def test_in_a_mapping_only_the_named_stages_are_strict(three):
    config = {"dsa_kernel_backend": {"attention_forward": "low"}, "dsa_kernel_fallback": "error"}
    assert allowed(config, 0) == ["low"]
    assert allowed(config, 1) == ["high", "low", "torch_dense"]


def test_a_family_allows_its_members_the_highest_rank_first():
    cudnn = FakeBackend("cudnn", rank=1)
    flashmla = FakeBackend("flashmla", ("attention_forward",), rank=2, families=["cudnn"])
    other = FakeBackend("other", rank=3)
    with isolated_registry(flashmla.spec, cudnn.spec, other.spec):
        config = {"dsa_kernel_backend": "cudnn", "dsa_kernel_fallback": "error"}
        assert allowed(config, 0) == ["flashmla", "cudnn"]
        assert allowed(config, 1) == ["cudnn"]
        assert chosen(config) == "flashmla"
        assert allowed({"dsa_kernel_backend": "flashmla", "dsa_kernel_fallback": "error"}) == ["flashmla"]


def test_a_family_may_be_named_when_only_a_member_is_there():
    with isolated_registry(FakeBackend("flashmla", families=["cudnn"]).spec):
        assert chosen({"dsa_kernel_backend": "cudnn", "dsa_kernel_fallback": "error"}) == "flashmla"


LAYERS = ("default", "environment", "configure()", "config", "use_backend")
FIELDS = [
    (
        "dsa_kernel_backend",
        "DSA_KERNEL_BACKEND",
        "dsa_kernel_backend[gqa_forward]",
        "auto",
        ["high", "low", "torch_dense", "high"],
    ),
    (
        "dsa_kernel_fallback",
        "DSA_KERNEL_FALLBACK",
        "dsa_kernel_fallback",
        "next",
        ["error", "next", "error", "next"],
    ),
    ("deterministic", "DSA_KERNEL_DETERMINISTIC", "deterministic", "False", ["1", "0", "1", "0"]),
    ("memory_budget", "DSA_KERNEL_MEMORY_BUDGET", "memory_budget", "None", ["1", "2", "3", "4"]),
    ("query_chunk", "DSA_KERNEL_QUERY_CHUNK", "query_chunk", "auto", ["1", "2", "3", "4"]),
    ("debug_checks", "DSA_KERNEL_DEBUG_CHECKS", "debug_checks", "False", ["1", "0", "1", "0"]),
]


@pytest.mark.parametrize(
    ("field", "variable", "shown", "default", "values"), FIELDS, ids=[case[0] for case in FIELDS]
)
@pytest.mark.parametrize("strongest", range(5), ids=LAYERS)
def test_the_nearest_layer_wins_field_by_field_and_is_named(
    three, monkeypatch, field, variable, shown, default, values, strongest
):
    parsed = [str(getattr(DSAConfig(**{field: value}), field)) for value in values]
    if field == "dsa_kernel_backend":
        parsed = values
    short = {"dsa_kernel_backend": "backend", "dsa_kernel_fallback": "fallback"}.get(field, field)
    explicit = {}
    if strongest >= 1:
        monkeypatch.setenv(variable, values[0])
    if strongest >= 2:
        configure({field: values[1]})
    if strongest >= 3:
        explicit = {field: values[2]}
    with use_backend(**({short: values[3]} if strongest >= 4 else {})):
        settings = _settings(explicit)
    value, source = settings[shown]
    if strongest == 0:
        assert value == default
        assert source not in LAYERS[1:]
    else:
        assert (value, source) == (parsed[strongest - 1], LAYERS[strongest])
    others = {
        name: source for name, (_, source) in settings.items() if not name.startswith(shown.partition("[")[0])
    }
    assert not set(others.values()) & set(LAYERS[1:])


def _settings(explicit):
    decision = explain("run_fused_gqa_sparse_attention", explicit, call=CallSpec(""))
    return {setting.name: (setting.value, setting.source) for setting in decision.policy.settings}


def test_fields_of_one_policy_may_come_from_every_layer(three, monkeypatch):
    monkeypatch.setenv("DSA_KERNEL_QUERY_CHUNK", "64")
    configure({"memory_budget": "1MiB"})
    with use_backend(fallback="error"):
        settings = _settings({"dsa_kernel_backend": "low"})
    assert settings["query_chunk"] == ("64", "environment")
    assert settings["memory_budget"] == (str(1 << 20), "configure()")
    assert settings["dsa_kernel_fallback"] == ("error", "use_backend")
    assert settings["dsa_kernel_backend[gqa_forward]"] == ("low", "config")
    assert settings["deterministic"] == ("False", "torch.are_deterministic_algorithms_enabled()")


def test_a_mapping_leaves_the_stages_it_does_not_name_to_the_next_layer(three):
    configure({"dsa_kernel_backend": "low"})
    config = {"dsa_kernel_backend": {"gqa_forward": "torch_dense"}}
    settings = _settings(config)
    assert settings["dsa_kernel_backend[gqa_forward]"] == ("torch_dense", "config")
    assert settings["dsa_kernel_backend[gqa_backward]"] == ("low", "configure()")


def test_the_sources_are_printed_with_the_decision(three):
    configure({"dsa_kernel_backend": "low"})
    text = explain(ATTENTION.operation, call=ATTENTION).to_text()
    assert "dsa_kernel_backend[attention_forward] = low (from configure())" in text
    assert "dsa_kernel_fallback = next (from default)" in text
    assert "dsa_kernel_backend[gqa_forward]" not in text


def test_configure_none_clears(three):
    configure({"dsa_kernel_backend": "low"})
    assert chosen() == "low"
    configure(DSAConfig(dsa_kernel_backend="torch_dense"))
    assert chosen() == "torch_dense"
    configure(None)
    assert chosen() == "high"


def test_deterministic_follows_torch_unless_it_is_set(three):
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        assert _settings(None)["deterministic"] == ("True", "torch.are_deterministic_algorithms_enabled()")
        assert _settings({"deterministic": False})["deterministic"] == ("False", "config")
    finally:
        torch.use_deterministic_algorithms(before)


def test_an_inner_block_inherits_what_it_does_not_name(three):
    with use_backend("low", fallback="error", memory_budget="1MiB"):
        with use_backend(query_chunk=7) as inside:
            assert inside == DSAConfig("low", "error", None, 1 << 20, 7)
            assert allowed(None) == ["low"]
        with use_backend("torch_dense"):
            assert allowed(None) == ["torch_dense"]
        with use_backend({"attention_backward": "high"}):
            assert allowed(None, 0) == ["low"]
            assert allowed(None, 1) == ["high"]
            with use_backend("auto"):
                assert allowed(None, 0)[0] == allowed(None, 1)[0] == "high"
        assert allowed(None, 1) == ["low"]
    assert allowed(None)[0] == "high"


def test_a_mapping_inside_a_mapping_is_merged_by_stage(three):
    with (
        use_backend({"attention_forward": "low", "attention_backward": "low"}),
        use_backend({"attention_backward": "torch_dense"}),
    ):
        assert allowed(None, 0)[0] == "low"
        assert allowed(None, 1)[0] == "torch_dense"


def test_a_block_ends_with_its_exception_and_restores_the_outer_one(three):
    with use_backend("low"):
        with pytest.raises(ZeroDivisionError), use_backend("torch_dense"):
            raise ZeroDivisionError
        assert chosen() == "low"
    assert chosen() == "high"


def test_one_block_may_be_entered_again(three):
    block = use_backend("low")
    with block:
        with use_backend("torch_dense"), block:
            assert chosen() == "low"
        assert chosen() == "low"
    assert chosen() == "high"
    with block:
        assert chosen() == "low"


def test_tasks_keep_their_own_policy(three):
    block = use_backend("low")

    async def inside(turns):
        seen = []
        for _ in range(turns):
            with block:
                await asyncio.sleep(0)
                seen.append(chosen())
            await asyncio.sleep(0)
            seen.append(chosen())
        return seen

    async def both():
        return await asyncio.gather(inside(5), inside(7))

    for seen in asyncio.run(both()):
        assert set(seen[::2]) == {"low"}
        assert set(seen[1::2]) == {"high"}


def test_a_wrong_block_changes_nothing(three):
    with pytest.raises(ConfigError):
        use_backend("low", fallback="sometimes")
    with pytest.raises(ConfigError), use_backend("nobody"):
        pass
    assert chosen() == "high"


def test_use_fused_dsa_kernels_is_false_for_an_unfused_host_and_under_none(three):
    fused = dsa_dispatch.use_fused_dsa_kernels
    assert fused(None)
    assert not fused(SimpleNamespace(attention_backend=SimpleNamespace(name="unfused")))
    assert not fused(SimpleNamespace(attention_backend="unfused", dsa_kernel_backend="low"))
    assert fused(SimpleNamespace(attention_backend="flash", dsa_kernel_backend="low"))
    assert not fused({"dsa_kernel_backend": "none"})
    assert fused({"dsa_kernel_backend": dict.fromkeys(STAGES[1:], "none")})
    with use_backend("none"):
        assert not fused(None)


def test_a_policy_is_a_pure_function_of_its_key(three):
    key = policy_key("dsa_kernel_backend:low", "")
    assert resolve_policy(key) is resolve_policy(policy_key("dsa_kernel_backend:low", ""))
    assert resolve_policy(key).names("gqa_forward") == ("low",)
