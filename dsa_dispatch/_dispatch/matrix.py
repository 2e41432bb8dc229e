"""The capability matrix: what every backend declares for every stage, and how it stands on this machine."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from dataclasses import dataclass

import torch

from dsa_dispatch._backend import BackendSpec
from dsa_dispatch._capability import Capability
from dsa_dispatch._decline import Decline
from dsa_dispatch._dispatch.device import device_info
from dsa_dispatch._dispatch.rules import rule_faults
from dsa_dispatch._registry.availability import installation_declines
from dsa_dispatch._runtime import current
from dsa_dispatch._stages import STAGES, Stage

_COLUMNS = (
    "backend",
    "stage",
    "devices",
    "dtypes",
    "heads",
    "channels",
    "width",
    "rows",
    "promises",
    "verified",
)


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One stage of one backend, in words. ``here`` says how it stands on this machine, judged without an import."""

    backend: str
    stage: Stage
    devices: str
    dtypes: str
    heads: str
    channels: str
    width: str
    rows: str
    promises: str
    verified: str
    here: str


@dataclass(frozen=True, slots=True)
class CapabilityMatrix:
    """All rows, backends by rank, stages in their order."""

    rows: tuple[MatrixRow, ...]

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int = 80) -> str:
        """A paragraph per backend and stage, folded at ``width`` characters: its state on this machine, and what it
        declares. Eleven columns side by side would be eight times as wide as a terminal."""
        return "\n".join(line for row in self.rows for line in _paragraph(row, width))

    def to_markdown(self) -> str:
        """A table of what is declared: the same on every machine, so that documentation can hold it."""
        lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
        lines += [
            "| " + " | ".join(str(getattr(row, name)).replace("|", "\\|") for name in _COLUMNS) + " |"
            for row in self.rows
        ]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        return json.dumps([dataclasses.asdict(row) for row in self.rows], indent=2)


_FIELDS = _COLUMNS[2:]
_INDENT = 2 + max(map(len, _FIELDS)) + 2


def _paragraph(row: MatrixRow, width: int) -> list[str]:
    def folded(first: str, text: str, indent: int) -> list[str]:
        return textwrap.wrap(
            f"{first}{text}",
            max(width, _INDENT + 20),
            subsequent_indent=" " * indent,
            # A path or a version range is copied: it is not cut, and not at its hyphens.
            break_long_words=False,
            break_on_hyphens=False,
        )

    lines = folded(f"{row.backend} {row.stage}: ", row.here, 2)
    for name in _FIELDS:
        lines += folded(f"  {name}".ljust(_INDENT), getattr(row, name), _INDENT)
    return lines


def capability_matrix() -> CapabilityMatrix:
    """What every registered backend declares. Imports no kernel."""
    rows = []
    for entry in current().snapshot.ranked():
        for stage in STAGES:
            if stage in entry.spec.stages:
                rows.append(_row(entry.spec, stage))
    return CapabilityMatrix(tuple(rows))


def _row(spec: BackendSpec, stage: Stage) -> MatrixRow:
    capability = spec.stages[stage].capability
    heads = str(capability.heads)
    if stage.startswith("gqa"):
        heads = f"{heads}; key heads {capability.kv_heads}"
    return MatrixRow(
        backend=spec.name,
        stage=stage,
        devices=_devices(capability),
        dtypes=_dtypes(capability),
        heads=heads,
        channels=str(capability.channels),
        width=str(capability.width),
        rows=_rows(capability, stage),
        promises=_promises(capability, stage),
        verified=capability.verified,
        here=_here(spec, stage),
    )


def _devices(capability: Capability) -> str:
    if capability.devices is None:
        return "any"
    text = ", ".join(sorted(capability.devices))
    if capability.compute_capabilities is not None:
        ranges = [
            f"{low[0]}.{low[1]}≤CC<{high[0]}.{high[1]}" for low, high in capability.compute_capabilities
        ]
        text += f" ({', '.join(ranges)})"
    return text


def _dtypes(capability: Capability) -> str:
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
    return ", ".join(short[name] for name in short if name in capability.dtypes)


def _rows(capability: Capability, stage: Stage) -> str:
    if stage.startswith(("attention", "gqa")):
        return f"ids: {capability.index_form}"
    parts: list[str] = [*sorted(capability.layouts), *sorted(capability.bounds)]
    parts += [f"CP {kind}" for kind in sorted(capability.context_parallel) if kind != "none"]
    return ", ".join(parts)


def _promises(capability: Capability, stage: Stage) -> str:
    parts = []
    if capability.deterministic:
        parts.append("deterministic")
    if stage == "indexer_topk":
        parts.append(f"ties {capability.tie_rule.replace('_', ' ')}")
        parts += ["sorted"] if capability.sorted else []
    if capability.capture_safe:
        parts.append("graph capture")
    for name, limit in (
        ("rows", capability.max_rows),
        ("keys", capability.max_keys),
        ("elements", capability.max_elements),
    ):
        parts += [f"up to {limit} {name}"] if limit is not None else []
    if capability.gradient_error:
        parts.append(f"gradient error up to {capability.gradient_error:g} in bf16")
    return ", ".join(parts) or "-"


def _here(spec: BackendSpec, stage: Stage) -> str:
    missing = installation_declines(spec, stage)
    if missing:
        return "; ".join(map(_short, missing))
    capability = spec.stages[stage].capability
    here = {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    if capability.devices is not None and not capability.devices & here:
        return f"DEVICE needs {', '.join(sorted(capability.devices))}"
    if "cuda" in here and capability.compute_capabilities is not None:
        have = device_info(torch.device("cuda", torch.cuda.current_device())).compute_capability
        if have is None or not any(low <= have < high for low, high in capability.compute_capabilities):
            return f"COMPUTE_CAPABILITY here {have}"
    usable = sorted(here if capability.devices is None else here & capability.devices)
    faults = [fault.decline for kind in usable for fault in rule_faults(capability, stage, kind)]
    return "; ".join(dict.fromkeys(map(_short, faults))) or "ready"


def _short(decline: Decline) -> str:
    return f"{decline.code} {decline.field} ({decline.got})"
