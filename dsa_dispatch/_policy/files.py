"""``load_config``: the kernel settings of a configuration file or preset."""

from __future__ import annotations

from pathlib import Path

from dsa_dispatch._policy.config import DSAConfig, config_from_mapping
from dsa_dispatch._run_config import load_preset


def load_config(source: str | Path) -> DSAConfig:
    """The ``kernels`` section of a YAML file or of a preset such as ``"glm-5.2"``.

    Raises ``ConfigError`` for an unknown preset, an unreadable file, an unknown key or a value that cannot be meant.
    """
    return config_from_mapping(load_preset(source).kernels, f"kernels section of {source}")
