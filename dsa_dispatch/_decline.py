"""A decline: the coded reason why one stage of one backend cannot serve a call."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum


class DeclineCode(str, Enum):
    """Stable names of the reasons. Programs may branch on them; the texts around them may change."""

    NOT_INSTALLED = "NOT_INSTALLED"
    IMPORT_FAILED = "IMPORT_FAILED"
    VERSION = "VERSION"
    API_MISMATCH = "API_MISMATCH"
    SELF_TEST_FAILED = "SELF_TEST_FAILED"
    DISABLED = "DISABLED"
    STAGE_NOT_PROVIDED = "STAGE_NOT_PROVIDED"
    DEVICE = "DEVICE"
    COMPUTE_CAPABILITY = "COMPUTE_CAPABILITY"
    DTYPE = "DTYPE"
    HEADS = "HEADS"
    CHANNELS = "CHANNELS"
    INDEX_WIDTH = "INDEX_WIDTH"
    LAYOUT = "LAYOUT"
    CONTEXT_PARALLEL = "CONTEXT_PARALLEL"
    PACKED = "PACKED"
    GRAD = "GRAD"
    DETERMINISM = "DETERMINISM"
    TIE_RULE = "TIE_RULE"
    MEMORY = "MEMORY"
    LIMIT = "LIMIT"
    COMPILE_MODE = "COMPILE_MODE"
    GRAPH_CAPTURE = "GRAPH_CAPTURE"
    EXTRA_CHECK = "EXTRA_CHECK"
    RUNTIME = "RUNTIME"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Decline:
    """Why not: ``code field: got X, supports Y. hint``."""

    code: DeclineCode
    field: str
    got: str
    supported: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.code} {self.field}: got {self.got}, supports {self.supported}."
        return f"{text} {self.hint}" if self.hint else text

    def without_hint(self) -> Decline:
        """For a text that gives the hints of many declines once, at its end."""
        return dataclasses.replace(self, hint="")

    def to_json(self) -> dict[str, str]:
        return {
            "code": self.code.value,
            "field": self.field,
            "got": self.got,
            "supported": self.supported,
            "hint": self.hint,
        }
