"""The clock of ``dsa-dispatch bench`` on a CUDA device."""

from __future__ import annotations

import json
import time

import pytest
import torch
from cli.command import invoke

from dsa_dispatch._bench.clock import CudaClock

MIB = 1 << 20


@pytest.fixture
def clock():
    return CudaClock(torch.device("cuda", 0), flush=True)


def test_time_spent_by_the_host_is_not_the_kernels(clock):
    small = torch.zeros(1 << 10, device="cuda")

    def launch_late():
        time.sleep(0.0005)
        return small + 1

    launch_late()
    times = sorted(clock.once(launch_late) for _ in range(9))
    assert times[4] < 0.25


def test_time_grows_with_the_work(clock):
    left = torch.randn(4096, 4096, device="cuda").bfloat16()
    clock.once(lambda: left @ left)
    one, eight = (
        sorted(clock.once(lambda n=n: [left @ left for _ in range(n)]) for _ in range(9))[4] for n in (1, 8)
    )
    assert 5 < eight / one < 11


def test_scratch_is_what_a_call_holds_beyond_inputs_and_outputs(clock):
    given = torch.zeros(8 * MIB, dtype=torch.int8, device="cuda")

    def call():
        scratch = torch.empty(64 * MIB, dtype=torch.int8, device="cuda")
        del scratch
        return given.clone()

    # The output takes the place of the scratch, which was 56 MiB larger.
    assert clock.scratch(call) == pytest.approx(56 * MIB, abs=2 * MIB)


def test_the_command_measures_and_scales_to_the_reference_card(tmp_path):
    out = tmp_path / "record.json"
    done = invoke("bench", "--stage", "attention_forward", "--rows", 64, "--keys", 512, "--topk", 128, "--heads", 16,
                  "--backend", "triton", "--repeats", 3, "--out", out)  # fmt: skip
    assert done.exit_code == 0, done.output
    (result,) = json.loads(out.read_text())["results"]
    assert result["state"] == "measured"
    assert result["scaled_tflops"] == pytest.approx(result["tflops"] * 672 / result["product_tflops"])
    assert result["scratch"] >= 0
