"""``IndexShareSchedule``: three conventions and a list; and indices that travel as values."""

from __future__ import annotations

import pytest
import torch
from contract import make
from hypothesis import given
from hypothesis import strategies as st
from training.models import SharingModel, checkpointed, stages_run

import dsa_dispatch as dsa
from dsa_dispatch._run_config import load_preset
from dsa_dispatch.checkpointing import save_topk_policy
from dsa_dispatch.errors import ConfigError
from dsa_dispatch.index_sharing import IndexShareSchedule

GLM_5_2 = (0, 1, 2, *range(6, 75, 4))
"""The published list: 21 of 78 layers select."""


@pytest.mark.parametrize(
    "make_schedule",
    [IndexShareSchedule.from_megatron, IndexShareSchedule.from_transformers, IndexShareSchedule.from_xtuner],
)
def test_every_convention_gives_glm_5_2_its_published_list(make_schedule):
    schedule = make_schedule(78, 4, 3)
    assert schedule.computing == GLM_5_2
    assert schedule == IndexShareSchedule.explicit(78, GLM_5_2)


def test_the_preset_holds_the_same_list():
    shape = load_preset("glm-5.2").model
    schedule = IndexShareSchedule.explicit(shape.layers, shape.computing_layers, sparse=shape.dsa_layers)
    assert schedule.computing == GLM_5_2
    assert [schedule.source(layer) for layer in schedule.sparse] == [
        shape.index_source(layer) for layer in shape.dsa_layers
    ]


def test_defaults_of_the_conventions_differ_and_are_kept():
    assert IndexShareSchedule.from_megatron(9, 4).computing == (0, 4, 8)
    assert IndexShareSchedule.from_transformers(10, 4).computing == (0, 1, 5, 9)
    with pytest.raises(ConfigError, match="layer 0 is the first with sparse attention and shares"):
        IndexShareSchedule.from_xtuner(9, 4)
    assert IndexShareSchedule.from_xtuner(3).computing == (0, 1, 2), "freq 1 shares nothing"


@given(layers=st.integers(1, 40), freq=st.integers(1, 6), offset=st.integers(1, 6))
def test_rules_equal_their_definitions_in_the_framework_that_has_them(layers, freq, offset):
    def megatron(number):  # counts from 1
        return max(number - max(offset, 1), 0) % freq == 0

    def transformers(index):  # counts from 0
        return max(index - offset + 1, 0) % freq == 0

    schedule = IndexShareSchedule.from_megatron(layers, freq, offset)
    assert schedule.computing == tuple(i for i in range(layers) if megatron(i + 1))
    assert IndexShareSchedule.from_transformers(layers, freq, offset).computing == tuple(
        i for i in range(layers) if transformers(i)
    )
    for layer in range(layers):
        source = schedule.source(layer)
        assert source <= layer
        assert schedule.computes(source)
        assert not any(schedule.computes(between) for between in range(source + 1, layer + 1))
        assert layer in schedule.sharers(source)
        assert schedule.last_use(layer) >= layer


@pytest.mark.parametrize(
    "entries", ["FSFFSS", ["full", "shared", "full", "full", "shared", "shared"], [0, 2, 3]]
)
def test_an_explicit_list_may_be_numbers_or_words(entries):
    schedule = IndexShareSchedule.explicit(6, entries)
    assert [schedule.source(layer) for layer in range(6)] == [0, 0, 2, 3, 3, 3]


def test_layers_without_sparse_attention_take_no_part():
    schedule = IndexShareSchedule.explicit(8, [1, 5], sparse=[1, 3, 5, 7])
    assert [schedule.source(layer) for layer in (1, 3, 5, 7)] == [1, 1, 5, 5]
    with pytest.raises(ConfigError, match="layer 2 has no sparse attention"):
        schedule.source(2)


def test_mtp_depths_reuse_the_first_depth_or_the_last_main_selection():
    own = IndexShareSchedule.explicit(3, [0, 2], mtp_depths=3)
    assert [own.source(layer) for layer in (3, 4, 5)] == [3, 3, 3]
    assert own.last_use(3) == 5
    main = IndexShareSchedule.explicit(3, [0, 2], mtp_depths=3, mtp_indices="main")
    assert [main.source(layer) for layer in (3, 4, 5)] == [2, 2, 2]
    assert main.last_use(2) == 5


