"""``torch.compile(fullgraph=True)`` of every operation equals eager, for every length, under any policy."""

from __future__ import annotations

import pytest
import torch
from training.models import assert_same_step, every_operation, operation_inputs, step

import dsa_dispatch as dsa
from dsa_dispatch.errors import NoBackendError
from dsa_dispatch.testing import FakeBackend, isolated_registry


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recompiled:
    """A backend for ``torch.compile`` that counts the graphs it is given."""

    def __init__(self, inner="aot_eager"):
        self.graphs = 0
        self._inner = torch._dynamo.lookup_backend(inner)

    def __call__(self, graph, inputs):
        self.graphs += 1
        return self._inner(graph, inputs)


def marked(rows):
    inputs = operation_inputs(rows)
    torch._dynamo.mark_dynamic(inputs[0], 0)
    return inputs


@pytest.mark.usefixtures("registry")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # inductor's own imports
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_of_all_operations_compiles_to_one_graph_and_equals_eager_at_every_length(backend):
    counted = Recompiled(backend)
    compiled = torch.compile(every_operation, fullgraph=True, backend=counted)
    for rows in (12, 20, 17):
        eager = step(every_operation, operation_inputs(rows))
        got = step(compiled, marked(rows))
        assert_same_step(got, eager)
        assert got[2] == eager[2], "compiled code runs each stage as often as eager"
    assert counted.graphs == 1, "a new length marked dynamic does not recompile"


def test_a_change_of_policy_around_the_compiled_call_is_honoured_without_a_new_graph():
    fakes = [FakeBackend("one", rank=1), FakeBackend("two", rank=2)]
    selects = FakeBackend("selects", ["indexer_topk"], rank=-9)
    with isolated_registry(*(fake.spec for fake in (*fakes, selects)), installed=True):
        counted = Recompiled()
        compiled = torch.compile(every_operation, fullgraph=True, backend=counted)

        def ran(**settings):
            for fake in fakes:
                fake.calls.clear()
            with dsa.use_backend(**settings):
                value = compiled(*(inputs := operation_inputs()))
            value.backward()  # outside the block: the backward runs what its forward decided
            assert all(tensor.grad is not None for tensor in inputs[1:])
            return [fake.stages_called() for fake in fakes]

        first = ran(backend="one")
        assert first[0] >= {"attention_forward", "attention_backward", "indexer_topk", "gqa_backward"}
        assert first[1] == set()
        second = ran(backend="two")
        assert second == [set(), first[0]]
        mixed = ran(backend={"attention_backward": "one"})
        assert mixed[0] == {"attention_backward"}
        with pytest.raises(NoBackendError):
            ran(backend="selects", fallback="error")
        assert counted.graphs == 1


@pytest.mark.usefixtures("registry")
def test_use_backend_inside_a_compiled_function_says_to_put_it_around_the_call():
    def inside(*inputs):
        with dsa.use_backend("torch_dense"):
            return every_operation(*inputs)

    with pytest.raises(Exception, match="use_backend inside a compiled function") as raised:
        torch.compile(inside, fullgraph=True, backend="aot_eager")(*operation_inputs())
    assert "put it around the compiled call" in str(raised.value)


@pytest.mark.usefixtures("registry")
def test_bad_input_to_compiled_code_is_named_as_in_eager():
    def call(x, k):
        return dsa.run_fused_qk_topk(None, x, k, x[..., 0], 4).length

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="k: expected 3 dimensions"):
        compiled(torch.ones(3, 1, 2, 4), torch.ones(3, 4))
