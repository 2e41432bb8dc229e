"""Settings: what may be written, how it reads back, and every message that a wrong one provokes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.calls import chosen, run_attention

import dsa_dispatch
from dsa_dispatch import DSAConfig
from dsa_dispatch._policy.config import config_from_mapping, explicit_text, parse_text
from dsa_dispatch._policy.environment import environment_config, read_environment
from dsa_dispatch._runtime import Runtime, swapped
from dsa_dispatch._stages import STAGES
from dsa_dispatch.errors import ConfigError, UnknownBackendError
from dsa_dispatch.testing import FakeBackend, isolated_registry


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ({}, ""),
        ({"dsa_kernel_backend": "auto"}, "dsa_kernel_backend:auto"),
        ({"dsa_kernel_backend": "none"}, "dsa_kernel_backend:none"),
        ({"dsa_kernel_backend": ["cudnn", "triton"]}, "dsa_kernel_backend:cudnn,triton"),
        ({"dsa_kernel_backend": ("cudnn", "triton")}, "dsa_kernel_backend:cudnn,triton"),
        ({"dsa_kernel_backend": " cudnn , triton"}, "dsa_kernel_backend:cudnn,triton"),
        (
            {"dsa_kernel_backend": {"attention_forward": ["a", "b"], "indexer_topk": "none"}},
            "dsa_kernel_backend:indexer_topk=none;attention_forward=a,b",
        ),
        ({"dsa_kernel_backend": "attention_forward=a,b"}, "dsa_kernel_backend:attention_forward=a,b"),
        (
            {"dsa_kernel_fallback": "error", "deterministic": "on"},
            "dsa_kernel_fallback:error|deterministic:True",
        ),
        ({"memory_budget": "1.5KiB", "query_chunk": "128"}, "memory_budget:1536|query_chunk:128"),
        ({"memory_budget": "2 GB", "query_chunk": "off"}, "memory_budget:2000000000|query_chunk:off"),
        ({"memory_budget": str(2**63 - 1)}, f"memory_budget:{2**63 - 1}"),
        (
            {"dsa_kernel_fallback": " error ", "query_chunk": " auto ", "profile": " none "},
            "dsa_kernel_fallback:error|query_chunk:auto|profile:none",
        ),
        ({"profile": "none", "debug_checks": 0}, "profile:none|debug_checks:False"),
    ],
)
def test_equal_settings_have_one_text(written, text):
    config = DSAConfig(**written)
    assert config.text == text
    assert parse_text(text) == config
    assert explicit_text(written) == text


names = st.sampled_from(["a", "b", "torch_dense", "x1"])
choice = st.sampled_from(["auto", "none"]) | st.lists(names, min_size=1, max_size=3, unique=True)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "dsa_kernel_backend": choice | st.dictionaries(st.sampled_from(STAGES), choice, min_size=1),
            "dsa_kernel_fallback": st.sampled_from(["next", "error"]),
            "deterministic": st.booleans(),
            "memory_budget": st.integers(1, 1 << 40),
            "query_chunk": st.integers(1, 1 << 20) | st.sampled_from(["auto", "off"]),
            "debug_checks": st.booleans(),
        },
    )
)
def test_text_reads_back_as_the_same_config(values):
    config = DSAConfig(**values)
    assert parse_text(config.text) == config
    assert parse_text(config.text).text == config.text
    assert dataclasses.replace(config) == config


BAD = [
    ({"dsa_kernel_backend": 3}, ["dsa_kernel_backend: got 3", "a mapping from a stage"]),
    ({"dsa_kernel_backend": "tri-ton"}, ["got 'tri-ton'", "backend names such as 'triton'"]),
    ({"dsa_kernel_backend": ""}, ["got ''", "backend names such as"]),
    ({"dsa_kernel_backend": []}, ["got []", "backend names such as"]),
    ({"dsa_kernel_backend": ["a", "a"]}, ["got ['a', 'a']", "named twice"]),
    ({"dsa_kernel_backend": "auto,a"}, ["got 'auto,a'", "'auto' and 'none' stand alone"]),
    ({"dsa_kernel_backend": {}}, ["empty mapping", "indexer_topk"]),
    (
        {"dsa_kernel_backend": {"attention_foward": "a"}},
        ["unknown stage 'attention_foward'", "gqa_backward", "Did you mean 'attention_forward'?"],
    ),
    ({"dsa_kernel_backend": {"gqa_forward": 1}}, ["dsa_kernel_backend[gqa_forward]: got 1"]),
    ({"dsa_kernel_backend": "indexer_topk=a;indexer_topk=b"}, ["a stage is named twice"]),
    ({"dsa_kernel_backend": (("attention_foward", ("a",)),)}, ["unknown stage 'attention_foward'"]),
    ({"dsa_kernel_backend": (("a", "b", "c"),)}, ["got (('a', 'b', 'c'),)", "expected pairs of a stage"]),
    ({"dsa_kernel_backend": (("*", ("none",)), ("x",))}, ["(('*', ('none',)), ('x',))", "expected pairs"]),
    ({"dsa_kernel_backend": ((["x"], "y"),)}, ["got ((['x'], 'y'),)", "expected pairs"]),
    ({"dsa_kernel_backend": (("*", ("a",)), ("*", ("b",)))}, ["('b',))", "each stage once"]),
    ({"dsa_kernel_fallback": "eror"}, ["dsa_kernel_fallback: got 'eror'", "'next'", "Did you mean 'error'?"]),
    ({"deterministic": "maybe"}, ["deterministic: got 'maybe'", "true or false", "yes/no"]),
    ({"debug_checks": 2}, ["debug_checks: got 2"]),
    ({"memory_budget": "1 potato"}, ["memory_budget: got '1 potato'", "'512MiB'"]),
    ({"memory_budget": 0}, ["memory_budget: got 0", "positive"]),
    ({"memory_budget": True}, ["memory_budget: got True"]),
    ({"memory_budget": -5}, ["memory_budget: got -5"]),
    ({"memory_budget": "9" * 400}, ["memory_budget: got '999", "(402 characters)", "up to 2**63 - 1"]),
    ({"memory_budget": "9" * 5000 + " GiB"}, ["memory_budget: got '999", "up to 2**63 - 1"]),
    ({"memory_budget": str(2**63)}, ["memory_budget: got '9223372036854775808'", "up to 2**63 - 1"]),
    ({"memory_budget": 10**5000}, ["memory_budget: got <int>", "up to 2**63 - 1"]),
    ({"query_chunk": "9" * 5000}, ["query_chunk: got '999", "up to 2**63 - 1"]),
    ({"query_chunk": 2**63}, ["query_chunk: got 9223372036854775808", "up to 2**63 - 1"]),
    ({"deterministic": 10**5000}, ["deterministic: got <int>", "true or false"]),
    ({"dsa_kernel_fallback": 10**5000}, ["dsa_kernel_fallback: got <int>", "'next'"]),
    ({"dsa_kernel_backend": {10**5000: "a"}}, ["unknown stage <int>"]),
    ({"dsa_kernel_backend": (([], ("a",)),)}, ["got (([], ('a',)),)", "expected pairs"]),
    ({"query_chunk": 0}, ["query_chunk: got 0", "'auto' or 'off'"]),
    ({"query_chunk": "some"}, ["query_chunk: got 'some'"]),
    ({"profile": "h200.json"}, ["profile: got 'h200.json'", "reads no measured profile"]),
]


@pytest.mark.parametrize(("written", "parts"), BAD, ids=[case[1][0] for case in BAD])
def test_a_value_that_cannot_be_meant_is_named_with_what_can(written, parts):
    with pytest.raises(ConfigError) as caught:
        DSAConfig(**written)
    for part in parts:
        assert part in str(caught.value)


def test_a_misspelt_key_is_named_with_the_nearest_and_all_valid_ones():
    with pytest.raises(ConfigError) as caught:
        run_attention({"dsa_kernel_backed": "torch_dense"})
    text = str(caught.value)
    assert "config: unknown key 'dsa_kernel_backed'" in text
    assert "Did you mean 'dsa_kernel_backend'?" in text
    for field in dataclasses.fields(DSAConfig):
        assert field.name in text or field.name == "text"
    with pytest.raises(ConfigError, match=r"^configure\(\): unknown key 'fallback'"):
        dsa_dispatch.configure({"fallback": "error"})
    with pytest.raises(ConfigError, match=r"^here: unknown key 3"):
        config_from_mapping({3: 1}, "here")


def test_an_unknown_backend_is_named_with_the_known_and_the_nearest(registry):
    with pytest.raises(UnknownBackendError) as caught:
        run_attention({"dsa_kernel_backend": "torch_dens"})
    text = str(caught.value)
    assert "unknown backend 'torch_dens'" in text
    assert "auto, none, torch_dense" in text
    assert "Did you mean 'torch_dense'?" in text
    assert "register_backend()" in text
    assert "dsa-dispatch doctor" in text


@pytest.mark.parametrize(
    "provoke",
    [
        lambda: dsa_dispatch.configure({"dsa_kernel_backend": {"gqa_forward": "nobody"}}),
        lambda: dsa_dispatch.use_backend("nobody").__enter__(),
        lambda: run_attention(SimpleNamespace(dsa_kernel_backend="nobody")),
        lambda: dsa_dispatch.use_fused_dsa_kernels(SimpleNamespace(dsa_kernel_backend="nobody")),
        lambda: dsa_dispatch.explain(
            "run_fused_qk_topk", call=dsa_dispatch.CallSpec("x"), config={"dsa_kernel_backend": "nobody"}
        ),
    ],
    ids=["configure", "use_backend", "foreign config", "use_fused_dsa_kernels", "explain"],
)
def test_an_unknown_backend_is_an_error_wherever_it_is_named(registry, provoke):
    with pytest.raises(UnknownBackendError, match="unknown backend 'nobody'"):
        provoke()


def test_a_config_of_a_strange_type_says_what_is_taken():
    with pytest.raises(ConfigError) as caught:
        run_attention(3.5)
    text = str(caught.value)
    assert "config: got float" in text
    assert "dsa_kernel_backend attribute" in text
    with pytest.raises(ConfigError, match=r"configure\(\): got int, supports a DSAConfig, a mapping or None"):
        dsa_dispatch.configure(3)


@pytest.mark.parametrize(
    "config",
    [
        {"dsa_kernel_backend": "one", "dsa_kernel_fallback": "error"},
        DSAConfig(dsa_kernel_backend="one", dsa_kernel_fallback="error"),
        SimpleNamespace(dsa_kernel_backend="one", dsa_kernel_fallback="error"),
        SimpleNamespace(dsa_kernel_backend=["one"], other="ignored"),
        SimpleNamespace(dsa_kernel_backend=("one", "two")),
        SimpleNamespace(
            dsa_kernel_backend={"attention_forward": "one"}, deterministic="is another framework's"
        ),
    ],
    ids=[
        "mapping",
        "DSAConfig",
        "object",
        "object with a list",
        "object with a tuple",
        "object with a mapping",
    ],
)
def test_every_form_of_config_is_read(config):
    one, two = FakeBackend("one"), FakeBackend("two", rank=1)
    with isolated_registry(one.spec, two.spec):
        assert chosen() == "two"
        assert chosen(config) == "one"


@pytest.mark.parametrize("value", [{"a"}, 7, object()])
def test_a_foreign_value_that_cannot_be_meant_is_a_config_error(value):
    with pytest.raises(ConfigError, match="dsa_kernel_backend: got"):
        explicit_text(SimpleNamespace(dsa_kernel_backend=value))


def test_a_foreign_object_that_leaves_the_backend_open_decides_nothing():
    assert explicit_text(SimpleNamespace(dsa_kernel_backend=None)) == ""
    assert explicit_text(None) == ""


def test_an_unset_or_empty_variable_decides_nothing(monkeypatch):
    one, two = FakeBackend("one"), FakeBackend("two", rank=1)
    with isolated_registry(one.spec, two.spec):
        monkeypatch.setenv("DSA_KERNEL_BACKEND", "")
        assert chosen() == "two"


def test_a_changed_variable_takes_effect_at_the_next_call(monkeypatch):
    one, two = FakeBackend("one"), FakeBackend("two", rank=1)
    with isolated_registry(one.spec, two.spec):
        assert chosen() == "two"
        monkeypatch.setenv("DSA_KERNEL_BACKEND", "one")
        assert chosen() == "one"
        monkeypatch.setenv("DSA_KERNEL_BACKEND", "attention_backward=two;attention_forward=one,two")
        assert chosen(grad=True) == "one"
        assert chosen(grad=True, stage="attention_backward") == "two"
        monkeypatch.delenv("DSA_KERNEL_BACKEND")
        assert chosen() == "two"


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("DSA_KERNEL_BACKEND", "tri-ton", "backend names such as"),
        ("DSA_KERNEL_FALLBACK", "maybe", "'next'"),
        ("DSA_KERNEL_DETERMINISTIC", "perhaps", "true or false"),
        ("DSA_KERNEL_MEMORY_BUDGET", "much", "'512MiB'"),
        ("DSA_KERNEL_MEMORY_BUDGET", "0" * 90 + "9" * 100, "up to 2**63 - 1"),
        ("DSA_KERNEL_QUERY_CHUNK", "-1", "positive number of query rows"),
        ("DSA_KERNEL_PROFILE", "x", "supports 'none'"),
        ("DSA_KERNEL_DEBUG_CHECKS", "x", "true or false"),
    ],
)
def test_a_bad_variable_is_named_with_its_value_at_every_call(registry, monkeypatch, name, value, part):
    monkeypatch.setenv(name, value)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            run_attention()
        assert f"environment variable {name}={value!r}: " in str(caught.value)
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "field", "meant"),
    [
        ("DSA_KERNEL_BACKEND", " none ", "dsa_kernel_backend", (("*", ("none",)),)),
        ("DSA_KERNEL_FALLBACK", " error ", "dsa_kernel_fallback", "error"),
        ("DSA_KERNEL_DETERMINISTIC", " on ", "deterministic", True),
        ("DSA_KERNEL_MEMORY_BUDGET", " 2 KiB ", "memory_budget", 2048),
        ("DSA_KERNEL_QUERY_CHUNK", " auto ", "query_chunk", "auto"),
        ("DSA_KERNEL_QUERY_CHUNK", " 64 ", "query_chunk", 64),
        ("DSA_KERNEL_PROFILE", "none\n", "profile", "none"),
        ("DSA_KERNEL_DEBUG_CHECKS", "0 ", "debug_checks", False),
        ("DSA_KERNEL_BACKEND", " \t", "dsa_kernel_backend", None),
    ],
)
def test_spaces_around_a_variable_mean_nothing(monkeypatch, name, value, field, meant):
    monkeypatch.setenv(name, value)
    assert getattr(environment_config(read_environment()), field) == meant


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (3, "configuration 3: got int, supports the name of a preset or the path of a YAML file"),
        (None, "configuration None: got NoneType"),
        (b"x", "configuration b'x': got bytes"),
        ("x" * 5000, "cannot be read"),
    ],
    ids=["int", "None", "bytes", "long name"],
)
def test_a_source_of_settings_that_is_no_name_or_path_says_what_is_taken(source, part):
    with pytest.raises(ConfigError) as caught:
        dsa_dispatch.load_config(source)
    assert part in str(caught.value)
    assert len(str(caught.value)) < 6000


def test_an_unknown_backend_in_a_variable_is_an_error(registry, monkeypatch):
    monkeypatch.setenv("DSA_KERNEL_BACKEND", "nobody")
    with pytest.raises(UnknownBackendError, match="unknown backend 'nobody'"):
        run_attention()


def test_a_variable_that_nothing_reads_is_an_error_at_first_use_and_at_refresh(monkeypatch):
    with swapped(Runtime()):
        monkeypatch.setenv("DSA_KERNEL_BACKED", "torch_dense")
        for _ in range(2):
            with pytest.raises(ConfigError) as caught:
                run_attention()
            text = str(caught.value)
            assert "environment variable DSA_KERNEL_BACKED is set, but nothing reads it" in text
            assert "Did you mean 'DSA_KERNEL_BACKEND'?" in text
            assert "DSA_KERNEL_MEMORY_BUDGET" in text
        monkeypatch.delenv("DSA_KERNEL_BACKED")
        run_attention()
        monkeypatch.setenv("DSA_KERNEL_BACKED", "torch_dense")
        run_attention()
        with pytest.raises(ConfigError, match="DSA_KERNEL_BACKED is set, but nothing reads it"):
            dsa_dispatch.refresh()


def test_other_prefixes_are_none_of_our_business(monkeypatch):
    monkeypatch.setenv("DSA_OTHER", "1")
    with swapped(Runtime()):
        dsa_dispatch.refresh()
        run_attention()
