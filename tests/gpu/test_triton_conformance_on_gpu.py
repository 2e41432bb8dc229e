"""The conformance suite on the Triton backend: every value that it declares, compiled for this GPU."""

from __future__ import annotations

from dsa_dispatch.testing import BackendConformance


class TestTritonOnGpu(BackendConformance):
    backend = "triton"

    @classmethod
    def checks(cls):
        return tuple(check for check in super().checks() if check.device.startswith("cuda"))
