"""Declarations that contradict themselves or name what does not exist are refused when a backend is registered."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dsa_dispatch import BackendSpec, Capability, Channels, Heads, IndexWidth, StageSpec
from dsa_dispatch._cli import app
from dsa_dispatch.errors import PluginError
from dsa_dispatch.testing import FakeBackend, isolated_registry


def register(**declared):
    return BackendSpec(
        name="mine", stages={"attention_forward": StageSpec(Capability(**declared), "module:function")}
    )


def test_the_default_declaration_is_accepted():
    assert register().name == "mine"


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"dtypes": frozenset({"bfloat_16"})}, r"dtypes: got 'bfloat_16'.* Did you mean 'bfloat16'\?"),
        ({"devices": frozenset({"cudda"})}, r"devices: got 'cudda'.* Did you mean 'cuda'\?"),
        ({"dtypes": frozenset()}, "dtypes: got an empty set"),
        ({"devices": frozenset()}, "devices: got an empty set"),
        ({"max_rows": 0}, "max_rows: got 0, expected at least 1"),
        ({"max_elements": -3}, "max_elements: got -3, expected at least 1"),
        ({"heads": Heads(values=frozenset())}, "heads, field values: got an empty set"),
        ({"heads": Heads(values=frozenset({0, 4}))}, "field values: got 0, expected counts of at least 1"),
        ({"heads": Heads(values=frozenset({4}), minimum=8)}, "field minimum: got 8 beside values"),
        ({"heads": Heads(minimum=8, maximum=4)}, "which no count satisfies"),
        ({"width": IndexWidth(multiple_of=48, power_of_two=True)}, "expected a power of two"),
        ({"width": IndexWidth(multiple_of=64, maximum=32)}, "which no width satisfies"),
        ({"channels": Channels(multiple_of=64, maximum=32)}, "which no width satisfies"),
        ({"compute_capabilities": (((10, 0), (9, 0)),)}, "expected a range that holds something"),
        ({"score_error": float("nan")}, "score_error: got nan"),
        ({"score_error": 1.0}, "every selection would be right"),
        ({"gradient_error": -0.1}, "gradient_error: got -0.1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_name_and_what_is_possible(declared, words):
    with pytest.raises(PluginError, match=words):
        register(**declared)


def test_doctor_shows_a_rule_that_raises_with_its_traceback_and_ends_with_1():
    backend = FakeBackend("mine", ["attention_forward"], extra_check=lambda call: 1 / 0)
    with isolated_registry(backend.spec):
        done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "ready" not in done.output
    assert "Traceback (most recent call last)" in done.output
    assert "ZeroDivisionError: division by zero" in done.output
