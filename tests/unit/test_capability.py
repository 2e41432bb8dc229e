"""The three small vocabularies of a capability: what runs, what is padded to what, and how it reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa_dispatch import Channels, Heads, IndexWidth

HEADS = {
    "any": Heads(),
    "from 16": Heads(power_of_two=True, minimum=16),
    "multiples": Heads(multiple_of=8, maximum=64),
    "set": Heads(values=frozenset({64, 128})),
    "set padded": Heads(values=frozenset({64, 128}), pad=True),
    "powers padded": Heads(power_of_two=True, minimum=16, maximum=128, pad=True),
    "multiples padded": Heads(multiple_of=16, pad=True),
}


@pytest.mark.parametrize(
    ("heads", "count", "fits"),
    [
        ("any", 1, 1),
        ("any", 127, 127),
        ("from 16", 16, 16),
        ("from 16", 8, None),
        ("from 16", 96, None),
        ("multiples", 8, 8),
        ("multiples", 12, None),
        ("multiples", 72, None),
        ("set", 64, 64),
        ("set", 65, None),
        ("set padded", 1, 64),
        ("set padded", 65, 128),
        ("set padded", 129, None),
        ("powers padded", 1, 16),
        ("powers padded", 17, 32),
        ("powers padded", 128, 128),
        ("powers padded", 129, None),
        ("multiples padded", 1, 16),
        ("multiples padded", 33, 48),
    ],
)
def test_heads_fit_the_smallest_supported_count(heads, count, fits):
    assert HEADS[heads].fit(count) == fits


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        ("any", "any count"),
        ("from 16", "powers of two from 16"),
        ("multiples", "multiples of 8 up to 64"),
        ("set", "64, 128"),
        ("set padded", "64, 128, fewer padded"),
        ("powers padded", "powers of two from 16 up to 128, fewer padded"),
    ],
)
def test_heads_read_as_words(heads, text):
    assert str(HEADS[heads]) == text


any_heads = st.builds(
    Heads,
    values=st.none() | st.frozensets(st.integers(1, 64), min_size=1, max_size=4),
    multiple_of=st.sampled_from([1, 2, 3, 16]),
    power_of_two=st.booleans(),
    minimum=st.integers(1, 40),
    maximum=st.none() | st.integers(1, 200),
    pad=st.booleans(),
)


@given(any_heads, st.integers(1, 200))
def test_what_heads_fit_to_runs_holds_the_call_and_is_no_larger_than_it_must(heads, count):
    fits = heads.fit(count)
    if fits is None:
        assert not heads.runs(count)
    else:
        assert heads.runs(fits)
        assert fits >= count
        assert fits == count or heads.pad
        assert fits == min(size for size in range(count, fits + 1) if heads.runs(size))


@pytest.mark.parametrize(
    ("channels", "qk", "v", "fits"),
    [
        (Channels(), 7, 5, 7),
        (Channels(maximum=512), 576, 512, None),
        (Channels(multiple_of=16), 24, 16, None),
        (Channels(multiple_of=16, pad=True), 24, 16, 32),
        (Channels(multiple_of=16, maximum=31, pad=True), 24, 16, None),
        (Channels(pairs=((576, 512),)), 576, 512, 576),
        (Channels(pairs=((576, 512),)), 512, 512, None),
        (Channels(pairs=((576, 512),), pad=True), 512, 512, 576),
        (Channels(pairs=((576, 512),), pad=True), 512, 448, None),
        (Channels(pairs=((576, 512), (192, 128)), pad=True), 150, 128, 192),
        (Channels(pairs=((128, 0),)), 128, None, 128),
        (Channels(pairs=((128, 0),), pad=True), 96, None, 128),
    ],
)
def test_channels_grow_in_the_key_alone(channels, qk, v, fits):
    assert channels.fit(qk, v) == fits


@pytest.mark.parametrize(
    ("channels", "text"),
    [
        (Channels(), "any width"),
        (Channels(multiple_of=16, maximum=512, pad=True), "multiples of 16 up to 512, narrower padded"),
        (Channels(pairs=((576, 512),), pad=True), "576/512, narrower padded"),
        (Channels(pairs=((128, 0),)), "128"),
    ],
)
def test_channels_read_as_words(channels, text):
    assert str(channels) == text


@pytest.mark.parametrize(
    ("width", "asked", "fits"),
    [
        (IndexWidth(), 0, 0),
        (IndexWidth(), 2051, 2051),
        (IndexWidth(multiple_of=64), 100, None),
        (IndexWidth(multiple_of=64, pad=True), 100, 128),
        (IndexWidth(multiple_of=64, pad=True), 2048, 2048),
        (IndexWidth(maximum=2048, pad=True), 2051, None),
        (IndexWidth(power_of_two=True), 48, None),
        (IndexWidth(power_of_two=True, pad=True), 48, 64),
        (IndexWidth(power_of_two=True, multiple_of=64, pad=True), 5, 64),
        (IndexWidth(power_of_two=True, maximum=2048, pad=True), 2051, None),
    ],
)
def test_index_widths_fit_the_smallest_supported_width(width, asked, fits):
    assert width.fit(asked) == fits


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (IndexWidth(), "any width"),
        (IndexWidth(multiple_of=64, maximum=2048, pad=True), "multiples of 64 up to 2048, narrower padded"),
        (IndexWidth(power_of_two=True), "powers of two"),
    ],
)
def test_index_widths_read_as_words(width, text):
    assert str(width) == text


@given(
    st.builds(
        IndexWidth,
        multiple_of=st.sampled_from([1, 2, 16, 64]),
        maximum=st.none() | st.integers(1, 4096),
        power_of_two=st.booleans(),
        pad=st.booleans(),
    ),
    st.integers(0, 4096),
)
def test_what_a_width_fits_to_is_a_width_of_its_own(width, asked):
    fits = width.fit(asked)
    if fits is not None:
        assert fits >= asked
        assert fits == asked or width.pad
        assert fits == 0 or width.fit(fits) == fits
