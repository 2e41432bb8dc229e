"""The cuDNN and FlashMLA backends on one GPU: what they answer against fp64, and what they cost beside the kernels
that they call.

Run from the repository root, where the vendor packages can be imported:
``PYTHONPATH=.:backends:$PYTHONPATH python benchmarks/vendor/h200.py --out FOLDER [--only attention,topk,loss]``.
``--quick`` takes the cases that need few compiles.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from attentions import check_attention, check_delta, check_more
from common import RESULTS, environment, guarded, note
from indexers import check_conformance, check_loss, check_topk
from speed import check_speed

import dsa_dispatch
from dsa_backends.cudnn_dsa import attention_backward as cudnn_backward
from dsa_backends.cudnn_dsa import attention_forward as cudnn_forward
from dsa_backends.cudnn_dsa.spec import SPEC as CUDNN
from dsa_backends.flash_mla import attention_forward as flash_forward
from dsa_backends.flash_mla.spec import SPEC as FLASHMLA
from dsa_backends.torch_dense.spec import SPEC as TORCH_DENSE
from dsa_backends.triton_kernels.spec import SPEC as TRITON

PARTS = {
    "attention": check_attention,
    "delta": check_delta,
    "topk": check_topk,
    "loss": check_loss,
    "more": check_more,
    "conformance": check_conformance,
    "speed": check_speed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--commit", default="")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    torch.empty(1, device="cuda")
    for spec in (TORCH_DENSE, TRITON, CUDNN, FLASHMLA):
        if spec.name not in {entry.name for entry in dsa_dispatch.list_backends()}:
            dsa_dispatch.register_backend(spec)
    for name, provider in (
        ("flashmla attention_forward", flash_forward.provider),
        ("cudnn attention_backward", cudnn_backward.provider),
        ("cudnn attention_forward", cudnn_forward.provider),
    ):
        begun = time.time()
        try:
            note(f"provider {name}", found=provider(), seconds=time.time() - begun)
        except Exception as declined:
            note(f"provider {name}", declined=str(declined), seconds=time.time() - begun)
    try:
        for part in chosen.only.split(","):
            with guarded(part):
                PARTS[part](chosen.quick)
    finally:
        # An interrupted run keeps what it found.
        write_record(chosen.out, chosen.commit)


def write_record(folder: Path, commit: str) -> None:
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "command": "benchmarks/vendor/h200.py",
        **environment(),
        "results": RESULTS,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vendor.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
