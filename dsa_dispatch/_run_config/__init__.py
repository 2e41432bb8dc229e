"""Configuration files: the sizes of a model, how a small one is trained, and which kernels are wished for."""

from __future__ import annotations

from dsa_dispatch._run_config.files import load_preset, parse_config, preset_names, read_config
from dsa_dispatch._run_config.recipe import RunConfig, TrainingRecipe
from dsa_dispatch._run_config.shape import ModelShape

__all__ = [
    "ModelShape",
    "RunConfig",
    "TrainingRecipe",
    "load_preset",
    "parse_config",
    "preset_names",
    "read_config",
]
