"""What the parts of the vendor benchmark share: operands, comparison with fp64, notes."""

from __future__ import annotations

import platform
import subprocess
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

import dsa_dispatch

SCALE = 576**-0.5
RESULTS: list[dict[str, Any]] = []
VENDOR = {"dsa_kernel_backend": "cudnn", "dsa_kernel_fallback": "error"}
DENSE = {"dsa_kernel_backend": "torch_dense", "dsa_kernel_fallback": "error", "memory_budget": 8 << 30}


def note(what: str, **fields: Any) -> None:
    RESULTS.append({"what": what, **fields})
    shown = " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in fields.items()
    )
    print(f"{what}: {shown}", flush=True)


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """One failing part must not cost the others their lease of the GPU."""
    begun = time.time()
    try:
        yield
        print(f"-- {what} took {time.time() - begun:.1f} s", flush=True)
    except Exception as error:
        note(what, failed=f"{type(error).__name__}: {error}"[:2000])
        traceback.print_exc(limit=-4)


def error(got: Tensor, want: Tensor) -> float:
    want = want.double()
    difference = got.double() - want
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return float("nan")
    return float(difference[finite].norm() / want[finite].norm().clamp(min=1e-300))


def operands(
    rows: int,
    batch: int,
    heads: int,
    keys: int,
    width: int,
    channels: int = 576,
    seed: int = 0,
    holes: bool = True,
    dtype: torch.dtype = torch.bfloat16,
):
    make = torch.Generator("cuda").manual_seed(seed)
    q = torch.randn(rows, batch, heads, channels, generator=make, device="cuda").to(dtype)
    kv = torch.randn(keys, batch, 1, channels, generator=make, device="cuda").to(dtype)
    ids = (
        torch.rand(batch, rows, keys, generator=make, device="cuda").topk(width, sorted=False).indices.int()
        if width <= keys
        else torch.randint(0, keys, (batch, rows, width), generator=make, device="cuda").int()
    )
    length = None
    if holes:
        ids[torch.rand(ids.shape, generator=make, device="cuda") < 0.2] = -1
        ids[torch.rand(ids.shape, generator=make, device="cuda") < 0.05] = keys + 3
        ids[:, :, 5] = ids[:, :, 3]
        ids[:, 1] = -1
        length = torch.randint(0, width + 1, (batch, rows), generator=make, device="cuda").int()
        length[:, 2] = 0
        length[:, 3] = 1
    dout = torch.randn(rows, batch, heads, 512, generator=make, device="cuda").to(dtype)
    return q, kv, ids, length, dout


def attention(config, q, kv, ids, length, dout):
    q, kv = q.detach().requires_grad_(), kv.detach().requires_grad_()
    out, lse = dsa_dispatch.run_fused_absorbed_sparse_attention(
        config, q, kv, ids, SCALE, 512, length, return_lse=True
    )
    dq, dkv = torch.autograd.grad(out, (q, kv), dout)
    return {"out": out.detach(), "lse": lse, "dq": dq, "dkv": dkv}


def indexer(
    rows: int, batch: int, heads: int, keys: int, seed: int, exact: bool, weights: torch.dtype = torch.float32
):
    make = torch.Generator("cuda").manual_seed(seed)
    if exact:
        q = torch.randint(-2, 3, (rows, batch, heads, 128), generator=make, device="cuda").bfloat16()
        k = torch.randint(-2, 3, (keys, batch, 128), generator=make, device="cuda").bfloat16()
        w = torch.randint(-2, 3, (rows, batch, heads), generator=make, device="cuda").to(weights)
        return q, k, w
    q = torch.randn(rows, batch, heads, 128, generator=make, device="cuda").bfloat16()
    k = torch.randn(keys, batch, 128, generator=make, device="cuda").bfloat16()
    w = (torch.randn(rows, batch, heads, generator=make, device="cuda") * (heads * 128) ** -0.5).to(weights)
    return q, k, w


def environment() -> dict[str, Any]:
    packages = {}
    for name in (
        "torch",
        "triton",
        "nvidia-cudnn-frontend",
        "nvidia-cutlass-dsl",
        "apache-tvm-ffi",
        "sglang-kernel",
    ):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "none"
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "card": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "python": platform.python_version(),
        "packages": packages,
    }
