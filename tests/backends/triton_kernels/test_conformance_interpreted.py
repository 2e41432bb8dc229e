"""The conformance suite on the very kernels, under Triton's interpreter on the CPU.

In a process of its own, since Triton decides for good at its first import. In fp16 and fp32 alone: bf16 is wrong under
the interpreter without an error. At the small size: a program of the interpreter takes milliseconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

from dsa_backends.triton_kernels.spec import SPEC

COMMAND = "conformance triton --dtypes float16,float32 --size small --json"


def test_every_stage_passes_every_check_on_the_cpu():
    entry = "from dsa_dispatch._cli import main; main()"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", entry, *COMMAND.split()]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.stdout, run.stderr[-3000:]
    outcomes = json.loads(run.stdout)
    assert [outcome for outcome in outcomes if outcome["result"] != "passed"] == []
    assert run.returncode == 0
    assert {outcome["device"] for outcome in outcomes} == {"cpu"}
    counts = Counter(outcome["stage"] for outcome in outcomes)
    # So many at least, so that an empty run is no pass.
    assert {stage for stage, count in counts.items() if count > 50} == set(SPEC.stages)
