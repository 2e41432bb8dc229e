"""``dsa-dispatch explain``: who would serve a call of a given model, and why the others would not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import torch
import typer

from dsa_dispatch._call import DeviceInfo
from dsa_dispatch._cli.dtypes import dtype_of
from dsa_dispatch._cli.output import Format, emit
from dsa_dispatch._dispatch.decision import Decision
from dsa_dispatch._dispatch.explain import joined
from dsa_dispatch._operations.public import explain as explain_call
from dsa_dispatch._policy.config import DSAConfig
from dsa_dispatch._policy.policy import Policy
from dsa_dispatch._policy.values import nearest
from dsa_dispatch._run_config import ModelShape, load_preset, preset_names
from dsa_dispatch._run_config.shape import ATTENTION, TOPK, TOPK_WITH_LOSS
from dsa_dispatch._stages import OPERATION_GROUPS
from dsa_dispatch.errors import ConfigError

WHOLE: Final = "run_fused_dsa_attention"


def explain(
    operation: Annotated[str, typer.Argument(help="One of " + ", ".join(OPERATION_GROUPS))],
    model: Annotated[
        str, typer.Option(help=f"The shapes: {', '.join(preset_names())}, or a YAML file.")
    ] = "deepseek-v3.2",
    rows: Annotated[int, typer.Option(min=0, help="Query rows.")] = 4096,
    keys: Annotated[int | None, typer.Option(min=0, help="Keys; default: as many as rows.")] = None,
    batch: Annotated[int, typer.Option(min=0)] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks the heads are divided over.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32 or float64; bf16, fp16, fp32, fp64.")
    ] = "bfloat16",
    training: Annotated[
        bool, typer.Option(help="With gradients, so that backward stages are decided too.")
    ] = True,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda, which must be here. Default: cpu, or what is described.")
    ] = None,
    compute_capability: Annotated[
        str | None, typer.Option(help="Such as 9.0: describe a CUDA device that need not be here.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="dsa_kernel_backend.")] = None,
    fallback: Annotated[str | None, typer.Option(help="dsa_kernel_fallback.")] = None,
    deterministic: Annotated[bool, typer.Option(help="Ask for bitwise reproducible kernels.")] = False,
    format: Annotated[Format, typer.Option()] = Format.text,
    output: Annotated[Path | None, typer.Option(help="Write here instead of standard output.")] = None,
) -> None:
    """Explain a decision without running it. Exit status 1 when nobody would serve the call.

    Example: dsa-dispatch explain run_fused_dsa_attention --model glm-5.2 --tp 8
    """
    config = DSAConfig(dsa_kernel_backend=backend, dsa_kernel_fallback=fallback)
    kind, info = _device(device, compute_capability)
    shape = load_preset(model).model
    if operation not in OPERATION_GROUPS:
        raise ConfigError(
            f"unknown operation {operation!r}; known: {', '.join(OPERATION_GROUPS)}."
            f"{nearest(operation, OPERATION_GROUPS)}"
        )
    calls = [
        dataclasses.replace(
            shape.call(
                part,
                rows=rows,
                keys=keys,
                batch=batch,
                tensor_parallel=tp,
                training=training,
                dtype=dtype_of(dtype),
                device=kind,
            ),
            deterministic=deterministic,
        )
        for part in _parts(operation, shape)
    ]
    decision = _joined(
        operation, [explain_call(call.operation, config, call=call, device=info) for call in calls]
    )
    decision = dataclasses.replace(decision, policy=_as_typed(decision.policy))
    form = {
        Format.text: decision.to_text,
        Format.markdown: decision.to_markdown,
        Format.json: decision.to_json,
    }
    emit(form[format](), output)
    if not decision.served:
        raise typer.Exit(1)


def _as_typed(policy: Policy) -> Policy:
    """A policy that names the options which made its explicit config."""
    settings = tuple(
        dataclasses.replace(
            setting, source="--fallback" if setting.name.endswith("fallback") else "--backend"
        )
        if setting.source == "config"
        else setting
        for setting in policy.settings
    )
    return dataclasses.replace(policy, settings=settings)


def _parts(operation: str, shape: ModelShape) -> tuple[str, ...]:
    """What a layer of this model calls for an operation: a whole attention is a selection and an attention over it,
    and the two may differ in keys and width."""
    if operation != WHOLE:
        return (operation,)
    return (TOPK_WITH_LOSS if TOPK_WITH_LOSS in shape.operations else TOPK, ATTENTION)


def _joined(operation: str, decisions: Sequence[Decision]) -> Decision:
    first, last = decisions[0], decisions[-1]
    call = dataclasses.replace(
        first.call,
        operation=operation,
        keys=last.call.keys,
        width=last.call.width,
        needs_grad=first.call.needs_grad | last.call.needs_grad,
    )
    return joined(decisions, call)


def _device(name: str | None, compute_capability: str | None) -> tuple[str, DeviceInfo | None]:
    """The type of the device to decide for, and its description where it need not be here."""
    if name not in (None, "cpu", "cuda"):
        raise ConfigError(
            f"--device: got {name!r}, supports cpu and cuda. Describe another CUDA device with --compute-capability"
        )
    if compute_capability is not None:
        if name == "cpu":
            raise ConfigError(
                f"--device cpu contradicts --compute-capability {compute_capability}, which describes a CUDA device. "
                f"Leave one of them out"
            )
        return "cuda", _described(compute_capability)
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} sees no CUDA device here. Describe one instead: "
            f"--compute-capability 9.0"
        )
    return name or "cpu", None


def _described(text: str) -> DeviceInfo:
    if not re.fullmatch(r"[0-9]{1,2}\.[0-9]", text):
        raise ConfigError(f"--compute-capability: got {text!r}, expected major.minor such as 9.0")
    major, minor = map(int, text.split("."))
    capability = (major, minor)
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
