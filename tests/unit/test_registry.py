"""The registry: entry points, each guarded by itself; names; the fingerprint; hooks that fail; looking again."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import os
import pickle
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
from unit.calls import chosen, run_attention

import dsa_dispatch
from dsa_dispatch import (
    AnyOf,
    BackendSpec,
    CallSpec,
    Capability,
    Decline,
    Heads,
    Requirement,
    StageSpec,
    explain,
    hookimpl,
    list_backends,
    register_backend,
    unregister_backend,
)
from dsa_dispatch._dispatch.plugins import backend_order
from dsa_dispatch._registry import registry as module
from dsa_dispatch._registry.registry import Snapshot, load_plugins, with_backend
from dsa_dispatch._runtime import Runtime, current, swapped
from dsa_dispatch.errors import BackendDeclined, NoBackendError, PluginError, UnknownBackendError
from dsa_dispatch.testing import FakeBackend, isolated_registry

SPEC = FakeBackend("extra").spec


def plugin_module(name, **attributes):
    created = ModuleType(name)
    for key, value in attributes.items():
        setattr(created, key, value)
    sys.modules[name] = created
    return created


@pytest.fixture
def installed(monkeypatch):
    """Install entry points: ``installed(name="module[:attribute]", ...)`` gives the snapshot that loads them."""
    before = set(sys.modules)

    def install(**points):
        found = [EntryPoint(name, value, "dsa_dispatch.backends") for name, value in points.items()]
        monkeypatch.setattr(module, "entry_points", lambda group: found)
        return load_plugins(Snapshot())

    yield install
    for name in set(sys.modules) - before:
        del sys.modules[name]


def good(name="good_plugin", spec=SPEC):
    plugin_module(name, dsa_dispatch_backends=hookimpl(lambda: [spec]))
    sys.modules[name].dsa_dispatch_backends.__name__ = "dsa_dispatch_backends"


def test_our_own_backends_enter_through_the_entry_point_group():
    snapshot = load_plugins(Snapshot())
    assert snapshot.backends["torch_dense"].origin == "entry point 'torch_dense' of dsa-dispatch"
    assert snapshot.failures == ()


def test_a_plugin_brings_its_backends(installed):
    good()
    snapshot = installed(mine="good_plugin")
    assert snapshot.backends["extra"].spec is SPEC
    assert snapshot.backends["extra"].origin == "entry point 'mine' of unknown distribution"
    assert snapshot.failures == ()


def raises(error):
    def hook():
        raise error

    return hook


def broken_hook_argument(decison):
    return None


def misspelt():
    return []


BROKEN = {
    "entry point to nothing": (lambda: None, "no_such_module_anywhere", "import", "ModuleNotFoundError"),
    "entry point to no attribute": (
        lambda: plugin_module("broken"),
        "broken:thing",
        "import",
        "AttributeError",
    ),
    "hook that raises": (
        lambda: plugin_module("broken", dsa_dispatch_backends=hookimpl(raises(RuntimeError("boom")))),
        "broken",
        "dsa_dispatch_backends",
        "RuntimeError: boom",
    ),
    "hook with a wrong argument": (
        lambda: plugin_module("broken", dsa_dispatch_on_decision=hookimpl(broken_hook_argument)),
        "broken",
        "register",
        "decison",
    ),
    "hook of a wrong name": (
        lambda: plugin_module("broken", dsa_dispatch_backend=hookimpl(misspelt)),
        "broken",
        "register",
        "dsa_dispatch_backend",
    ),
    "module without a hook": (lambda: plugin_module("broken"), "broken", "register", "implements no hook"),
    "not a list": (
        lambda: plugin_module("broken", dsa_dispatch_backends=hookimpl(lambda: SPEC)),
        "broken",
        "dsa_dispatch_backends",
        "TypeError",
    ),
    "nothing": (
        lambda: plugin_module("broken", dsa_dispatch_backends=hookimpl(lambda: None)),
        "broken",
        "dsa_dispatch_backends",
        "returned None",
    ),
    "not a spec": (
        lambda: plugin_module("broken", dsa_dispatch_backends=hookimpl(lambda: [{"name": "x"}])),
        "broken",
        "backend",
        "expected a BackendSpec, got dict",
    ),
    "not frozen data": (
        lambda: plugin_module(
            "broken", dsa_dispatch_backends=hookimpl(lambda: [spec_with(dtypes=["bfloat16"])])
        ),
        "broken",
        "dsa_dispatch_backends",
        "field capability, field dtypes: got ['bfloat16'], expected frozenset[str]",
    ),
}


def spec_with(name="odd", **capability):
    return BackendSpec(name, {"gqa_forward": StageSpec(Capability(**capability), "m:f")})


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plugin_is_recorded_and_costs_the_others_nothing(installed, fault):
    make, value, step, error = BROKEN[fault]
    make()
    good()
    snapshot = installed(a_broken=value, good="good_plugin")
    (failure,) = snapshot.failures
    assert (failure.plugin, failure.distribution, failure.step) == ("a_broken", "unknown distribution", step)
    assert error in failure.error
    assert "Traceback" in failure.traceback or failure.step == "backend"
    assert list(snapshot.backends) == ["extra"]
    with swapped(Runtime(snapshot)):
        assert chosen() == "extra"


def test_a_plugin_that_raises_at_import_is_recorded(installed, tmp_path, monkeypatch):
    (tmp_path / "raises_at_import.py").write_text("raise OSError('libnothing.so: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    good()
    snapshot = installed(a="raises_at_import", good="good_plugin")
    (failure,) = snapshot.failures
    assert failure.error == "OSError: libnothing.so: cannot open"
    assert "raises_at_import.py" in failure.traceback
    assert list(snapshot.backends) == ["extra"]


def test_a_plugin_that_registers_at_import_is_told_how_to(tmp_path, monkeypatch):
    (tmp_path / "calls_at_import.py").write_text("import dsa_dispatch\ndsa_dispatch.register_backend(None)\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("calls", "calls_at_import", "dsa_dispatch.backends")
    monkeypatch.setattr(module, "entry_points", lambda group: [point])
    with swapped(Runtime()) as runtime:
        (failure,) = runtime.snapshot.failures
    assert failure.step == "import"
    assert "hands its backends over from the hook dsa_dispatch_backends()" in failure.error


def test_two_plugins_with_one_backend_name_keep_the_first_by_entry_point_name(installed):
    good("first_plugin")
    good("second_plugin", FakeBackend("extra").spec)
    snapshot = installed(b="second_plugin", a="first_plugin")
    assert snapshot.backends["extra"].spec is SPEC
    (failure,) = snapshot.failures
    assert failure.plugin == "b"
    assert failure.step == "backend"
    assert (
        "backend 'extra' of entry point 'b' of unknown distribution is already registered by entry point 'a'"
        in failure.error
    )


class Distribution:
    """As much of a distribution as names an entry point."""

    def __init__(self, name):
        self.name = name


def test_entry_points_of_one_name_both_count_and_one_module_counts_once(monkeypatch):
    good("first_plugin")
    good("second_plugin", FakeBackend("other").spec)
    points = [
        EntryPoint("same", value, "dsa_dispatch.backends")._for(Distribution(distribution))
        for value, distribution in [
            ("first_plugin", "a-dist"),
            ("second_plugin", "b-dist"),
            ("second_plugin", "b-dist"),
        ]
    ]
    again = EntryPoint("zz", "first_plugin", "dsa_dispatch.backends")._for(Distribution("c-dist"))
    monkeypatch.setattr(module, "entry_points", lambda group: [*points, again])
    snapshot = load_plugins(Snapshot())
    assert snapshot.backends["extra"].origin == "entry point 'same' of a-dist"
    assert snapshot.backends["other"].origin == "entry point 'same' of b-dist"
    (failure,) = snapshot.failures
    assert (failure.plugin, failure.distribution, failure.step) == ("zz", "c-dist", "register")
    assert (
        "first_plugin is already registered, as 'same' of a-dist; name a module in one entry point only"
        in (failure.error)
    )
    for name in ("first_plugin", "second_plugin"):
        del sys.modules[name]


@pytest.mark.parametrize(
    "metadata",
    [b"", b"Metadata-Version: 2.1\nName: half-gone\n", b"\xff\xfe\x00", None],
    ids=["empty", "no version", "not text", "no file"],
)
def test_a_distribution_with_broken_metadata_tells_no_version_and_costs_nothing(
    tmp_path, monkeypatch, metadata
):
    """As an interrupted uninstallation leaves it: the module is there, and its version cannot be judged."""
    info = tmp_path / "half_gone-1.0.dist-info"
    info.mkdir()
    (tmp_path / "half_gone.py").write_text("")
    (info / "entry_points.txt").write_text("[dsa_dispatch.backends]\nhalf_gone = half_gone\n")
    if metadata is not None:
        (info / "METADATA").write_bytes(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    needing = FakeBackend("needing", packages=(Requirement("half-gone", "half_gone", ">=2"),)).spec
    with isolated_registry(needing, installed=True) as runtime:
        listed = {entry.name: entry for entry in list_backends()}
        (failure,) = runtime.snapshot.failures
    assert listed["needing"].installed
    assert listed["torch_dense"].installed
    assert (failure.plugin, failure.step) == ("half_gone", "register")
    sys.modules.pop("half_gone", None)


def test_a_plugin_for_another_api_is_listed_and_declined():
    spec = dataclasses.replace(FakeBackend("future", rank=9).spec, api_version=2)
    with isolated_registry(spec, installed=True):
        (future,) = [entry for entry in list_backends() if entry.name == "future"]
        assert future.missing == ("API_MISMATCH api_version: got 2, supports 1.",)
        assert future.install == (
            "Install a release of future that is built for this version of dsa-dispatch",
        )
        assert chosen() == "torch_dense"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BackendSpec("a-b", {}), "a backend name must be an identifier, got 'a-b'"),
        (lambda: BackendSpec("x", {}), "backend 'x' provides no stage"),
        (lambda: BackendSpec("x", ["gqa_forward"]), "backend 'x' provides no stage"),
        (lambda: BackendSpec("x", {"gqa": None}), "unknown stage 'gqa'; known: indexer_topk"),
        (lambda: BackendSpec("x", {"gqa_forward": Capability()}), "expected StageSpec"),
        (lambda: BackendSpec("x", {"gqa_forward": StageSpec(None, "m:f")}), "expected StageSpec"),
        (lambda: BackendSpec("x", {"gqa_forward": StageSpec(Capability(), "m.f")}), "'module:function'"),
        (lambda: register_backend(3), "register_backend: expected a BackendSpec, got int"),
        (lambda: register_backend(spec_with("auto")), "auto and none are policies, not names"),
        (lambda: register_backend(spec_with("none")), "auto and none are policies, not names"),
        (lambda: register_backend(FakeBackend("x", families=["none"]).spec), "'none' cannot name a family"),
        (
            lambda: register_backend(FakeBackend("torch_dense").spec),
            "already registered by isolated_registry()",
        ),
        (
            lambda: register_backend(spec_with(heads=Heads(values={64}))),
            "backend 'odd', stage gqa_forward, field capability, field heads, field values: got {64}, expected ",
        ),
        (lambda: unregister_backend("nobody"), "no backend 'nobody'; registered: "),
    ],
)
def test_ill_formed_data_is_a_plugin_error_that_says_what_is_wrong(registry, make, text):
    before = list(current().snapshot.backends)
    with pytest.raises(PluginError) as caught:
        make()
    assert text in str(caught.value)
    assert list(current().snapshot.backends) == before


def test_a_spec_does_not_change_with_the_mapping_it_was_made_of():
    stages = {"gqa_forward": StageSpec(Capability(), "m:f")}
    spec = BackendSpec("x", stages)
    stages.clear()
    assert list(spec.stages) == ["gqa_forward"]
    with pytest.raises(TypeError):
        spec.stages["gqa_backward"] = None


def test_registering_and_unregistering_change_the_next_call(registry):
    assert chosen() == "torch_dense"
    register_backend(FakeBackend("better").spec)
    assert chosen() == "better"
    unregister_backend("better")
    assert chosen() == "torch_dense"
    with pytest.raises(UnknownBackendError):
        chosen({"dsa_kernel_backend": "better"})


def test_a_name_given_to_another_backend_runs_the_other_one(registry):
    first, second = FakeBackend("same"), FakeBackend("same")
    register_backend(first.spec)
    run_attention()
    unregister_backend("same")
    register_backend(second.spec)
    run_attention()
    assert len(first.calls) == len(second.calls) == 1


@pytest.mark.parametrize("order", [("cudnn", "flashmla"), ("flashmla", "cudnn")])
def test_a_family_may_be_registered_before_or_after_its_members(order):
    specs = {"cudnn": FakeBackend("cudnn").spec, "flashmla": FakeBackend("flashmla", families=["cudnn"]).spec}
    with isolated_registry(*(specs[name] for name in order)) as runtime:
        assert runtime.snapshot.members("cudnn") == ("cudnn", "flashmla")
        unregister_backend("cudnn")
        register_backend(specs["cudnn"])
        assert runtime.snapshot.members("cudnn") == ("cudnn", "flashmla")


def test_listing_says_who_brought_what_and_what_is_missing():
    absent = FakeBackend(
        "absent", ("gqa_forward",), rank=3, packages=(Requirement("no-such-dist", "no_such_module", ">=2"),)
    )
    with isolated_registry(absent.spec, installed=True):
        listed = {entry.name: entry for entry in list_backends()}
        first, second = listed["absent"], listed["torch_dense"]
    assert (first.name, first.rank, first.stages, first.installed) == ("absent", 3, ("gqa_forward",), False)
    assert first.missing == ("NOT_INSTALLED package no-such-dist: got not installed, supports >=2.",)
    assert first.install == ("pip install 'no-such-dist>=2'",)
    assert (second.name, second.installed) == ("torch_dense", True)
    assert first.origin == "isolated_registry()"


FINGERPRINT = """
from dsa_dispatch import *
from dsa_dispatch._runtime import current
capability = Capability(
    devices=frozenset({"cuda", "cpu", "xpu", "hip"}),
    heads=Heads(values=frozenset({8, 16, 1 << 40, 72, 136, 3}), pad=True),
    extra_check=len,
)
class Policy:
    @hookimpl
    def dsa_dispatch_order(self, call, candidates): return None
