"""Can a backend be used here: metadata first, then the import, then a self-test that wrong kernels do not pass."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import sys
from types import ModuleType

import pytest
import torch
from unit.calls import CPU, attention, chosen, run_attention

import dsa_dispatch
from dsa_dispatch import (
    AnyOf,
    BackendSpec,
    Capability,
    Channels,
    Decline,
    DeclineCode,
    Heads,
    IndexWidth,
    Requirement,
    StageSpec,
    capability_matrix,
    list_backends,
)
from dsa_dispatch._dispatch.check import legalize
from dsa_dispatch._registry import availability, selftest
from dsa_dispatch._registry.availability import probe, resolve_reference
from dsa_dispatch._registry.packages import forget_packages
from dsa_dispatch._runtime import current
from dsa_dispatch._stages import STAGES
from dsa_dispatch.errors import NoBackendError, PluginError
from dsa_dispatch.testing import FakeBackend, isolated_registry

BOOBY_TRAP = "raise RuntimeError('imported')\n"


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A top-level module that is found and must not be imported."""
    (tmp_path / "trapped_kernels.py").write_text(BOOBY_TRAP)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return "trapped_kernels"


def needing(*packages, name="needy", function="trapped_kernels:f", rank=1):
    return BackendSpec(
        name, {"attention_forward": StageSpec(Capability(packages=packages), function)}, rank=rank
    )


def declined(spec, **sizes):
    """Why ``spec`` does not serve a small attention."""
    with isolated_registry(spec), pytest.raises(NoBackendError) as caught:
        run_attention(**sizes)
    (candidate,) = caught.value.decision.stages[0].candidates
    return [str(decline) for decline in candidate.declines]


def test_a_missing_package_is_declined_by_metadata_with_the_way_to_get_it():
    missing = Requirement("no-such-dist", "no_such_module", ">=1,<2")
    hinted = dataclasses.replace(missing, distribution="other", hint="Build it from source.")
    assert declined(needing(missing)) == [
        "NOT_INSTALLED package no-such-dist: got not installed, supports >=1,<2. pip install 'no-such-dist>=1,<2'."
    ]
    assert declined(needing(hinted)) == [
        "NOT_INSTALLED package other: got not installed, supports >=1,<2. Build it from source."
    ]


def test_several_missing_packages_are_one_decline_with_one_command():
    missing = Requirement("no-such-dist", "no_such_module", ">=1", extras="cu13")
    others = (Requirement("second", "no_second"), Requirement("third", "no_third", hint="Build third."))
    assert declined(needing(missing, *others)) == [
        "NOT_INSTALLED packages no-such-dist, second, third: got not installed, supports >=1; any version; "
        "any version. pip install 'no-such-dist[cu13]>=1' 'second'. Build third."
    ]


def test_a_missing_and_a_wrong_package_are_two_declines_with_the_same_command():
    found = importlib.metadata.version("pluggy")
    command = "pip install 'pluggy>=99' 'second'."
    assert declined(needing(Requirement("pluggy", "pluggy", ">=99"), Requirement("second", "no_second"))) == [
        f"VERSION package pluggy: got {found}, supports >=99. {command}",
        f"NOT_INSTALLED package second: got not installed, supports any version. {command}",
    ]


def test_a_package_whose_module_is_not_on_the_path_says_so():
    found = importlib.metadata.version("pluggy")
    hidden = Requirement("pluggy", "no_such_module", path_hint="Put it on the path.")
    assert declined(needing(hidden)) == [
        f"NOT_INSTALLED package pluggy: got {found}, but no module no_such_module on the path, supports any version. "
        "Put it on the path."
    ]


FIRST, SECOND = Requirement("first", "no_first"), Requirement("second", "no_second", ">=2")


def test_one_of_several_packages_is_enough():
    present = Requirement("pluggy", "pluggy")
    for alternatives in ((present, FIRST), (FIRST, present)):
        spec = needing(AnyOf(alternatives))
        assert availability.installation_declines(spec, "attention_forward") == ()


