"""A kernel is compiled once, whatever the lengths: counted by the keys that its launches would be compiled under."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from launches import recorded_launches
from machine import TARGETS

from dsa_backends.triton_kernels.attention_backward import attention_backward
from dsa_backends.triton_kernels.attention_forward import attention_forward
from dsa_backends.triton_kernels.indexer_loss import indexer_loss
from dsa_backends.triton_kernels.indexer_target import indexer_target
from dsa_backends.triton_kernels.indexer_topk import indexer_topk
from dsa_dispatch._call import RowLayout, StageOptions

LENGTHS = (1, 2, 15, 16, 17, 1000, 1024)
"""Triton compiles anew for an integer that is 1 or divisible by 16, unless it is told not to."""
SIZES = [
    *((length, 40, 24) for length in LENGTHS),
    *((24, length, 24) for length in LENGTHS),
    *((24, 40, length) for length in LENGTHS),
    *((length, length, length) for length in LENGTHS),
]


def attention(rows, keys, width, options, heads=64, dqk=576, dv=512):
    q = torch.zeros(rows, heads, dqk, dtype=torch.bfloat16)
    kv = torch.zeros(keys, dqk, dtype=torch.bfloat16)
    indices = torch.zeros(rows, width, dtype=torch.int32)
    length = torch.full((rows,), width, dtype=torch.int32)
    layout = RowLayout(1, rows, keys)
    out, lse = attention_forward(
        q, kv, indices, length, scale=0.1, v_channels=dv, rows=layout, options=options
    )
    attention_backward(
        q, kv, indices, length, out, lse, out, scale=0.1, v_channels=dv, need_dq=True,
        dkv=torch.zeros(keys, dqk), rows=layout, options=options,
    )  # fmt: skip


def indexer(rows, keys, width, options, heads=64, topk=32):
    q = torch.zeros(rows, heads, 128, dtype=torch.bfloat16)
    k = torch.zeros(keys, 128, dtype=torch.bfloat16)
    w = torch.zeros(rows, heads)
    query = torch.zeros(rows, heads, 576, dtype=torch.bfloat16)
    key = torch.zeros(keys, 576, dtype=torch.bfloat16)
    starts = torch.zeros(rows, dtype=torch.int32)
    layout = RowLayout(1, rows, keys, bounds="ranges")
    bounds = {"starts": starts, "ends": starts + keys, "rows": layout, "options": options}
    indexer_topk(q, k, w, topk=topk, use_relu=True, **bounds)
    slots = {"indices": torch.zeros(rows, width, dtype=torch.int32), "length": starts + width}
    mass = indexer_target(query, key, lse=None, scale=0.1, **slots, **bounds)
    indexer_loss(
        q,
        k,
        w,
        mass=mass,
        use_relu=True,
        need_dq=True,
        need_dw=True,
        dk=torch.zeros(keys, 128),
        **slots,
        **bounds,
    )


FORMS = {"mass_kernel": 2, "hopper_mass_kernel": 2}
"""Kernels that one call launches in several forms: the teacher without an lse finds it in a pass of its own."""


def counts(variants):
    return {name: len(keys) for name, keys in variants.items()}


def once_each(variants):
    return {name: FORMS.get(name, 1) for name in variants}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("arch", "capability"), TARGETS)
@pytest.mark.parametrize("stages", [attention, indexer], ids=["attention", "indexer"])
def test_no_length_compiles_a_kernel_again(stages, arch, capability, deterministic):
    options = StageOptions(deterministic=deterministic)
    with recorded_launches(arch, capability) as variants:
        for sizes in SIZES:
            stages(*sizes, options)
    assert len(variants) >= 4
    assert counts(variants) == once_each(variants)


@pytest.mark.parametrize("heads", [3, 64])
@pytest.mark.parametrize("stages", [attention, indexer], ids=["attention", "indexer"])
def test_no_chunk_of_rows_compiles_a_kernel_again(stages, heads):
    """Chunks of one row begin at addresses of every alignment."""
    with recorded_launches("sm90", 90) as variants:
        for budget in (1, 1 << 30):
            stages(17, 40, 24, StageOptions(deterministic=True, memory_budget=budget), heads=heads)
    assert counts(variants) == once_each(variants)


@triton.jit
def specialised_kernel(to, length):
    tl.store(to, length)


def test_a_kernel_that_specialises_on_a_length_is_counted_for_each_kind():
    with recorded_launches("sm90", 90) as variants:
        for length in LENGTHS:
            specialised_kernel[(1,)](torch.zeros(1, dtype=torch.int32), length)
    assert counts(variants) == {"specialised_kernel": 3}
