"""What stands between a caller and the provider's forward: no copy of a tensor that the kernel can read as it is."""

from __future__ import annotations

import fake_providers
import pytest
import torch
from traffic import Traffic, anywhere

import dsa_dispatch as dsa
from dsa_backends.flash_mla.spec import SPEC
from dsa_dispatch.testing import assert_backend_ran, isolated_registry

ROWS, KEYS, WIDTH = 64, 128, 256
CONFIG = {"dsa_kernel_backend": "flashmla", "dsa_kernel_fallback": "error"}
IDS = ROWS * WIDTH * 4
FEW = 8
"""Rows of the calls that a provider is known by; only they are computed."""


class Recorded:
    """A provider that keeps what it is handed, and computes nothing of a call of many rows."""

    def __init__(self, base_two=False, ends=True):
        self.base_two, self.ends = base_two, ends
        self.handed = {}

    def __call__(self, q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        if q.shape[0] < FEW:
            return fake_providers.kernel(
                q, kv, indices, sm_scale, d_v, topk_length, base_two=self.base_two, ends=self.ends
            )
        self.handed = {"query": q, "key": kv, "indices": indices}
        heads = q.shape[:2]
        return q.new_empty(*heads, d_v), None, q.new_empty(heads, dtype=torch.float32)


def operands(heads, dtype=torch.int32, rows=ROWS):
    return {
        "query": torch.randn(rows, 1, heads, 576).bfloat16(),
        "key": torch.randn(KEYS, 1, 1, 576).bfloat16(),
        "indices": torch.zeros(1, rows, WIDTH, dtype=dtype),
    }


def traffic_of(provider, given, length=None):
    with isolated_registry(anywhere(SPEC)), fake_providers.flash_mla(provider):
        arguments = (CONFIG, *given.values(), 0.05, 512, length)
        # The first call finds the provider and decides.
        dsa.run_fused_absorbed_sparse_attention(*arguments)
        with Traffic() as traffic, assert_backend_ran("flashmla", "attention_forward"):
            dsa.run_fused_absorbed_sparse_attention(*arguments)
    return traffic


def is_the_callers(provider, given, name):
    return provider.handed[name].data_ptr() == given[name].data_ptr()


@pytest.mark.parametrize("heads", [64, 128])
def test_native_heads_and_int32_ids_reach_the_kernel_as_they_are(heads):
    provider, given = Recorded(), operands(heads)
    traffic = traffic_of(provider, given)
    assert all(is_the_callers(provider, given, name) for name in given)
    # The lengths, which nobody gave, and +inf of empty rows to -inf.
    assert traffic.written == {"full": ROWS * 4, "nan_to_num_": ROWS * heads * 4}
    assert traffic.launches.total() == 2


def test_lengths_that_are_given_cost_their_clamp():
    provider, given = Recorded(), operands(64)
    traffic = traffic_of(provider, given, torch.full((1, ROWS), 100, dtype=torch.int32))
    assert is_the_callers(provider, given, "indices")
    assert traffic.written == {"clamp": ROWS * 4, "nan_to_num_": ROWS * 64 * 4}


def test_a_base_of_two_costs_one_pass_over_the_lse():
    traffic = traffic_of(Recorded(base_two=True), operands(64))
    assert traffic.written == {"full": ROWS * 4, "mul_": ROWS * 64 * 4, "nan_to_num_": ROWS * 64 * 4}


def test_a_provider_that_reads_past_a_length_costs_one_copy_of_the_ids():
    provider, given = Recorded(ends=False), operands(64)
    traffic = traffic_of(provider, given)
    assert not is_the_callers(provider, given, "indices")
    assert is_the_callers(provider, given, "query")
    small = {name: size for name, size in traffic.written.items() if size < ROWS * WIDTH}
    large = {name: size for name, size in traffic.written.items() if name not in small}
    # A mask of one byte a slot beside the ids themselves.
    assert large == {"where": IDS, "lt": ROWS * WIDTH, "nan_to_num_": ROWS * 64 * 4}
    assert sum(small.values()) < 4 * (ROWS + WIDTH) + 8


@pytest.mark.parametrize("heads", [8, 16, 32, 96])
def test_padding_writes_each_element_of_the_query_once_and_each_of_the_result_once(heads):
    provider, given = Recorded(), operands(heads)
    traffic = traffic_of(provider, given)
    run = 64 if heads <= 64 else 128
    query, out, lse = (ROWS * count for count in (576 * 2, 512 * 2, 4))
    assert traffic.written == {
        "zero_": (run - heads) * query,
        "copy_": heads * (query + out + lse),
        "full": ROWS * 4,
        "nan_to_num_": run * lse,
    }
    assert provider.handed["query"].shape[1] == run
    assert torch.equal(provider.handed["query"][:, :heads], given["query"][:, 0])
    assert not provider.handed["query"][:, heads:].any()


def test_int64_ids_are_copied_once_into_int32():
    provider, given = Recorded(), operands(64, torch.int64)
    traffic = traffic_of(provider, given)
    assert provider.handed["indices"].dtype == torch.int32
    assert traffic.written["_to_copy"] == IDS
    assert traffic.written["where"] == 0
    # Judged before the cast: one masked copy in the caller's own type.
    assert traffic.written["masked_fill"] == 2 * IDS


def test_rows_of_a_wider_tensor_are_read_where_they_are():
    provider, given = Recorded(), operands(64)
    wide = torch.randn(ROWS, 1, 128, 576).bfloat16()
    given["query"] = wide[:, :, 64:]
    traffic = traffic_of(provider, given)
    assert is_the_callers(provider, given, "query")
    assert traffic.total == ROWS * 4 + ROWS * 64 * 4