def test_where_none_of_several_packages_is_installed_all_are_named():
    assert declined(needing(AnyOf((FIRST, dataclasses.replace(SECOND, versions="")), hint="Build one."))) == [
        "NOT_INSTALLED package first or second: got none of them installed, supports any one of them. Build one."
    ]
    assert declined(needing(AnyOf((FIRST, SECOND)))) == [
        "NOT_INSTALLED package first or second: got none of them installed, supports first any version or second >=2. "
        "pip install 'first'."
    ]


def test_where_one_of_several_packages_has_another_version_that_is_the_reason():
    found = importlib.metadata.version("pluggy")
    (text,) = declined(needing(AnyOf((FIRST, Requirement("pluggy", "pluggy", ">=99")))))
    assert text.startswith(
        f"VERSION package first or pluggy: got pluggy {found}, supports first any version or "
    )


def test_a_package_of_another_version_is_declined_by_metadata():
    found = importlib.metadata.version("pluggy")
    assert declined(needing(Requirement("pluggy", "pluggy", ">=99"))) == [
        f"VERSION package pluggy: got {found}, supports >=99. pip install 'pluggy>=99'."
    ]


def test_a_module_without_metadata_is_taken_as_it_is(trap):
    (text,) = declined(needing(Requirement("trapped-kernels", trap, ">=99")))
    assert text.startswith("IMPORT_FAILED")


def test_a_module_that_was_put_there_without_a_spec_is_there(monkeypatch):
    bare = ModuleType("bare_module")
    bare.__spec__ = None
    monkeypatch.setitem(sys.modules, "bare_module", bare)
    forget_packages()
    assert (
        availability.installation_declines(needing(Requirement("bare", "bare_module")), "attention_forward")
        == ()
    )


def test_metadata_imports_nothing(trap):
    spec = needing(Requirement("trapped-kernels", trap), Requirement("x", f"{trap}.deep.module"))
    with isolated_registry(spec):
        (info,) = list_backends()
        assert info.installed
        assert "ready" in capability_matrix().to_text()
        current().snapshot.fingerprint()
        call = dsa_dispatch.CallSpec("run_fused_absorbed_sparse_attention")
        dsa_dispatch.explain(call.operation, call=call, device=dsa_dispatch.DeviceInfo())
        assert trap not in sys.modules


def test_a_failing_import_is_a_decline_with_its_traceback_kept(trap):
    spec = needing()
    assert declined(spec) == [
        "IMPORT_FAILED trapped_kernels:f: got RuntimeError: imported, supports an import and a self-test that pass. "
        "`dsa-dispatch doctor` shows the traceback."
    ]
    with isolated_registry(spec) as runtime:
        found = probe(runtime, spec, "attention_forward", CPU)
    assert "trapped_kernels.py" in found.traceback
    assert found.function is None


@pytest.mark.parametrize("function", ["no_such_module_anywhere:f", "math:no_such_function"])
def test_a_reference_to_nothing_is_an_import_that_failed(function):
    (text,) = declined(needing(function=function))
    assert text.startswith(f"IMPORT_FAILED {function}: got ")


class Ended(BaseException):
    """As a test framework's skip, no ``Exception``."""


