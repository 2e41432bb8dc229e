"""Lets the tests of this folder import the fake beside them, and that of the backend that ``cudnn`` also names."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "flash_mla")]
