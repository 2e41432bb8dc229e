"""The check that turns (capability, call, device) into declines: every branch with its code and its words."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa_dispatch import (
    CallSpec,
    Capability,
    Channels,
    Decline,
    DeclineCode,
    DeviceInfo,
    Heads,
    IndexWidth,
)
from dsa_dispatch._dispatch.check import declines, largest_operand, legalize
from dsa_dispatch._policy.values import shown
from dsa_dispatch._stages import STAGES

CPU = DeviceInfo()
HOPPER = DeviceInfo("cuda", "NVIDIA H200", (9, 0), 1 << 37, 232448)
BLACKWELL = DeviceInfo("cuda", "NVIDIA B200", (10, 0), 1 << 37, 232448)
CONSUMER = DeviceInfo("cuda", "RTX 5090", (12, 0), 1 << 35, 101376)
CALL = CallSpec(
    "run_fused_absorbed_sparse_attention", rows=8, keys=16, width=4, heads=96, index_heads=64, bounds="ranges"
)
OPEN = Capability()


def texts(capability, stage="attention_forward", call=CALL, device=CPU):
    return [str(decline) for decline in declines(capability, stage, call, device)]


def call(**changes):
    return dataclasses.replace(CALL, **changes)


def test_an_open_capability_accepts_every_stage():
    assert {stage: texts(OPEN, stage) for stage in STAGES} == {stage: [] for stage in STAGES}


CASES = {
    "device": (
        Capability(devices=frozenset({"cuda"})),
        "attention_forward",
        CALL,
        CPU,
        "DEVICE device: got cpu, supports cuda.",
    ),
    "compute capability": (
        Capability(compute_capabilities=(((9, 0), (9, 1)), ((10, 0), (11, 0)))),
        "attention_forward",
        CALL,
        CONSUMER,
        "COMPUTE_CAPABILITY device: got 12.0 (RTX 5090), supports 9.0 up to below 9.1, 10.0 up to below 11.0.",
    ),
    "unknown compute capability": (
        Capability(compute_capabilities=(((9, 0), (10, 0)),)),
        "attention_forward",
        CALL,
        DeviceInfo("cuda", "cuda"),
        "COMPUTE_CAPABILITY device: got unknown, supports 9.0 up to below 10.0.",
    ),
    "dtype": (
        Capability(dtypes=frozenset({"bfloat16", "float16"})),
        "attention_forward",
        call(dtype="float32"),
        CPU,
        "DTYPE dtype: got float32, supports bfloat16, float16. Cast the inputs to bfloat16.",
    ),
    "dtype of the teacher": (
        Capability(dtypes=frozenset({"bfloat16"})),
        "indexer_target",
        call(dtype="bfloat16", teacher_dtype="float32"),
        CPU,
        "DTYPE dtype: got float32, supports bfloat16. Cast the inputs to bfloat16.",
    ),
    "dtype of the weights": (
        Capability(weights_dtypes=frozenset({"float32"})),
        "indexer_topk",
        call(weights_dtype="bfloat16"),
        CPU,
        "DTYPE weights.dtype: got bfloat16, supports float32.",
    ),
    "heads with a hint": (
        Capability(heads=Heads(power_of_two=True, minimum=16)),
        "attention_forward",
        CALL,
        CPU,
        "HEADS query.heads: got 96, supports powers of two from 16. Use tensor parallel 3 (32 heads a rank) or "
        "another backend.",
    ),
    "heads that no split helps": (
        Capability(heads=Heads(minimum=128)),
        "attention_forward",
        CALL,
        CPU,
        "HEADS query.heads: got 96, supports any count from 128. Use another backend.",
    ),
    "heads of the indexer": (
        Capability(heads=Heads(maximum=32)),
        "indexer_topk",
        CALL,
        CPU,
        "HEADS q.heads: got 64, supports any count up to 32.",
    ),
    "key heads": (
        Capability(kv_heads=Heads(maximum=2)),
        "gqa_forward",
        call(kv_heads=8),
        CPU,
        "HEADS key.heads: got 8, supports any count up to 2.",
    ),
    "grouped heads split with their key heads": (
        Capability(heads=Heads(maximum=16)),
        "gqa_forward",
        call(heads=96, kv_heads=8),
        CPU,
        "HEADS query.heads: got 96, supports any count up to 16. Use tensor parallel 8 (12 heads a rank) or "
        "another backend.",
    ),
    "channels": (
        Capability(channels=Channels(pairs=((576, 512),))),
        "attention_forward",
        call(qk_channels=192, v_channels=128),
        CPU,
        "CHANNELS query.channels/v_channels: got 192/128, supports 576/512. Use another backend.",
    ),
    "channels of the teacher": (
        Capability(channels=Channels(maximum=256)),
        "indexer_target",
        CALL,
        CPU,
        "CHANNELS query.channels: got 576, supports any width up to 256. Use another backend.",
    ),
    "channels of the indexer": (
        Capability(channels=Channels(maximum=64)),
        "indexer_topk",
        CALL,
        CPU,
        "CHANNELS q.channels: got 128, supports any width up to 64. Use another backend.",
    ),
    "channels that zeros would bring to a supported width": (
        Capability(channels=Channels(pairs=((576, 512),))),
        "attention_forward",
        call(qk_channels=544, v_channels=512),
        CPU,
        "CHANNELS query.channels/v_channels: got 544/512, supports 576/512. Append zero channels to query and key up "
        "to 576, or use another backend.",
    ),
    "channels of the indexer that zeros would bring to a multiple": (
        Capability(channels=Channels(multiple_of=96)),
        "indexer_topk",
        CALL,
        CPU,
        "CHANNELS q.channels: got 128, supports multiples of 96. Append zero channels to q and k up to 192, or use "
        "another backend.",
    ),
    "index width": (
        Capability(width=IndexWidth(maximum=2048)),
        "attention_forward",
        call(width=2051),
        CPU,
        "INDEX_WIDTH topk_indices.width: got 2051, supports any width up to 2048. Use another backend.",
    ),
    "index width that holes would bring to a multiple": (
        Capability(width=IndexWidth(multiple_of=128)),
        "attention_forward",
        call(width=2051),
        CPU,
        "INDEX_WIDTH topk_indices.width: got 2051, supports multiples of 128. Append -1 to topk_indices up to 2176 "
        "columns, or use another backend.",
    ),
    "index width of a selection that is no multiple": (
        Capability(width=IndexWidth(multiple_of=128)),
        "indexer_topk",
        call(width=2051),
        CPU,
        "INDEX_WIDTH index_topk: got 2051, supports multiples of 128. Select 2176 keys a row, or use another backend.",
    ),
    "index width of a selection": (
        Capability(width=IndexWidth(maximum=2048)),
        "indexer_topk",
        call(width=2051),
        CPU,
        "INDEX_WIDTH index_topk: got 2051, supports any width up to 2048. Use another backend.",
    ),
    "relu": (
        Capability(relu=frozenset({True})),
        "indexer_topk",
        call(use_relu=False),
        CPU,
        "EXTRA_CHECK use_relu: got False, supports True.",
    ),
    "loss": (
        Capability(losses=frozenset({"sparse"})),
        "indexer_loss",
        call(sparse_loss=False),
        CPU,
        "EXTRA_CHECK loss: got dense, supports sparse.",
    ),
    "extras": (
        OPEN,
        "attention_forward",
        call(extras=frozenset({"mask", "key_positions"})),
        CPU,
        "LAYOUT inputs: got key_positions, mask, supports causal or ranged rows of absorbed keys only.",
    ),
    "packed": (
        OPEN,
        "indexer_topk",
        call(layout="thd"),
        CPU,
        "PACKED layout: got thd, supports bshd.",
    ),
    "layout": (
        Capability(layouts=frozenset({"thd"})),
        "indexer_topk",
        CALL,
        CPU,
        "LAYOUT layout: got bshd, supports thd.",
    ),
    "bounds": (
        Capability(bounds=frozenset({"causal"})),
        "indexer_topk",
        CALL,
        CPU,
        "LAYOUT bounds: got ranges, supports causal.",
    ),
    "context parallel": (
        Capability(context_parallel=frozenset({"none", "contiguous"})),
        "indexer_topk",
        call(context_parallel="zigzag"),
        CPU,
        "CONTEXT_PARALLEL context_parallel: got zigzag, supports contiguous, none.",
    ),
    "determinism": (
        OPEN,
        "attention_backward",
        call(deterministic=True),
        CPU,
        "DETERMINISM deterministic: got True, supports False. Set deterministic=False to allow it.",
    ),
    "tie rule": (
        Capability(deterministic=True),
        "indexer_topk",
        call(deterministic=True),
        CPU,
        "TIE_RULE deterministic: got True, supports ties in arbitrary order.",
    ),
    "graph capture": (
        OPEN,
        "attention_forward",
        call(capturing=True),
        HOPPER,
        "GRAPH_CAPTURE CUDA graph: got capturing, supports eager launches. It reads device memory on the host.",
    ),
    "gradients": (
        Capability(partial_gradients=False),
        "attention_backward",
        call(needs_grad=frozenset({"key"})),
        CPU,
        "GRAD needs_grad: got key, supports all inputs at once.",
    ),
    "rows": (
        Capability(max_rows=15),
        "attention_forward",
        call(batch=2),
        CPU,
        "LIMIT rows: got 16, supports up to 15.",
    ),
    "keys": (
        Capability(max_keys=31),
        "attention_forward",
        call(batch=2),
        CPU,
        "LIMIT keys: got 32, supports up to 31.",
    ),
    "elements": (
        Capability(max_elements=8 * 96 * 576 - 1),
        "attention_forward",
        CALL,
        CPU,
        "LIMIT elements: got 442368, supports up to 442367.",
    ),
    "shared memory": (
        Capability(shared_memory=200_000),
        "attention_forward",
        CALL,
        CONSUMER,
        "LIMIT shared memory: got 101376 bytes on RTX 5090, supports 200000 bytes or more.",
    ),
    "extra check": (
        Capability(
            extra_check=lambda call: Decline(
                DeclineCode.EXTRA_CHECK, "rows", str(call.rows), "multiples of 5"
            )
        ),
        "attention_forward",
        CALL,
        CPU,
        "EXTRA_CHECK rows: got 8, supports multiples of 5.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_reason_has_its_code_and_words(case):
    capability, stage, asked, device, text = CASES[case]
    assert texts(capability, stage, asked, device) == [text]


def test_every_reason_is_collected():
    capability = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16"}),
        heads=Heads(values=frozenset({64})),
        channels=Channels(pairs=((192, 128),)),
        width=IndexWidth(multiple_of=64),
        max_rows=4,
        extra_check=lambda call: Decline(DeclineCode.EXTRA_CHECK, "x", "1", "2"),
    )
    asked = call(extras=frozenset({"mask"}), deterministic=True, capturing=True)
    codes = [decline.code.value for decline in declines(capability, "attention_forward", asked, CPU)]
    assert codes == [
        "DEVICE",
        "DTYPE",
        "HEADS",
        "CHANNELS",
        "INDEX_WIDTH",
        "LAYOUT",
        "DETERMINISM",
        "GRAPH_CAPTURE",
        "LIMIT",
        "EXTRA_CHECK",
    ]


@pytest.mark.parametrize(
    ("have", "accepted"),
    [((8, 9), False), ((9, 0), True), ((9, 9), True), ((10, 0), False), ((12, 0), False)],
)
def test_compute_capability_ranges_are_half_open(have, accepted):
    capability = Capability(compute_capabilities=(((9, 0), (10, 0)),))
    device = dataclasses.replace(HOPPER, compute_capability=have)
    assert (not texts(capability, device=device)) is accepted


def test_sm120_is_not_sm100():
    capability = Capability(compute_capabilities=(((10, 0), (11, 0)),))
    assert not texts(capability, device=BLACKWELL)
    assert texts(capability, device=CONSUMER)


def test_compute_capability_and_shared_memory_say_nothing_of_a_cpu():
    capability = Capability(compute_capabilities=(((9, 0), (10, 0)),), shared_memory=1 << 30)
    assert not texts(capability)


def test_a_limit_is_inclusive():
    assert not texts(Capability(max_rows=8, max_keys=16, max_elements=8 * 96 * 576, shared_memory=101376))


@pytest.mark.parametrize("stage", ["attention_forward", "attention_backward", "gqa_forward", "gqa_backward"])
def test_ids_of_the_caller_make_layout_bounds_and_context_parallel_irrelevant(stage):
    capability = Capability(bounds=frozenset({"causal"}))
    assert not texts(capability, stage, call(layout="thd", context_parallel="zigzag"))


def test_ties_matter_to_the_selection_alone():
    capability = Capability(deterministic=True, tie_rule="arbitrary")
    assert not texts(capability, "attention_forward", call(deterministic=True))


@pytest.mark.parametrize("stage", ["indexer_target", "indexer_loss"])
def test_a_dense_loss_has_no_index_width(stage):
    capability = Capability(width=IndexWidth(multiple_of=64))
    assert not texts(capability, stage, call(sparse_loss=False))
    assert texts(capability, stage)


@pytest.mark.parametrize("stage", ["indexer_target", "gqa_forward", "gqa_backward"])
def test_zero_heads_are_not_added_where_they_would_change_the_answer(stage):
    capability = Capability(heads=Heads(values=frozenset({48, 128}), pad=True))
    (text,) = texts(capability, stage, call(kv_heads=2))
    assert text.startswith("HEADS query.heads: got 96, supports 48, 128. Use tensor parallel 2 ")


def test_the_hint_counts_on_padding_only_where_there_is_any():
    capability = Capability(heads=Heads(values=frozenset({128}), pad=True))
    (text,) = texts(capability, "indexer_target")
    assert text.endswith("supports 128. Use another backend.")


@pytest.mark.parametrize(
    ("stage", "elements"),
    [
        ("indexer_topk", 8 * 64 * 128),
        ("indexer_target", 8 * 96 * 576),
        ("indexer_loss", 8 * 64 * 128),
        ("attention_forward", 8 * 96 * 576),
        ("gqa_backward", 8 * 96 * 576),
    ],
)
def test_elements_are_those_of_the_stage(stage, elements):
    assert largest_operand(stage, CALL) == elements


def test_elements_count_keys_values_and_ids():
    assert largest_operand("attention_forward", call(keys=1 << 20)) == (1 << 20) * 576
    assert largest_operand("gqa_forward", call(keys=1 << 20, kv_heads=8, v_channels=640)) == (1 << 23) * 640
    assert largest_operand("indexer_topk", call(width=1 << 20)) == 8 << 20


def test_a_decline_is_stable_data():
    decline = Decline(DeclineCode.HEADS, "query.heads", "96", "64", "Pad.")
    assert str(decline) == "HEADS query.heads: got 96, supports 64. Pad."
    assert decline.to_json() == {
        "code": "HEADS",
        "field": "query.heads",
        "got": "96",
        "supported": "64",
        "hint": "Pad.",
    }
    assert len(DeclineCode) == 25


def test_legalization_reads_as_steps_with_its_cost():
    capability = Capability(
        heads=Heads(values=frozenset({128}), pad=True),
        channels=Channels(pairs=((640, 512),), pad=True),
        width=IndexWidth(multiple_of=8, pad=True),
        index_form="prefix",
    )
    assert legalize(capability, "attention_forward", CALL).steps() == (
        "heads 96→128",
        "channels 576→640",
        "width 4→8 (2.96× work)",
        "ids outside the keys to -1",
        "holes compacted",
    )


any_capability = st.builds(
    Capability,
    heads=st.sampled_from(
        [
            Heads(),
            Heads(values=frozenset({2, 64})),
            Heads(values=frozenset({4, 64}), pad=True),
            Heads(multiple_of=3),
        ]
    ),
    channels=st.sampled_from(
        [Channels(), Channels(multiple_of=16, pad=True), Channels(pairs=((24, 8), (40, 8)), pad=True)]
    ),
    width=st.sampled_from(
        [
            IndexWidth(),
            IndexWidth(multiple_of=8, pad=True),
            IndexWidth(maximum=16),
            IndexWidth(power_of_two=True),
        ]
    ),
    index_form=st.sampled_from(["any", "holes", "prefix"]),
)
any_call = st.builds(
    CallSpec,
    operation=st.just("run_fused_dsa_attention"),
    rows=st.integers(0, 5),
    keys=st.integers(0, 5),
    width=st.integers(0, 40),
    heads=st.integers(1, 70),
    kv_heads=st.just(1),
    qk_channels=st.integers(1, 40),
    v_channels=st.sampled_from([8, 16]),
    index_heads=st.integers(1, 70),
    index_channels=st.integers(1, 40),
    sparse_loss=st.booleans(),
)


@given(any_capability, st.sampled_from(STAGES), any_call)
def test_what_is_legalized_is_a_call_the_kernel_takes_as_it_stands(capability, stage, asked):
    if declines(capability, stage, asked, CPU):
        return
    legal = legalize(capability, stage, asked)
    indexer = stage in ("indexer_topk", "indexer_loss")
    prefix = "index_" if indexer else ""
    channels = "index_channels" if indexer else "qk_channels"
    changes = {f"{prefix}heads": legal.heads[1], channels: legal.channels[1], "width": legal.width[1]}
    rewritten = dataclasses.replace(asked, **changes)
    assert not declines(capability, stage, rewritten, CPU)
    again = legalize(capability, stage, rewritten)
    # Width 0 runs nothing, so that a padded 0 need not be a width of the kernel.
    assert again.heads[0] == again.heads[1]
    assert again.channels[0] == again.channels[1]
    assert again.width[0] == again.width[1]
    for found, given_ in (legal.heads, legal.channels, legal.width):
        assert given_ >= found


UNCODED = Decline("LIMIT", "rows", "9", "8")


@pytest.mark.parametrize(
    ("rule", "got"),
    [
        (lambda call: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda call: "no", "returned 'no'"),
        (lambda call: UNCODED, f"returned {shown(UNCODED)}"),
    ],
    ids=["raises", "no decline", "no code"],
)
def test_a_broken_rule_declines_for_its_own_backend(rule, got):
    (found,) = declines(Capability(extra_check=rule), "attention_forward", call(), CPU)
    assert str(found) == (
        f"EXTRA_CHECK extra_check: got {got}, supports a rule that returns a Decline or None. "
        f"It is a fault of the backend: `dsa-dispatch doctor` shows it."
    )


def test_the_output_of_grouped_attention_counts_as_elements():
    grouped = call(rows=100, keys=10, heads=8, kv_heads=1, qk_channels=8, v_channels=64)
    (found,) = declines(Capability(max_elements=10_000), "gqa_forward", grouped, CPU)
    assert str(found) == "LIMIT elements: got 51200, supports up to 10000."