ENDS = {
    "exit": ("raise SystemExit('no licence')", "SystemExit: no licence"),
    "generator": ("raise GeneratorExit", "GeneratorExit"),
    "skip": ("import pytest\npytest.skip('not here', allow_module_level=True)", "Skipped: not here"),
    "no text": (
        "class Odd(BaseException):\n    def __str__(self): return 1 / 0\nraise Odd",
        "Odd: (its text cannot be shown)",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_an_import_that_would_end_the_process_is_a_decline(case, tmp_path, monkeypatch):
    source, got = ENDS[case]
    (tmp_path / "trapped_kernels.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    (text,) = declined(needing())
    assert text.startswith(f"IMPORT_FAILED trapped_kernels:f: got {got}, supports an import and a self-test")
    with isolated_registry(needing(), FakeBackend("fake").spec) as runtime:
        assert chosen() == "fake"
        assert "trapped_kernels.py" in probe(runtime, needing(), "attention_forward", CPU).traceback


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), Ended("not here")])
def test_a_self_test_that_would_end_the_process_is_a_decline_and_a_call_that_does_is_not_caught(error):
    tested = FakeBackend("tested", ("attention_forward",), rank=1, raises=error, self_test=True)
    with isolated_registry(tested.spec, FakeBackend("fake").spec) as runtime:
        assert chosen() == "fake"
        (decline,) = probe(runtime, tested.spec, "attention_forward", CPU).declines
    assert decline.code is DeclineCode.SELF_TEST_FAILED
    assert decline.got.startswith(type(error).__name__)
    trusted = FakeBackend("trusted", ("attention_forward",), rank=1, raises=error)
    with isolated_registry(trusted.spec, FakeBackend("fake").spec), pytest.raises(type(error)) as caught:
        run_attention()
    assert caught.value is error


@pytest.mark.parametrize(("answer", "got"), [(None, "None"), (3, "3"), (b"1.0", "b'1.0'")])
def test_a_provider_that_returns_no_text_is_a_decline(monkeypatch, answer, got):
    provider = "provider_of_tests:name"
    module = ModuleType("provider_of_tests")
    module.name = lambda: answer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    fake = FakeBackend("fake", ("attention_forward",)).spec
    stages = {stage: dataclasses.replace(spec, provider=provider) for stage, spec in fake.stages.items()}
    (text,) = declined(dataclasses.replace(fake, stages=stages))
    assert text.startswith(
        f"IMPORT_FAILED {provider}: got PluginError: {provider} returned {got}, expected a text that names what runs,"
    )


def test_a_reference_to_what_is_no_function_is_a_decline():
    (text,) = declined(needing(function="math:pi"))
    assert text.startswith("IMPORT_FAILED math:pi: got PluginError: math:pi is a float, expected a function,")


def test_a_failing_provider_name_is_a_decline():
    fake = FakeBackend("fake").spec
    broken = {
        stage: dataclasses.replace(spec, provider="math:no_such_function")
        for stage, spec in fake.stages.items()
    }
    (text,) = declined(dataclasses.replace(fake, stages=broken))
    assert text.startswith("IMPORT_FAILED")


def test_a_forced_backend_does_not_probe_the_others(trap):
    fake = FakeBackend("fake", self_test=True)
    for config in (
        {"dsa_kernel_backend": "fake"},
        {"dsa_kernel_backend": "fake", "dsa_kernel_fallback": "error"},
    ):
        with isolated_registry(needing(name="trap", rank=9), fake.spec) as runtime:
            run_attention(config)
            assert {name for name, *_ in runtime.availability} == {"fake"}


def test_a_backend_that_is_not_needed_is_not_probed():
    first, second = FakeBackend("first", rank=2, self_test=True), FakeBackend("second", self_test=True)
    with isolated_registry(first.spec, second.spec):
        run_attention()
    assert first.calls
    assert not second.calls


def test_a_stage_is_tested_once_per_device_and_only_itself():
    fake = FakeBackend("fake", self_test=True)
    with isolated_registry(fake.spec) as runtime:
        for rows in (3, 4):
            run_attention(rows=rows)
            run_attention({"query_chunk": 1}, rows=rows)
        assert set(runtime.availability) == {("fake", "attention_forward", "cpu")}
    assert fake.stages_called() == {"attention_forward"}


def test_a_probe_that_fails_moves_on_to_the_next(trap):
    with isolated_registry(needing(name="trap", rank=9), FakeBackend("fake").spec):
        assert chosen() == "fake"


def test_an_interrupt_during_a_probe_is_not_swallowed():
    fake = FakeBackend("fake", raises=KeyboardInterrupt(), self_test=True)
    with isolated_registry(fake.spec), pytest.raises(KeyboardInterrupt):
        run_attention()


def reference(stage):
    from dsa_backends.torch_dense.spec import SPEC

    return resolve_reference(SPEC.stages[stage].function)


