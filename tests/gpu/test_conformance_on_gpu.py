"""The conformance suite on a GPU: the reference passes there too, and a wait for the device is found."""

from __future__ import annotations

import pytest
import torch

from dsa_backends.torch_dense.attention_forward import attention_forward
from dsa_dispatch.testing import (
    BackendConformance,
    ConformanceError,
    FakeBackend,
    conformance_checks,
    isolated_registry,
)


class TestReferenceOnGpu(BackendConformance):
    backend = "torch_dense"

    @classmethod
    def checks(cls):
        return tuple(check for check in super().checks() if check.device.startswith("cuda"))


def _no_synchronisation(function):
    fake = FakeBackend(
        "candidate", ["attention_forward"], replace={"attention_forward": function}, capture_safe=True
    )
    with isolated_registry(fake.spec, installed=True):
        (check,) = [check for check in conformance_checks("candidate") if check.name == "no synchronisation"]
        check.run()


def test_waiting_for_the_device_is_found_where_capture_safety_is_declared():
    def waits(q, kv, indices, length, **rest):
        int(length.max())
        return attention_forward(q, kv, indices, length, **rest)

    with pytest.raises(
        ConformanceError, match="capture_safe is declared, but the stage waits for the device"
    ):
        _no_synchronisation(waits)


def test_a_stage_that_does_not_wait_passes():
    def zeros(q, kv, indices, length, *, scale, v_channels, rows, options):
        out = torch.zeros(q.shape[0], q.shape[1], v_channels, dtype=q.dtype, device=q.device)
        return out, torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)

    _no_synchronisation(zeros)
