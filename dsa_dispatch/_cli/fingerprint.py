"""``dsa-dispatch fingerprint``: what must be equal on every rank for them to decide alike."""

from __future__ import annotations

import json
import platform
from typing import Annotated, Any

import torch
import typer

from dsa_dispatch._cli.output import emit
from dsa_dispatch._dispatch.decision import settings_on
from dsa_dispatch._dispatch.device import device_info
from dsa_dispatch._dispatch.table import policy_of
from dsa_dispatch._runtime import current
from dsa_dispatch._version import __version__


def facts() -> dict[str, Any]:
    """Registry fingerprint, versions, device and settings of this process."""
    runtime = current()
    policy = policy_of(runtime, "")
    cuda = torch.cuda.is_available()
    info = device_info(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
    return {
        "registry": runtime.snapshot.fingerprint(),
        "dsa_dispatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": info.name,
        "compute_capability": list(info.compute_capability) if info.compute_capability else None,
        "settings": {setting.name: [setting.value, setting.source] for setting in settings_on(info, policy)},
    }


def fingerprint(json_: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """Show what decisions on this machine depend on; compare it between ranks."""
    found = facts()
    if json_:
        emit(json.dumps(found, indent=2))
        return
    lines = [f"{name}: {value}" for name, value in found.items() if name != "settings"]
    lines += [f"{name} = {value} (from {source})" for name, (value, source) in found["settings"].items()]
    emit("\n".join(lines))