def base_two(*args, **kwargs):
    out, lse = reference("attention_forward")(*args, **kwargs)
    return out, lse / 0.6931471805599453


def hole_is_key_zero(q, kv, indices, length, **kwargs):
    return reference("attention_forward")(q, kv, indices.clamp(min=0), length, **kwargs)


def ignores_length(q, kv, indices, length, **kwargs):
    whole = torch.full_like(length, indices.shape[1])
    return reference("attention_forward")(q, kv, indices, whole, **kwargs)


def nan_for_an_empty_row(*args, **kwargs):
    out, lse = reference("attention_forward")(*args, **kwargs)
    return out.masked_fill(lse.isinf()[..., None], torch.nan), lse


def finite_lse_for_an_empty_row(*args, **kwargs):
    out, lse = reference("attention_forward")(*args, **kwargs)
    return out, lse.clamp(min=-1e30)


def mean_for_an_empty_row(*args, **kwargs):
    out, lse = reference("attention_forward")(*args, **kwargs)
    return out.masked_fill(lse.isinf()[..., None], 1.0), lse


def duplicates_count_once(q, kv, indices, length, **kwargs):
    indices = indices.clone()
    indices[:, 1:][indices[:, 1:] == indices[:, :1]] = -1
    return reference("attention_forward")(q, kv, indices, length, **kwargs)


def scale_left_out(*args, scale, **kwargs):
    return reference("attention_forward")(*args, scale=1.0, **kwargs)


def wrong_shape(*args, **kwargs):
    out, lse = reference("attention_forward")(*args, **kwargs)
    return out, lse.transpose(0, 1)


def overwritten(*args, dkv, **kwargs):
    fresh = torch.zeros_like(dkv)
    dq = reference("attention_backward")(*args, dkv=fresh, **kwargs)
    dkv.copy_(fresh)
    return dq


def last_writer_wins(*args, dkv, **kwargs):
    before = dkv.clone()
    dq = reference("attention_backward")(*args, dkv=dkv, **kwargs)
    dkv[1] = before[1] + (dkv[1] - before[1]) / 2
    return dq


def no_dq(*args, **kwargs):
    return torch.zeros_like(reference("attention_backward")(*args, **kwargs))


def no_dkv(*args, dkv, **kwargs):
    return reference("attention_backward")(*args, dkv=dkv.clone(), **kwargs)


def no_dw(*args, **kwargs):
    terms = reference("indexer_loss")(*args, **kwargs)
    return terms._replace(dw=terms.dw * 0)


def grouped_overwritten(*args, dv, **kwargs):
    fresh = torch.zeros_like(dv)
    dq = reference("gqa_backward")(*args, dv=fresh, **kwargs)
    dv.copy_(fresh)
    return dq


def higher_index_first(q, k, w, starts, ends, *, rows, topk, **kwargs):
    flipped = reference("indexer_topk")(
        q,
        k.flip(0),
        w,
        rows.keys - ends,
        rows.keys - starts,
        rows=dataclasses.replace(rows, bounds="ranges"),
        topk=topk,
        **kwargs,
    )
    ids = torch.where(flipped[0] >= 0, rows.keys - 1 - flipped[0], -1)
    return ids.to(torch.int32), flipped[1]


def ignores_bounds(q, k, w, starts, ends, *, rows, **kwargs):
    rows = dataclasses.replace(rows, bounds="ranges")
    return reference("indexer_topk")(
        q, k, w, torch.zeros_like(starts), torch.full_like(ends, rows.keys), rows=rows, **kwargs
    )


def not_a_prefix(*args, **kwargs):
    ids, length = reference("indexer_topk")(*args, **kwargs)
    return ids.flip(1), length


def one_too_few(*args, **kwargs):
    ids, length = reference("indexer_topk")(*args, **kwargs)
    return ids, (length - 1).clamp(min=0)


def wide_ids(*args, **kwargs):
    ids, length = reference("indexer_topk")(*args, **kwargs)
    return ids.long(), length


def mean_over_heads(*args, **kwargs):
    return reference("indexer_target")(*args, **kwargs) / 2


