"""``use_backend`` around code that does not nest: generators closed early, late or elsewhere, one object used twice."""

from __future__ import annotations

import contextvars
from concurrent.futures import ThreadPoolExecutor

import pytest

from dsa_dispatch import use_backend
from dsa_dispatch._policy.control import _LAYERS
from dsa_dispatch._policy.policy import CONTEXT
from dsa_dispatch.errors import ConfigError
from dsa_dispatch.testing import FakeBackend, isolated_registry


@pytest.fixture(autouse=True)
def names():
    """The policy of a test is its own: a failing one must not leave a block open for the next."""
    with isolated_registry(*(FakeBackend(name).spec for name in ("one", "two", "three"))):
        yield
    CONTEXT.set("")
    _LAYERS.set(())


def in_force():
    return CONTEXT.get()


def named(backend):
    return f"dsa_kernel_backend:{backend}"


def holding(backend, **settings):
    with use_backend(backend, **settings):
        yield
        yield


def opened(*arguments, **settings):
    generator = holding(*arguments, **settings)
    next(generator)
    return generator


def test_a_generator_closed_inside_a_later_block_leaves_that_block_in_force():
    generator = opened("one")
    with use_backend("two"):
        generator.close()
        assert in_force() == named("two")
    assert in_force() == ""


def test_a_block_left_late_takes_what_others_inherited_from_it_along():
    generator = opened("one", fallback="error")
    with use_backend(query_chunk=8), use_backend("two"):
        assert in_force() == named("two") + "|dsa_kernel_fallback:error|query_chunk:8"
        generator.close()
        assert in_force() == named("two") + "|query_chunk:8"
    assert in_force() == ""


def test_a_generator_outlives_the_block_it_was_opened_in():
    with use_backend("two", query_chunk=8):
        generator = opened("one")
        assert in_force() == named("one") + "|query_chunk:8"
    assert in_force() == named("one")
    generator.close()
    assert in_force() == ""


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_blocks_closed_in_any_order_leave_the_last_of_those_open(order):
    backends = ("one", "two", "three")
    generators = [opened(backend) for backend in backends]
    open_blocks = {0, 1, 2}
    for place in order:
        generators[place].close()
        open_blocks.remove(place)
        assert in_force() == (named(backends[max(open_blocks)]) if open_blocks else "")


def test_one_object_may_be_open_twice():
    block = use_backend("one")
    with block:
        with use_backend("two"):
            with block:
                assert in_force() == named("one")
            assert in_force() == named("two")
        assert in_force() == named("one")
    assert in_force() == ""


def test_a_block_left_in_another_thread_is_an_error_that_says_so_and_touches_no_other_block():
    def close():
        with use_backend("two"):
            with pytest.raises(ConfigError, match="opened in another thread or task"):
                generator.close()
            return in_force()

    with ThreadPoolExecutor(1) as elsewhere:
        generator = elsewhere.submit(opened, "one").result()
        assert in_force() == ""
        with pytest.raises(ConfigError, match="opened in another thread or task"):
            generator.close()
        generator = opened("three")
        assert elsewhere.submit(close).result() == named("two")
    assert in_force() == named("three")


def test_a_generator_run_through_in_another_thread_leaves_nothing_there():
    def run():
        for _ in holding("one"):
            assert in_force() == named("one")
        return in_force()

    with use_backend("two"), ThreadPoolExecutor(1) as elsewhere:
        assert elsewhere.submit(run).result() == ""
        assert in_force() == named("two")


def test_leaving_a_block_in_a_copied_context_removes_it_there():
    generator = opened("one")
    copy = contextvars.copy_context()
    copy.run(generator.close)
    assert copy[CONTEXT] == ""


def test_leaving_a_block_that_was_never_opened_is_an_error():
    with use_backend("two"):
        with pytest.raises(ConfigError, match="or not at all"):
            use_backend("two").__exit__(None, None, None)
        assert in_force() == named("two")


def test_an_error_inside_a_block_passes_through_and_ends_it():
    with pytest.raises(KeyError, match="mine"), use_backend("one"):
        raise KeyError("mine")
    assert in_force() == ""
