"""Copies of strided rows: the bits of PyTorch's own, in whatever pieces they are moved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dsa_dispatch._execution.copies import contiguous, copy, padded, words

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def draw(*shape, dtype=torch.float32):
    """Any bits, NaN with a payload among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=torch.Generator().manual_seed(3))
    return raw.to(torch.uint8).view(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("found", "given"),
    [
        ((3, 8, 576), (3, 64, 576)),
        ((3, 8, 512), (3, 8, 576)),
        ((3, 3, 512), (3, 4, 576)),
        ((3, 1, 1), (3, 2, 1)),
        ((3, 5, 7), (3, 6, 9)),
        ((4, 512), (4, 576)),
        ((4, 6), (4, 6)),
    ],
)
def test_padding_puts_zeros_beside_the_same_bits(dtype, found, given):
    tensor = draw(*found, dtype=dtype)
    wanted = tensor
    for dim, size in enumerate(found):
        wanted = F.pad(wanted, [0, 0] * (len(found) - dim - 1) + [0, given[dim] - size])
    assert torch.equal(bits(padded(tensor, given)), bits(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_a_slice_of_heads_is_packed_bit_for_bit(dtype, heads):
    part = draw(5, 9, 32, dtype=dtype)[:, :heads]
    packed = contiguous(part)
    assert packed.is_contiguous()
    assert packed.dtype == dtype
    assert torch.equal(bits(packed), bits(part))


def test_what_is_packed_already_is_not_copied():
    tensor = draw(5, 9, 32)
    assert contiguous(tensor) is tensor


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_a_copy_between_strided_rows_takes_any_alignment(offset):
    source = draw(4, 40, dtype=torch.bfloat16)[:, offset : offset + 24]
    target = torch.zeros(4, 3, 24, dtype=torch.bfloat16)
    copy(target[:, 1], source)
    assert torch.equal(bits(target[:, 1]), bits(source))
    assert not target[:, ::2].any()


def test_a_copy_between_types_converts():
    target = torch.zeros(4, 8, dtype=torch.bfloat16)
    copy(target, torch.full((4, 8), 1.5))
    assert bool((target == 1.5).all())


def test_words_are_taken_where_every_row_begins_and_ends_with_one():
    rows = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert words(rows[:, 8:16]).shape == (4, 1)
    for tensor in (rows[:, 1:9], rows[:, :7], rows[:, ::2], rows[:, 0], rows.view(-1)[4:]):
        assert words(tensor) is None
    assert words(torch.zeros(4, 9, dtype=torch.bfloat16)[:, :8]) is None
    assert words(rows.to("meta")) is None