current().snapshot.plugins.register(Policy())
register_backend(BackendSpec("x", {"gqa_forward": StageSpec(capability, "m:f")}, families=frozenset("abcdef")))
print(current().snapshot.fingerprint())
"""


def test_the_fingerprint_is_the_same_in_every_process():
    def in_process(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        run = [sys.executable, "-c", FINGERPRINT]
        return subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    first, second = in_process("1"), in_process("4242")
    assert first == second
    assert len(first) == 16


def fingerprint(spec, *plugins):
    snapshot = with_backend(Snapshot(), spec, "test")
    for plugin in plugins:
        snapshot.plugins.register(plugin)
    return snapshot.fingerprint()


class Order:
    @hookimpl
    def dsa_dispatch_order(self, call, candidates):
        return candidates[::-1]


class Reverse(Order):
    pass


class Observer:
    @hookimpl
    def dsa_dispatch_on_decision(self, decision):
        return None


def test_the_fingerprint_changes_with_whatever_decides():
    base = spec_with()

    def with_(**changes):
        return dataclasses.replace(base, **changes)

    values = [
        fingerprint(base),
        fingerprint(with_(name="other")),
        fingerprint(with_(version="2")),
        fingerprint(with_(rank=1)),
        fingerprint(with_(api_version=2)),
        fingerprint(with_(families=frozenset({"f"}))),
        fingerprint(with_(packages=(Requirement("d", "m"),))),
        fingerprint(with_(stages={"gqa_backward": base.stages["gqa_forward"]})),
        fingerprint(with_(stages={"gqa_forward": StageSpec(Capability(), "m:g")})),
        fingerprint(spec_with(heads=Heads(values=frozenset({64})))),
        fingerprint(spec_with(heads=Heads(values=frozenset({65})))),
        fingerprint(spec_with(max_rows=5)),
        fingerprint(spec_with(extra_check=len)),
        fingerprint(spec_with(extra_check=functools.partial(len))),
        fingerprint(base, Order()),
        fingerprint(base, Reverse()),
    ]
    assert len(set(values)) == len(values)


def test_the_fingerprint_does_not_change_with_what_decides_nothing():
    base = spec_with()
    assert fingerprint(base) == fingerprint(dataclasses.replace(base, doc="Words."))
    assert fingerprint(base) == fingerprint(base, Observer())


def seen(plugin):
    """The order a decision asks backends in, with a policy plugin."""
    with isolated_registry(*(FakeBackend(name).spec for name in "abc"), plugins=[plugin, *OTHERS]):
        decision = explain("run_fused_qk_topk", call=dsa_dispatch.CallSpec(""))
    return "".join(entry.backend for entry in decision.stages[0].candidates), decision.faults


OTHERS: list[object] = []


def policy(answer):
    class Policy:
        @hookimpl
        def dsa_dispatch_order(self, call, candidates):
            return answer(call, candidates)

    return Policy()


def test_a_policy_plugin_reorders_the_candidates():
    assert seen(policy(lambda call, candidates: candidates[::-1])) == ("cba", ())
    assert seen(policy(lambda call, candidates: None)) == ("abc", ())
    assert seen(policy(lambda call, candidates: iter("bca"))) == ("bca", ())


@pytest.mark.parametrize("answer", [("a", "b"), ("a", "b", "c", "d"), ("a", "a", "b"), [1, 2, 3], (), "cab"])
def test_only_a_permutation_counts(answer):
    asked, faults = seen(policy(lambda call, candidates: answer))
    if answer == "cab":
        assert asked == "cab"
    else:
        assert asked == "abc"
        assert "dsa_dispatch_order and was passed over" in faults[0] or "no permutation" in faults[0]


def test_explain_names_the_policy_plugin_that_ordered_and_no_other():
    quiet, loud = policy(lambda call, candidates: None), policy(lambda call, candidates: candidates[::-1])
    call = dsa_dispatch.CallSpec("run_fused_qk_topk")
    line = f"(auto asks in the order of policy plugin {__name__}:policy.<locals>.Policy of this process)"
    for plugins, named in (([quiet, loud], True), ([quiet], False)):
        with isolated_registry(*(FakeBackend(name).spec for name in "abc"), plugins=plugins):
            text = explain(call.operation, call=call).to_text()
        assert (line in text) is named


def test_a_policy_plugin_that_raises_does_not_silence_the_next(caplog):
    def failing(call, candidates):
        raise KeyError("table")

    plugins = [policy(lambda call, candidates: candidates[::-1]), policy(failing)]
    with isolated_registry(*(FakeBackend(name).spec for name in "abc"), plugins=plugins):
        decision = explain("run_fused_qk_topk", call=dsa_dispatch.CallSpec(""))
        assert "".join(entry.backend for entry in decision.stages[0].candidates) == "cba"
        assert "raised in dsa_dispatch_order and was passed over: KeyError: 'table'" in decision.to_text()
        assert decision.as_dict()["faults"] == list(decision.faults)
        assert not caplog.records
        for rows in (3, 4):
            for config in (None, {"query_chunk": rows}):
                assert chosen(config, rows=rows) == "c"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "dsa_dispatch"
    assert "KeyError" in record.getMessage()


def test_an_observer_sees_every_new_decision_and_no_cached_one():
    decisions = []

    class Watch:
        @hookimpl
        def dsa_dispatch_on_decision(self, decision):
            decisions.append(decision)

    with isolated_registry(FakeBackend("fake", ("attention_forward",)).spec, plugins=[Watch()]):
        run_attention()
        run_attention(rows=9)
        assert [decision.backends() for decision in decisions] == [{"attention_forward": "fake"}]
        with pytest.raises(dsa_dispatch.errors.NoBackendError):
            run_attention(grad=True)
        assert [decision.served for decision in decisions] == [True, False]
        explain("run_fused_qk_topk", call=dsa_dispatch.CallSpec(""))
        assert len(decisions) == 2


def test_an_observer_that_raises_is_reported_once_and_hides_nothing_from_the_next(caplog):
    decisions = []

    class Watch:
        @hookimpl
        def dsa_dispatch_on_decision(self, decision):
            decisions.append(decision)

    class Broken:
        @hookimpl
        def dsa_dispatch_on_decision(self, decision):
            raise OSError("disk full")

    with isolated_registry(FakeBackend("fake").spec, plugins=[Watch(), Broken()]):
        run_attention()
        run_attention(grad=True)
    assert len(decisions) == 2
    (record,) = caplog.records
    assert "Broken of this process raised in dsa_dispatch_on_decision" in record.getMessage()
    assert "disk full" in caplog.text


def test_refresh_forgets_decisions_tests_and_warnings_and_keeps_registered_backends(registry, caplog):
    fake = FakeBackend("fake", ("gqa_forward",), self_test=True)
    register_backend(fake.spec)
    config = {"dsa_kernel_backend": "fake"}
    for _ in range(2):
        run_attention(config)
    assert len(caplog.records) == 1
    assert registry.plans
    assert registry.availability
    dsa_dispatch.refresh()
    assert not registry.plans
    assert not registry.availability
    run_attention(config)
    assert len(caplog.records) == 2
    assert dsa_dispatch.stats().misses["run_fused_absorbed_sparse_attention"] == 2


def test_a_registry_of_ones_own_leaves_nothing_behind():
    before = current()
    with isolated_registry(SPEC):
        dsa_dispatch.configure({"dsa_kernel_backend": "extra"})
        assert current() is not before
    assert current() is before
    assert "extra" not in current().snapshot.backends
    assert current().configured == ""


def test_a_policy_plugin_sees_no_lengths_since_one_decision_serves_many():
    calls = []
    snapshot = Snapshot()
    snapshot.plugins.register(policy(lambda call, candidates: calls.append(call)))
    backend_order(snapshot, CallSpec("run_fused_qk_topk", batch=3, rows=70, keys=900, width=64))
    assert [(call.batch, call.rows, call.keys, call.width) for call in calls] == [(1, 1, 1, 64)]


@dataclasses.dataclass
class Unhashable:
    """A callable that no plan can be looked up by."""

    def __call__(self, call):
        return None


ILL_TYPED = {
    "field rank: got None, expected int": {"rank": None},
    "field rank: got 'high', expected int": {"rank": "high"},
    "field rank: got True, expected int": {"rank": True},
    "field packages: got 'abc'": {"packages": "abc"},
    "field families: got 'fam'": {"families": "fam"},
    "field families: got None": {"families": None},
    "package x: got version range '>>1'": {"packages": (Requirement("x", "x", ">>1"),)},
    "expected the names of a distribution": {"packages": (Requirement("", "x"),)},
    "expected at least one alternative": {"packages": (AnyOf(()),)},
    "package y: got version range '>>1'": {"packages": (AnyOf((Requirement("y", "y", ">>1"),)),)},
    "field alternatives: got 'abc'": {"packages": (AnyOf("abc"),)},
}
ILL_TYPED_CAPABILITY = {
    "field heads: got 5": {"heads": 5},
    "field max_rows: got '10'": {"max_rows": "10"},
    "field heads, field multiple_of: got 0, expected at least 1": {"heads": Heads(multiple_of=0)},
    "field gradient_error: got -0.1, expected a fraction from 0": {"gradient_error": -0.1},
    "field gradient_error: got nan, expected a fraction from 0": {"gradient_error": float("nan")},
    "field gradient_error: got 1, expected a fraction from 0": {"gradient_error": 1},
    "field gradient_error: got '1%', expected float": {"gradient_error": "1%"},
    "field extra_check: got 3": {"extra_check": 3},
    "field extra_check: got Unhashable()": {"extra_check": Unhashable()},
    "field scratch: got None": {"scratch": None},
    "field devices: got 'cpu'": {"devices": "cpu"},
}


@pytest.mark.parametrize("text", ILL_TYPED)
def test_an_ill_typed_backend_is_refused_when_it_is_made(text):
    with pytest.raises(PluginError) as caught:
        dataclasses.replace(FakeBackend("bad").spec, **ILL_TYPED[text])
    assert "backend 'bad'" in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize("text", ILL_TYPED_CAPABILITY)
def test_an_ill_typed_capability_is_refused_when_its_backend_is_made(text):
    stages = {"gqa_forward": StageSpec(Capability(**ILL_TYPED_CAPABILITY[text]), "m:f")}
    with pytest.raises(PluginError) as caught:
        BackendSpec("bad", stages)
    assert "backend 'bad', stage gqa_forward" in str(caught.value)
    assert text in str(caught.value)


def test_a_function_that_is_no_text_is_refused():
    with pytest.raises(PluginError, match="stage gqa_forward, field function: got 3, expected str"):
        BackendSpec("bad", {"gqa_forward": StageSpec(Capability(), 3)})


def test_a_backend_and_an_error_reach_another_process():
    spec = BackendSpec("x", {"gqa_forward": StageSpec(Capability(), "m:f")}, rank=3)
    for same in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert same == spec
        assert {spec: "found"}[same] == "found"
    with isolated_registry(), pytest.raises(NoBackendError) as caught:
        run_attention()
    received = pickle.loads(pickle.dumps(caught.value))
    assert str(received) == str(caught.value)
    assert received.decision == caught.value.decision


@pytest.mark.parametrize("reason", ["no workspace", None, Decline("LIMIT", "rows", "9", "8"), LookupError()])
def test_only_a_decline_is_a_reason_to_decline_at_run_time(reason):
    with pytest.raises(PluginError) as caught:
        BackendDeclined(reason)
    assert "BackendDeclined takes a Decline(DeclineCode" in str(caught.value)
