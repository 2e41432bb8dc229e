"""The main job of ``dsa-dispatch run``: a small language model whose attention goes through the dispatch layer."""

from __future__ import annotations

from dsa_dispatch._quickstart.report import RunReport, StageRun
from dsa_dispatch._quickstart.run import run
from dsa_dispatch._quickstart.train import StepRecord

__all__ = ["RunReport", "StageRun", "StepRecord", "run"]
