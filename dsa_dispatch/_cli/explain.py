"""``dsa-dispatch explain``: who would serve a call of a given model, and why the others would not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from dsa_dispatch._call import CallSpec, DeviceInfo
from dsa_dispatch._cli.output import Format, emit
from dsa_dispatch._operations.public import explain as explain_call
from dsa_dispatch._policy.config import DSAConfig
from dsa_dispatch._run_config import load_preset
from dsa_dispatch._stages import OPERATION_GROUPS
from dsa_dispatch.errors import ConfigError


def explain(
    operation: Annotated[str, typer.Argument(help="One of " + ", ".join(OPERATION_GROUPS))],
    model: Annotated[
        str, typer.Option(help="A preset or YAML file that gives the shapes.")
    ] = "deepseek-v3.2",
    rows: Annotated[int, typer.Option(min=0, help="Query rows.")] = 4096,
    keys: Annotated[int | None, typer.Option(min=0, help="Keys; default: as many as rows.")] = None,
    batch: Annotated[int, typer.Option(min=0)] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks the heads are divided over.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64.")] = "bfloat16",
    training: Annotated[
        bool, typer.Option(help="With gradients, so that backward stages are decided too.")
    ] = True,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    compute_capability: Annotated[
        str | None, typer.Option(help="Such as 9.0: describe a CUDA device that need not be here.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="dsa_kernel_backend.")] = None,
    fallback: Annotated[str | None, typer.Option(help="dsa_kernel_fallback.")] = None,
    deterministic: Annotated[bool, typer.Option(help="Ask for bitwise reproducible kernels.")] = False,
    format: Annotated[Format, typer.Option()] = Format.text,
    output: Annotated[Path | None, typer.Option(help="Write here instead of standard output.")] = None,
) -> None:
    """Explain a decision without running it. Exit status 1 when nobody would serve the call."""
    config = DSAConfig(dsa_kernel_backend=backend, dsa_kernel_fallback=fallback)
    call = _call(operation, model, rows, keys, batch, tp, dtype, training)
    call = dataclasses.replace(
        call, device="cuda" if compute_capability else device, deterministic=deterministic
    )
    info = _described(compute_capability) if compute_capability else None
    decision = explain_call(operation, config, call=call, device=info)
    form = {
        Format.text: decision.to_text,
        Format.markdown: decision.to_markdown,
        Format.json: decision.to_json,
    }
    emit(form[format](), output)
    if not decision.served:
        raise typer.Exit(1)


def _call(
    operation: str, model: str, rows: int, keys: int | None, batch: int, tp: int, dtype: str, training: bool
) -> CallSpec:
    shape = load_preset(model).model
    if operation not in OPERATION_GROUPS:
        raise ConfigError(f"unknown operation {operation!r}; known: {', '.join(OPERATION_GROUPS)}")
    whole = "run_fused_dsa_attention"
    if operation != whole:
        return shape.call(
            operation, rows=rows, keys=keys, batch=batch, tensor_parallel=tp, training=training, dtype=dtype
        )
    parts = [
        shape.call(
            name, rows=rows, keys=keys, batch=batch, tensor_parallel=tp, training=training, dtype=dtype
        )
        for name in ("run_fused_qk_topk_with_loss", "run_fused_absorbed_sparse_attention")
    ]
    return dataclasses.replace(
        parts[0], operation=whole, needs_grad=parts[0].needs_grad | parts[1].needs_grad
    )


def _described(text: str) -> DeviceInfo:
    major, separator, minor = text.partition(".")
    if not (separator and major.isdecimal() and minor.isdecimal()):
        raise ConfigError(f"--compute-capability: got {text!r}, expected major.minor such as 9.0")
    capability = (int(major), int(minor))
    return DeviceInfo(
        type="cuda",
        name=f"CUDA device {text}",
        compute_capability=capability,
        total_memory=80 << 30,
        shared_memory=SHARED_MEMORY.get(capability, 101376),
    )


SHARED_MEMORY = {(8, 0): 166912, (8, 7): 166912, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448}
"""Bytes a block may opt in to (CUDA C++ programming guide, technical specifications per compute capability); others
99 KiB."""
