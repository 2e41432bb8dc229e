"""What ``torch_dense`` can do, as data: everything, slowly. The stage functions import nothing but torch."""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from dsa_backends.torch_dense import (
    attention_backward,
    attention_forward,
    gqa,
    indexer_loss,
    indexer_target,
    indexer_topk,
)
from dsa_dispatch._backend import BackendSpec, StageSpec
from dsa_dispatch._call import CallSpec
from dsa_dispatch._capability import Capability, Scratch
from dsa_dispatch._registry.hooks import hookimpl

SCORE_ERROR: Final = 2.0**-15
"""Relative to the sum of |w q k|. A product of Di channels, summed in any order, errs by at most Di * 2**-24
of its sum of absolute products; rounding the weight, weighting, and adding Hi heads make it
(Di + Hi + 1) * 2**-24, which holds up to Di + Hi = 511. fp64 inputs, summed in fp64, stay far below."""


def _dtype(call: CallSpec) -> torch.dtype:
    dtype = getattr(torch, call.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _device_type(call: CallSpec) -> str:
    return call.device.partition(":")[0]


def _indexer_topk(call: CallSpec) -> Scratch:
    return indexer_topk.buffer_plan(
        keys=call.keys,
        topk=call.width,
        heads=call.index_heads,
        channels=call.index_channels,
        dtype=_dtype(call),
        device_type=_device_type(call),
    ).scratch()


def _indexer_target(call: CallSpec) -> Scratch:
    if not call.sparse_loss:
        return indexer_target.dense_plan(keys=call.keys, qk=call.qk_channels, dtype=_dtype(call)).scratch()
    return indexer_target.sparse_plan(
        width=call.width,
        heads=call.heads,
        qk=call.qk_channels,
        dtype=_dtype(call),
        device_type=_device_type(call),
        deterministic=call.deterministic,
    ).scratch()


def _indexer_loss(call: CallSpec) -> Scratch:
    if not call.sparse_loss:
        return indexer_loss.dense_plan(
            keys=call.keys, channels=call.index_channels, dtype=_dtype(call)
        ).scratch()
    return indexer_loss.sparse_plan(
        width=call.width,
        heads=call.index_heads,
        channels=call.index_channels,
        dtype=_dtype(call),
        device_type=_device_type(call),
        deterministic=call.deterministic,
    ).scratch()


def _attention_forward(call: CallSpec) -> Scratch:
    return attention_forward.buffer_plan(
        width=call.width,
        heads=call.heads,
        qk=call.qk_channels,
        v=call.v_channels,
        dtype=_dtype(call),
        device_type=_device_type(call),
        deterministic=call.deterministic,
    ).scratch()


def _attention_backward(call: CallSpec) -> Scratch:
    return attention_backward.buffer_plan(
        width=call.width,
        heads=call.heads,
        qk=call.qk_channels,
        dtype=_dtype(call),
        device_type=_device_type(call),
        deterministic=call.deterministic,
    ).scratch()


def _gqa_forward(call: CallSpec) -> Scratch:
    return gqa.forward_plan(
        width=call.width,
        group=call.heads // call.kv_heads,
        qk=call.qk_channels,
        v=call.v_channels,
        dtype=_dtype(call),
        device_type=_device_type(call),
        deterministic=call.deterministic,
    ).scratch()


def _gqa_backward(call: CallSpec) -> Scratch:
    return gqa.backward_plan(
        width=call.width,
        group=call.heads // call.kv_heads,
        qk=call.qk_channels,
        v=call.v_channels,
        dtype=_dtype(call),
        device_type=_device_type(call),
        deterministic=call.deterministic,
    ).scratch()


_ANY: Final = Capability(
    layouts=frozenset({"bshd", "thd"}),
    context_parallel=frozenset({"none", "contiguous", "zigzag"}),
    deterministic=True,
    tie_rule="lower_index",
    score_error=SCORE_ERROR,
)

_HERE: Final = "dsa_backends.torch_dense"

SPEC: Final = BackendSpec(
    name="torch_dense",
    rank=-100,
    doc="Plain PyTorch on any device and float type: the oracle, and the fallback where nothing else fits.",
    stages={
        "indexer_topk": StageSpec(
            dataclasses.replace(_ANY, scratch=_indexer_topk), f"{_HERE}.indexer_topk:indexer_topk"
        ),
        "indexer_target": StageSpec(
            dataclasses.replace(_ANY, scratch=_indexer_target), f"{_HERE}.indexer_target:indexer_target"
        ),
        "indexer_loss": StageSpec(
            dataclasses.replace(_ANY, scratch=_indexer_loss), f"{_HERE}.indexer_loss:indexer_loss"
        ),
        "attention_forward": StageSpec(
            dataclasses.replace(_ANY, scratch=_attention_forward),
            f"{_HERE}.attention_forward:attention_forward",
        ),
        "attention_backward": StageSpec(
            dataclasses.replace(_ANY, scratch=_attention_backward),
            f"{_HERE}.attention_backward:attention_backward",
        ),
        "gqa_forward": StageSpec(dataclasses.replace(_ANY, scratch=_gqa_forward), f"{_HERE}.gqa:gqa_forward"),
        "gqa_backward": StageSpec(
            dataclasses.replace(_ANY, scratch=_gqa_backward), f"{_HERE}.gqa:gqa_backward"
        ),
    },
)


@hookimpl
def dsa_dispatch_backends() -> list[BackendSpec]:
    return [SPEC]