def loss_overwrites(*args, dk, **kwargs):
    fresh = torch.zeros_like(dk)
    terms = reference("indexer_loss")(*args, dk=fresh, **kwargs)
    dk.copy_(fresh)
    return terms


def loss_in_bits(*args, **kwargs):
    terms = reference("indexer_loss")(*args, **kwargs)
    return terms._replace(kl=terms.kl / 0.6931471805599453)


WRONG = {
    "attention_forward": [
        base_two,
        hole_is_key_zero,
        ignores_length,
        nan_for_an_empty_row,
        finite_lse_for_an_empty_row,
        mean_for_an_empty_row,
        duplicates_count_once,
        scale_left_out,
        wrong_shape,
    ],
    "attention_backward": [overwritten, last_writer_wins, no_dq, no_dkv],
    "gqa_backward": [grouped_overwritten],
    "indexer_topk": [higher_index_first, ignores_bounds, not_a_prefix, one_too_few, wide_ids],
    "indexer_target": [mean_over_heads],
    "indexer_loss": [loss_overwrites, loss_in_bits, no_dw],
}


@pytest.mark.parametrize(
    ("stage", "wrong"),
    [(stage, wrong) for stage, functions in WRONG.items() for wrong in functions],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("large", [False, True], ids=["first use", "check"])
def test_a_wrong_kernel_does_not_pass(stage, wrong, large):
    # Two heads, since some faults show only where heads are summed or ordered.
    changes = {"tie_rule": "lower_index", "heads": Heads(minimum=2), "deterministic": True}
    backend = FakeBackend("wrong", (stage,), replace={stage: wrong}, self_test=True, **changes)
    capability = backend.spec.stages[stage].capability
    if large:
        tolerance = selftest.TOLERANCE["float32"]
        try:
            errors = selftest.measure(wrong, capability, stage, CPU, "float32", large=True)
        except selftest.SelfTestError:
            return
        assert max(errors.values()) > tolerance
        return
    with isolated_registry(backend.spec) as runtime:
        found = probe(runtime, backend.spec, stage, CPU)
    assert [decline.code.value for decline in found.declines] == ["SELF_TEST_FAILED"]
    assert found.function is None
    assert "SelfTestError" in found.traceback


def test_a_wrong_kernel_is_never_the_one_that_runs():
    wrong = FakeBackend(
        "wrong", ("attention_forward",), replace={"attention_forward": base_two}, rank=9, self_test=True
    )
    right = FakeBackend("right", self_test=True)
    with isolated_registry(wrong.spec, right.spec):
        run_attention()
        assert dsa_dispatch.stats().ran("attention_forward") == {"right": 1}
        decision = dsa_dispatch.explain("run_fused_absorbed_sparse_attention", None, *attention())
    text = decision.to_text()
    assert "wrong: SELF_TEST_FAILED wrong attention_forward on cpu: got SelfTestError: lse" in text
    assert "`dsa-dispatch doctor` shows the traceback." in text


def test_an_arbitrary_tie_order_passes_where_it_is_declared():
    backend = FakeBackend(
        "loose",
        ("indexer_topk",),
        replace={"indexer_topk": higher_index_first},
        tie_rule="arbitrary",
        self_test=True,
    )
    with isolated_registry(backend.spec) as runtime:
        assert probe(runtime, backend.spec, "indexer_topk", CPU).declines == ()


NARROW = {
    "everything": {},
    "a set of heads": {"heads": Heads(values=frozenset({64, 128}))},
    "powers of two": {"heads": Heads(power_of_two=True, minimum=16, pad=True)},
    "odd multiples": {"heads": Heads(multiple_of=6, minimum=4), "kv_heads": Heads(multiple_of=4)},
    "a pair of channels": {"channels": Channels(pairs=((576, 512),), pad=True)},
    "indexer channels": {"channels": Channels(pairs=((128, 0),))},
    "multiples of channels": {"channels": Channels(multiple_of=24)},
    "few channels": {"channels": Channels(multiple_of=4, maximum=14)},
    "multiples of width": {"width": IndexWidth(multiple_of=64, pad=True)},
    "powers of width": {"width": IndexWidth(power_of_two=True, multiple_of=4)},
    "holes": {"index_form": "holes"},
    "prefix": {"index_form": "prefix"},
    "prefix and width": {"index_form": "prefix", "width": IndexWidth(multiple_of=8)},
    "bfloat16": {"dtypes": frozenset({"bfloat16"})},
    "half with wide weights": {"dtypes": frozenset({"float16"}), "weights_dtypes": frozenset({"float32"})},
    "float64": {"dtypes": frozenset({"float64"})},
    "causal": {"bounds": frozenset({"causal"})},
    "packed": {"layouts": frozenset({"thd"})},
    "no relu": {"relu": frozenset({False})},
    "dense": {"losses": frozenset({"dense"})},
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("narrow", NARROW)
def test_a_right_kernel_passes_behind_any_declared_capability(stage, narrow):
    """The self-test keeps inside what is declared: else a good backend would be refused at first use."""
    seen = []

    def strict(*args, **kwargs):
        seen.append((args, kwargs))
        return reference(stage)(*args, **kwargs)

    backend = FakeBackend("narrow", (stage,), replace={stage: strict}, self_test=True, **NARROW[narrow])
    with isolated_registry(backend.spec) as runtime:
        assert probe(runtime, backend.spec, stage, CPU).declines == ()
    capability = backend.spec.stages[stage].capability
    for args, kwargs in seen:
        _inside(capability, stage, args, kwargs)


def _inside(capability, stage, args, kwargs):
    rows, heads, channels = args[0].shape
    assert capability.heads.runs(heads)
    assert capability.channels.fit(channels, None) == channels
    assert str(args[0].dtype).removeprefix("torch.") in capability.dtypes
    assert kwargs["rows"].bounds in capability.bounds or stage.startswith(("attention", "gqa"))
    assert kwargs["rows"].layout in capability.layouts
    assert kwargs["rows"].rows == rows
    if stage.startswith("gqa"):
        assert capability.kv_heads.runs(args[1].shape[1])
        assert heads % args[1].shape[1] == 0
    if stage in ("indexer_topk", "indexer_loss"):
        assert str(args[2].dtype).removeprefix("torch.") in capability.weights_dtypes
        assert kwargs["use_relu"] in capability.relu
    indices = kwargs.get("indices")
    if stage.startswith("attention"):
        indices, length = args[2], args[3]
    elif stage.startswith("gqa"):
        indices, length = args[3], args[4]
    else:
        length = kwargs.get("length")
    if indices is not None:
        assert capability.width.fit(indices.shape[1]) == indices.shape[1]
        if capability.index_form == "prefix":
            slots = torch.arange(indices.shape[1])
            assert torch.equal(indices >= 0, slots < length[:, None])


@pytest.mark.parametrize("stage", STAGES)
def test_the_reference_passes_its_self_test(registry, stage):
    spec = registry.snapshot.backends["torch_dense"].spec
    found = probe(registry, spec, stage, CPU)
    assert found.declines == ()
    assert found.function is reference(stage)


def test_a_contradictory_capability_is_refused_and_not_an_endless_search():
    capability = Capability(heads=Heads(power_of_two=True, multiple_of=48))
    with pytest.raises(PluginError, match=r"field heads: got Heads\(.*, which no count satisfies"):
        FakeBackend("odd", {"attention_forward": capability})
    assert legalize(capability, "attention_forward", dsa_dispatch.CallSpec("")).heads == (1, 1)


def test_a_backend_that_declines_while_it_is_probed_gives_its_own_reason():
    reason = Decline(
        DeclineCode.VERSION, "provider", "torch 2.11", "torch 2.13", "Install the other release."
    )
    backend = FakeBackend("picky", ("attention_forward",), declines=reason, self_test=True)
    with isolated_registry(backend.spec) as runtime:
        assert probe(runtime, backend.spec, "attention_forward", CPU).declines == (reason,)