def test_a_pipeline_split_between_a_selection_and_its_use_is_refused_with_the_cuts_that_work():
    schedule = IndexShareSchedule.explicit(8, [0, 1, 4], mtp_depths=1, mtp_indices="main")
    schedule.check_pipeline([1, 3, 4])
    schedule.check_pipeline([8])
    schedule.check_pipeline([4, 4, 0][:2])
    with pytest.raises(ConfigError) as raised:
        schedule.check_pipeline([2, 6])
    for part in ("layer 2 on stage 1", "selection of layer 1 on stage 0", "may begin at layer 1, 4"):
        assert part in str(raised.value)
    with pytest.raises(ConfigError, match="in sum 7 layers"):
        schedule.check_pipeline([3, 4])
    with pytest.raises(ConfigError, match=r"layer 8 on stage 1 .* layer 4 on stage 0"):
        schedule.check_pipeline([8, 0])


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: IndexShareSchedule.explicit(4, [1, 2]), "layer 0 is the first"),
        (lambda: IndexShareSchedule.explicit(4, [0, 9]), "names 9"),
        (lambda: IndexShareSchedule.explicit(4, [0, 2, 1]), "ascending"),
        (lambda: IndexShareSchedule.explicit(4, []), "at least one layer"),
        (lambda: IndexShareSchedule.explicit(4, "FSX"), "3 entries"),
        (lambda: IndexShareSchedule.explicit(0, [0]), "0 layers"),
        (lambda: IndexShareSchedule.explicit(2, [0], mtp_indices="other"), "mtp_indices"),
        (lambda: IndexShareSchedule.from_megatron(4, 0), "freq 0"),
        (lambda: IndexShareSchedule.from_transformers(4, 1.5), "freq: got 1.5"),
        (lambda: IndexShareSchedule.from_megatron(4.0), "layers: got 4.0"),
        (lambda: IndexShareSchedule.explicit(None, [0]), "layers: got None"),
        (lambda: IndexShareSchedule.explicit(4, None), "computing: got None"),
        (lambda: IndexShareSchedule(4, (0, 1.5), (0, 1, 2, 3)), r"computing: got 1.5 \(float\)"),
        (lambda: IndexShareSchedule(4, (0,), None), "sparse: got None"),
        (lambda: IndexShareSchedule(4, (0,), (0,), mtp_depths=None), "mtp_depths: got None"),
        (lambda: IndexShareSchedule.explicit(4, [0]).check_pipeline([2, 2.0]), "layers_per_stage: got 2.0"),
    ],
)
def test_a_schedule_that_cannot_be_meant_is_a_config_error(build, error):
    with pytest.raises(ConfigError, match=error):
        build()


def test_a_schedule_made_of_lists_is_the_one_made_of_tuples():
    made = IndexShareSchedule(torch.tensor(4), [0, torch.tensor(2)], [0, 1, 2, 3])
    assert made == IndexShareSchedule(4, (0, 2), (0, 1, 2, 3))
    assert len({made, IndexShareSchedule(4, (0, 2), (0, 1, 2, 3))}) == 1


SCHEDULE = IndexShareSchedule.explicit(4, [0, 2], mtp_depths=2)


@pytest.mark.usefixtures("registry")
def test_layers_that_share_attend_with_the_very_tensor_and_select_nothing():
    model = SharingModel(SCHEDULE)
    x, selections = make.normal(12, 2, 16), {}
    dsa.reset_stats()
    for number in SCHEDULE.logical_layers:
        x = model.run_layer(number, x, selections)
    assert stages_run()["indexer_topk"] == 3
    for number in SCHEDULE.logical_layers:
        indices = selections[number].indices
        assert indices is selections[SCHEDULE.source(number)].indices
        assert indices.dtype == torch.int32
        assert indices.is_contiguous()
        assert (selections[number].loss is None) == (not SCHEDULE.computes(number)), "a loss counts once"


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("policy", [None, save_topk_policy()], ids=["plain", "saved"])
def test_micro_batches_in_flight_at_once_never_mix(policy):
    batches = [make.normal(12, 2, 16, seed=seed) for seed in (1, 2, 3)]
    wanted = SharingModel(SCHEDULE)
    for x in batches:
        wanted(x).backward()

    model = SharingModel(SCHEDULE, checkpointed(policy))
    states = [(x, {}) for x in batches]
    for number in SCHEDULE.logical_layers:  # layer by layer, all micro-batches in flight
        states = [(model.run_layer(number, x, selections), selections) for x, selections in states]
    for x, selections in reversed(states):  # and their backwards in another order
        model.total(x, selections).backward()
    for (name, got), expected in zip(model.gradients().items(), wanted.gradients().values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("entry", [2.0, None])
def test_a_layer_that_is_no_number_is_refused_and_never_dropped(entry):
    with pytest.raises(ConfigError, match="computing: got"):
        IndexShareSchedule.explicit(4, [0, entry])
