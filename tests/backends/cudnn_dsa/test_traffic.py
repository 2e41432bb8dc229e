"""What stands between a caller and the frontend's backward: no copy that grows with rows, heads and channels."""

from __future__ import annotations

import contextlib

import fake_frontend
import fake_providers
import pytest
import torch
from traffic import Traffic, anywhere

import dsa_dispatch as dsa
from dsa_backends.cudnn_dsa.spec import SPEC as CUDNN
from dsa_backends.flash_mla.spec import SPEC as FLASHMLA
from dsa_dispatch.testing import assert_backend_ran, isolated_registry

ROWS, KEYS, WIDTH = 64, 128, 256
CONFIG = {"dsa_kernel_backend": "cudnn", "dsa_kernel_fallback": "error"}
FEW = 8
"""Rows of the calls that a backend is known by; only they are computed."""
DKV = KEYS * 576


class Recorded(fake_frontend.SparseAttentionBackward):
    """A plan that keeps what it is handed, and computes nothing of a call of many rows."""

    handed: tuple = ()

    def execute(self, *operands, **options):
        if operands[0].shape[0] < FEW:
            return super().execute(*operands, **options)
        self.ready(options["workspace"], *operands)
        type(self).handed = operands


def forward(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    if q.shape[0] < FEW:
        return fake_providers.hopper_signature(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    return q.new_zeros(*q.shape[:2], d_v), None, q.new_zeros(q.shape[:2], dtype=torch.float32)


@contextlib.contextmanager
def vendors(hopper):
    with (
        isolated_registry(anywhere(CUDNN), anywhere(FLASHMLA)),
        fake_frontend.installed(forward=False, hopper=hopper, SparseAttentionBackward=Recorded),
        fake_providers.flash_mla(forward),
    ):
        yield


def backward(heads, hopper=True, needed=("query", "key")):
    """Traffic of the backward, and the caller's tensors by what the frontend calls them."""
    query, key = torch.randn(ROWS, 1, heads, 576).bfloat16(), torch.randn(KEYS, 1, 1, 576).bfloat16()
    ids = torch.zeros(1, ROWS, WIDTH, dtype=torch.int32)
    leaves = {"query": query, "key": key}
    for name in needed:
        leaves[name].requires_grad_()
    with vendors(hopper):
        for _ in range(2):
            # The first round finds the frontend and plans.
            out, lse = dsa.run_fused_absorbed_sparse_attention(
                CONFIG, query, key, ids, 0.05, 512, return_lse=True
            )
            dout = torch.randn_like(out)
            with Traffic() as traffic, assert_backend_ran("cudnn", "attention_backward"):
                torch.autograd.grad(out, [leaves[name] for name in needed], dout)
    given = {"q": query, "kv": key, "out": out, "dout": dout, "lse": lse, "topk_idxs": ids}
    return traffic, given


def as_given(given):
    """Which of the caller's tensors the frontend was handed themselves."""
    names = ("q", "kv", "out", "dout", "lse", "sink", "topk_idxs")
    handed = dict(zip(names, Recorded.handed, strict=False))
    return {name for name, tensor in given.items() if tensor.data_ptr() == handed[name].data_ptr()}


@pytest.mark.parametrize("heads", [2, 6, 16, 64, 128])
def test_every_tensor_reaches_the_kernel_as_it_is_whatever_the_heads(heads):
    traffic, given = backward(heads)
    assert as_given(given) == set(given)
    assert traffic.written == {
        # The keys' sum in fp32 with what autograd makes for the lse; the lengths and the sink.
        "zeros": DKV * 4 + ROWS * heads * 4,
        "full": ROWS * 4 + heads * 4,
        # The kernel's share into that sum, and the sum into the keys' type.
        "add_": DKV * 4,
        "copy_": DKV * 2,
    }


def test_without_a_gradient_of_the_keys_their_sum_costs_nothing():
    traffic, given = backward(16, needed=("query",))
    assert as_given(given) == set(given)
    assert traffic.written == {"zeros": ROWS * 16 * 4, "full": ROWS * 4 + 16 * 4}


def test_where_a_length_does_not_end_a_row_the_ids_are_copied_once():
    traffic, given = backward(16, hopper=False)
    assert as_given(given) == set(given) - {"topk_idxs"}
    assert traffic.written["where"] == ROWS * WIDTH * 4
    assert traffic.launches["where"] == 1


def test_one_head_is_padded_to_two():
    traffic, given = backward(1)
    assert as_given(given) == {"kv", "topk_idxs"}
    # Query, output, its gradient and the lse, each written once; the sum of the keys and the query's gradient.
    row = 2 * (576 + 512 + 512) + 4
    assert traffic.written["copy_"] == ROWS * row + DKV * 2 + ROWS * 576 * 2
    assert traffic.written["zero_"] == ROWS * row
