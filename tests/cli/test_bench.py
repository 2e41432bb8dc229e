"""``dsa-dispatch bench`` on the CPU: what it measures, what it refuses to count, and what it keeps."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import types

import numpy
import pytest
import torch
from cli.command import invoke, status

import dsa_dispatch as dsa
from dsa_backends.torch_dense.attention_forward import attention_forward
from dsa_dispatch._bench.case import MEASURED, Case, causal_pairs
from dsa_dispatch._bench.clock import CpuClock
from dsa_dispatch._bench.inputs import AttentionInputs, LossInputs, TopKInputs
from dsa_dispatch._bench.measure import Effort, measure
from dsa_dispatch._bench.patterns import indices_of
from dsa_dispatch._bench.peers import Peer, backend_peer, external_peer
from dsa_dispatch._bench.suites import SUITES
from dsa_dispatch.errors import ConfigError
from dsa_dispatch.testing import FakeBackend, isolated_registry

CPU = torch.device("cpu")
TINY = (
    "--device", "cpu", "--rows", 6, "--keys", 40, "--topk", 8, "--heads", 2, "--qk-channels", 24, "--v-channels", 16,
    "--index-heads", 2, "--index-channels", 16, "--dtype", "float32", "--repeats", 2, "--warmup", 1,
)  # fmt: skip


@pytest.fixture
def module():
    """A module of peers that can be named on the command line."""
    made = types.ModuleType("peers_of_a_test")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_quick_measures_every_stage_on_the_cpu_and_prints_the_table_last(registry, tmp_path):
    done = invoke("bench", "--suite", "quick", "--device", "cpu", "--repeats", 2, "--warmup", 0)
    assert done.exit_code == 0
    lines = done.stdout.rstrip("\n").splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert lines[-1] == rows[-1]
    measured = [row for row in rows if "| torch_dense |" in row]
    assert {row.split()[1] for row in measured} == set(MEASURED)
    assert len(measured) == len(list(SUITES["quick"]()))


def test_the_record_says_where_on_what_how_and_every_figure(registry, tmp_path):
    out = tmp_path / "record.json"
    done = invoke("bench", *TINY, "--stage", "attention_backward", "--commit", "abc1234", "--out", out)
    assert done.exit_code == 0
    kept = json.loads(out.read_text())
    assert kept["commit"] == "abc1234"
    assert kept["versions"]["torch"] == torch.__version__
    assert {"card", "driver", "command", "date", "product"} <= kept.keys()
    (result,) = [entry for entry in kept["results"] if entry["peer"] == "torch_dense"]
    assert result["case"]["heads"] == 2
    assert result["repeats"] == 2
    assert 0 < result["least"] <= result["median"] <= result["most"]
    assert result["tflops"] == pytest.approx(result["flops"] / result["median"] * 1e-9)
    assert result["product_tflops"] > 0


def test_a_backend_that_declines_sits_out_with_its_reason_and_no_figure(tmp_path):
    heads = {"attention_forward": dsa.Heads(values=frozenset({64}))}
    with isolated_registry(
        FakeBackend("narrow", ["attention_forward"], heads=heads["attention_forward"]).spec, installed=True
    ):
        done = invoke("bench", *TINY, "--backend", "narrow", "--backend", "torch_dense")
    assert done.exit_code == 0
    assert "narrow sat out 1 case: HEADS query.heads: got 2, supports 64" in done.stdout
    assert "| narrow" not in done.stdout
    assert "| torch_dense |" in done.stdout


def test_a_backend_that_is_not_installed_sits_out_with_the_command_that_installs_it():
    absent = FakeBackend(
        "absent", ["attention_forward"], packages=(dsa.Requirement("no-such", "no_such_module", ">=2"),)
    )
    with isolated_registry(absent.spec, installed=True):
        other, nothing = (
            invoke("bench", *TINY, "--backend", "absent", *more)
            for more in (["--backend", "torch_dense"], ["--stage", "indexer_topk"])
        )
    why = "NOT_INSTALLED package no-such: got not installed, supports >=2. pip install 'no-such>=2'."
    assert f"absent sat out 1 case: {why}" in other.stdout
    assert other.exit_code == 0
    assert "absent sat out 1 case: provides no indexer_topk" in nothing.stdout


def test_an_empty_table_is_no_success(module, registry):
    module.nothing = lambda inputs: None
    narrow = FakeBackend("narrow", ["attention_forward"], heads=dsa.Heads(values=frozenset({64})))
    dsa.register_backend(narrow.spec)
    done = invoke("bench", *TINY, "--backend", "narrow", "--peer", "absent=peers_of_a_test:nothing")
    assert done.exit_code == 1
    assert "narrow sat out 1 case: HEADS" in done.stdout
    assert "absent sat out 1 case: returned None for this case" in done.stdout
    assert "nothing was measured" in done.stderr


def test_the_defaults_of_a_case_are_in_the_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = invoke("bench", "--help").stdout.splitlines()
    for field in dataclasses.fields(Case):
        option = f"--{field.name.replace('_', '-')} "
        if field.name in ("rows", "keys", "topk", "heads", "dtype", "pattern", "index_channels"):
            (line,) = [line for line in lines if line.startswith(f"│ {option}")]
            assert f"Default: {field.default}" in line


def test_only_the_pinned_backend_earns_a_figure():
    seen = []

    def counted(*arguments, **keywords):
        seen.append("ran")
        return attention_forward(*arguments, **keywords)

    fake = FakeBackend("mine", ["attention_forward"], replace={"attention_forward": counted}, self_test=False)
    with isolated_registry(fake.spec, installed=True):
        done = invoke("bench", *TINY, "--backend", "mine")
    assert done.exit_code == 0
    # The call that finds out who serves, the warm-up, the one that asserts it, the one that sets the rounds, 2 rounds.
    assert len(seen) == 6
    assert "| mine |" in done.stdout


def test_a_backend_whose_place_another_took_has_no_figure(registry):
    def elsewhere(inputs):
        attention = backend_peer("torch_dense", frozenset({"attention_forward"})).prepare(inputs)
        return attention

    impostor = Peer("other", elsewhere, "other", frozenset({"attention_forward"}))
    (result,) = measure(small("attention_forward"), [impostor], CpuClock(), CPU, Effort(2, 0))
    assert result.state == "failed"
    assert "was to run on other, but ran on ['torch_dense']" in result.note
    assert result.median is None


def test_a_peer_is_given_the_inputs_and_what_it_returns_is_timed(module, registry):
    given = []

    def prepare(inputs):
        given.append(inputs)
        return lambda: inputs.query @ inputs.key[:, 0, 0].T

    module.prepare = prepare
    done = invoke("bench", *TINY, "--peer", "product=peers_of_a_test:prepare")
    assert done.exit_code == 0
    assert "| product     |" in done.stdout
    (inputs,) = given
    assert isinstance(inputs, AttentionInputs)
    assert inputs.query.shape == (6, 1, 2, 24)
    assert inputs.key.shape == (40, 1, 1, 24)
    assert inputs.indices.shape == (1, 6, 8)
    assert inputs.dout.shape == (6, 1, 2, 16)


def test_a_peer_that_returns_none_sits_out_and_one_that_raises_costs_only_itself(module, registry):
    def fails(inputs):
        raise RuntimeError("no kernel image")

    def exits(inputs):
        raise SystemExit(3)

    module.fails, module.exits, module.nothing = fails, exits, lambda inputs: None
    named = [f"{name}=peers_of_a_test:{made}" for name, made in
             (("bad", "fails"), ("gone", "exits"), ("absent", "nothing"))]  # fmt: skip
    done = invoke("bench", *TINY, *(part for peer in named for part in ("--peer", peer)))
    assert done.exit_code == 1
    assert "bad failed 1 case: RuntimeError: no kernel image" in done.stdout
    assert "gone failed 1 case: SystemExit: 3" in done.stdout
    assert "absent sat out 1 case: returned None for this case" in done.stdout
    assert "| torch_dense |" in done.stdout


def test_a_peer_that_fails_in_a_round_loses_its_figures_only(registry):
    calls = []

    def breaks():
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("out of memory")

    fine = backend_peer("torch_dense", frozenset({"attention_forward"}))
    results = measure(
        small("attention_forward"), [Peer("breaks", lambda _: breaks), fine], CpuClock(), CPU, Effort(6, 1)
    )
    assert [(result.peer, result.state) for result in results] == [
        ("torch_dense", "measured"),
        ("breaks", "failed"),
    ]
    assert results[0].repeats == 6


def test_peers_take_turns_round_by_round():
    order = []
    peers = [Peer(name, lambda _, name=name: lambda: order.append(name)) for name in "abc"]
    measure(small("attention_forward"), peers, CpuClock(), CPU, Effort(repeats=4, warmup=0))
    assert order[-12:] == ["a", "b", "c"] * 4


def test_a_slow_peer_gets_fewer_rounds():
    class Slow(CpuClock):
        def once(self, call):
            call()
            return 3000.0

    peers = [Peer("slow", lambda _: lambda: None)]
    (result,) = measure(small("attention_forward"), peers, Slow(), CPU, Effort(20, 0, seconds=10))
    assert result.repeats == 3
    (result,) = measure(small("attention_forward"), peers, Slow(), CPU, Effort(20, 0, seconds=1))
    assert result.repeats == 1


@pytest.mark.parametrize("stage", MEASURED)
def test_each_stage_makes_the_inputs_and_runs_the_stages_it_names(stage, registry):
    dsa.reset_stats()
    peer = backend_peer("torch_dense", frozenset(small(stage).stages))
    (result,) = measure(small(stage), [peer], CpuClock(), CPU, Effort(1, 0))
    assert (result.state, result.repeats) == ("measured", 1)
    for name in small(stage).stages:
        assert set(dsa.stats().ran(name)) == {"torch_dense"}
    # Loss and backward are given their selection: its time is not theirs.
    assert ("indexer_topk" in {key[0] for key in dsa.stats().runs}) == (stage == "indexer_topk")


def test_a_backend_of_the_loss_alone_is_measured_beside_the_teacher_of_another():
    fake = FakeBackend("lossy", ["indexer_loss"], self_test=False)
    with isolated_registry(fake.spec, installed=True):
        peer = backend_peer("lossy", frozenset({"indexer_loss"}))
        (result,) = measure(small("indexer_loss"), [peer], CpuClock(), CPU, Effort(1, 0))
        ran = {key[:2] for key in dsa.stats().runs}
    assert result.state == "measured"
    assert {("indexer_loss", "lossy"), ("indexer_target", "torch_dense")} <= ran


def small(stage, **changes):
    sizes = {"keys": 40, "topk": 8, "heads": 2, "qk_channels": 24, "v_channels": 16, "index_heads": 2,
             "index_channels": 16, "dtype": "float32"}  # fmt: skip
    return Case(stage, rows=6, **{**sizes, **changes})


def test_loss_and_topk_peers_are_given_the_inputs_of_their_stage():
    kinds = {}

    def prepare(inputs):
        kinds[inputs.case.stage] = inputs
        return lambda: None

    for stage in ("indexer_topk", "indexer_loss"):
        measure(small(stage), [Peer("any", prepare)], CpuClock(), CPU, Effort(1, 0))
    assert isinstance(kinds["indexer_topk"], TopKInputs)
    assert kinds["indexer_topk"].weights.shape == (6, 1, 2)
    assert isinstance(kinds["indexer_loss"], LossInputs)
    assert kinds["indexer_loss"].attention.indices.shape == (1, 6, 8)


def test_the_arithmetic_counted_is_that_of_the_matrix_products():
    wide = Case("attention_forward", rows=4096, topk=2048, heads=64)
    assert wide.flops == 2 * 4096 * 64 * 2048 * (576 + 512)
    back = Case("attention_backward", rows=4096, topk=2048, heads=64)
    assert back.flops == 2 * 4096 * 64 * 2048 * (3 * 576 + 2 * 512)
    topk = Case("indexer_topk", rows=3, keys=5, index_heads=2, index_channels=10)
    assert topk.flops == 2 * 2 * 10 * (3 + 4 + 5)
    loss = Case("indexer_loss", rows=2, topk=4, heads=3, qk_channels=7, index_heads=2, index_channels=10)
    assert loss.flops == 2 * 2 * 4 * 3 * 7 + 3 * 2 * 2 * 4 * 2 * 10


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (4, 9), (9, 4), (5, 5)])
def test_causal_pairs_are_the_ones_of_the_mask(rows, keys):
    mask = torch.ones(rows, keys).tril(keys - rows)
    assert causal_pairs(rows, keys) == int(mask.sum())


def test_a_local_pattern_has_window_sinks_and_a_rest_that_neighbours_share():
    case = Case("attention_forward", rows=64, keys=8192, pattern="local")
    ids = indices_of(case, CPU)
    assert ids.shape == (64, 2048)
    assert ids.dtype == torch.int32
    assert ((ids >= 0) & (ids < 8192)).all()
    rows = [set(row.tolist()) for row in ids]
    assert all(len(row) == 2048 for row in rows)
    shared = [len(one & other) / 2048 for one, other in itertools.pairwise(rows)]
    assert sum(shared) / len(shared) == pytest.approx(0.83, abs=0.01)
    for row, keys in enumerate(rows):
        position = 8192 - 64 + row
        assert set(range(64)) <= keys
        assert set(range(position - 511, position + 1)) <= keys


@pytest.mark.parametrize("pattern", ["random", "local"])
def test_ids_are_distinct_and_the_same_in_every_run_even_where_nearly_all_keys_are_chosen(pattern):
    case = small("attention_forward", keys=9, topk=8, pattern=pattern)
    ids = indices_of(case, CPU)
    assert all(len(set(row.tolist())) == 8 for row in ids)
    assert torch.equal(ids, indices_of(case, CPU))


@pytest.mark.parametrize("kind", [".pt", ".npy"])
def test_ids_may_come_from_a_file(kind, tmp_path, registry):
    path = tmp_path / f"ids{kind}"
    ids = torch.arange(48).reshape(1, 6, 8) % 40
    torch.save(ids, path) if kind == ".pt" else numpy.save(path, ids.numpy())
    assert torch.equal(indices_of(small("attention_forward", pattern=str(path)), CPU), ids[0].int())
    done = invoke("bench", *TINY, "--pattern", path)
    assert done.exit_code == 0
    with pytest.raises(
        ConfigError, match="holds ids for 6 rows of 8, the case has 6 of 4; give --rows 6 --topk 8"
    ):
        indices_of(small("attention_forward", topk=4, pattern=str(path)), CPU)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.zeros(6, 8), "got torch.float32"),
        ({"ids": torch.zeros(6, 8)}, "holds a dict, expected one tensor"),
        (torch.zeros(48, dtype=torch.int64), r"of shape \(48,\)"),
    ],
)
def test_a_file_that_holds_no_ids_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "ids.pt")
    with pytest.raises(ConfigError, match=message):
        indices_of(small("attention_forward", pattern=str(tmp_path / "ids.pt")), CPU)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "h100"], "--suite: got 'h100', supports quick, h200. Did you mean 'h200'?"),
        (["--stage", "attention"], "--stage: got 'attention', supports attention_forward"),
        (["--suite", "quick", "--rows", "5"], "has sizes of its own: leave out --rows, or leave out --suite"),
        (["--backend", "nosuch"], "--backend: unknown backend 'nosuch'; registered: "),
        (["--device", "tpu"], "--device: got 'tpu', supports cpu, cuda and cuda:N"),
        (["--device", "cuda:99"], "CUDA devices here"),
        (["--peer", "name"], "--peer: got 'name', expected NAME=module:function"),
        (["--peer", "a=no_such_module:f"], "Is its folder on PYTHONPATH?"),
        (["--peer", "a=raises_at_import:f"], "the import of raises_at_import raised RuntimeError: no driver"),
        (["--peer", "a=math:pi"], "--peer a=math:pi: math:pi is a float, expected a function"),
        (["--peer", "torch_dense=math:sqrt"], "torch_dense would stand for two"),
        (["--pattern", "zigzag"], "supports random, local, or a .pt or .npy file of ids"),
        (["--pattern", "gone.npy"], "gone.npy: No such file or directory"),
        (["--keys", "4", "--topk", "8"], "8 distinct keys of 4 cannot be chosen"),
        (["--out", "no/such/folder/record.json"], "there is no folder 'no/such/folder'"),
    ],
)
def test_what_cannot_be_meant_ends_with_2_and_one_line(
    monkeypatch, capsys, registry, tmp_path, arguments, message
):
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('no driver')\n")
    monkeypatch.syspath_prepend(tmp_path)
    if "--device" not in arguments:
        arguments = ["--device", "cpu", *arguments]
    assert status(monkeypatch, "bench", *arguments) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


def test_a_suite_can_be_cut_to_stages_and_given_another_pattern(registry):
    done = invoke("bench", "--suite", "quick", "--device", "cpu", "--stage", "attention_forward",
                  "--pattern", "local", "--repeats", 1, "--warmup", 0)  # fmt: skip
    assert done.exit_code == 0
    rows = [line for line in done.stdout.splitlines() if "| torch_dense |" in line]
    assert [row.split()[1] for row in rows] == ["attention_forward"]
    assert "local" in rows[0]


def test_an_external_peer_must_return_a_call(registry, module):
    module.wrong = lambda inputs: 3
    (result,) = measure(
        small("attention_forward"),
        [external_peer("wrong=peers_of_a_test:wrong")],
        CpuClock(),
        CPU,
        Effort(1, 0),
    )
    assert result.state == "failed"
    assert "returned a int, expected a call without arguments or None" in result.note
