"""Policies, counters and registrations of several threads at once."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from unit.calls import attention, chosen, plan_attention

import dsa_dispatch
from dsa_dispatch import explain, register_backend, stats, unregister_backend, use_backend
from dsa_dispatch._runtime import Runtime, swapped
from dsa_dispatch.testing import FakeBackend, isolated_registry

THREADS = 4


@pytest.fixture(autouse=True)
def _switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*jobs):
    """Run the jobs at once; their results in order, their first exception raised."""
    start = threading.Barrier(len(jobs))

    def released(job):
        start.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(released, jobs))


def test_threads_with_different_policies_do_not_disturb_each_other():
    names = [f"backend{index}" for index in range(THREADS)]
    fakes = {name: FakeBackend(name, ("attention_forward",)) for name in names}
    operands = attention()

    def job(name):
        def run():
            for turn in range(60):
                with use_backend(name, fallback="error"):
                    dsa_dispatch.run_fused_absorbed_sparse_attention(None, *operands)
                    if turn % 10 == 0:
                        said = explain("run_fused_absorbed_sparse_attention", None, *operands)
                        assert said.backends() == {"attention_forward": name}

        return run

    with isolated_registry(*(fake.spec for fake in fakes.values())):
        together(*map(job, names))
        assert stats().ran("attention_forward") == dict.fromkeys(names, 60)
    assert {name: len(fake.calls) for name, fake in fakes.items()} == dict.fromkeys(names, 60)


def test_one_block_object_may_be_open_in_several_threads():
    with isolated_registry(FakeBackend("a").spec, FakeBackend("b", rank=9).spec):
        block = use_backend("a")

        def job():
            for _ in range(200):
                with block:
                    assert chosen() == "a"
                assert chosen() == "b"

        together(*[job] * THREADS)


def test_a_new_thread_begins_without_the_blocks_of_the_one_that_started_it():
    with isolated_registry(FakeBackend("a").spec, FakeBackend("b", rank=9).spec), use_backend("a"):
        assert together(chosen) == ["b"]
        assert chosen() == "a"


def test_configure_holds_in_every_thread():
    with isolated_registry(FakeBackend("a").spec, FakeBackend("b", rank=9).spec):
        dsa_dispatch.configure({"dsa_kernel_backend": "a"})
        assert together(chosen, chosen) == ["a", "a"]


def test_counters_are_exact():
    with isolated_registry(FakeBackend("fake").spec):

        def job():
            for _ in range(500):
                plan_attention()

        together(*[job] * THREADS)
        assert stats().decisions == {"run_fused_absorbed_sparse_attention": 500 * THREADS}
        assert 1 <= stats().misses["run_fused_absorbed_sparse_attention"] <= THREADS


def test_backends_registered_at_once_are_all_there():
    with isolated_registry() as runtime:
        together(*(lambda name=f"b{index}": register_backend(FakeBackend(name).spec) for index in range(16)))
        assert sorted(runtime.snapshot.backends) == sorted(f"b{index}" for index in range(16))


def test_calls_go_on_while_backends_come_and_go():
    passing = FakeBackend("passing", rank=9, self_test=True)
    stop = threading.Event()

    def register():
        try:
            for _ in range(60):
                register_backend(passing.spec)
                unregister_backend("passing")
        finally:
            stop.set()

    def call():
        seen = set()
        while not stop.is_set():
            seen.add(chosen())
        return seen

    with isolated_registry(FakeBackend("staying").spec):
        _, *seen = together(register, call, call)
        assert set().union(*seen) <= {"passing", "staying"}
        assert chosen() == "staying"


def test_a_stage_is_tested_once_however_many_threads_ask_first():
    fake = FakeBackend("fake", self_test=True)
    with isolated_registry(fake.spec):
        together(*[chosen] * THREADS)
    assert len(fake.calls) == 1


def test_plugins_are_loaded_once_however_many_threads_come_first(monkeypatch):
    from dsa_dispatch import _runtime

    loads = []
    load = _runtime.load_plugins
    monkeypatch.setattr(_runtime, "load_plugins", lambda snapshot: loads.append(1) or load(snapshot))
    with swapped(Runtime()):
        together(*[chosen] * THREADS)
    assert len(loads) == 1
