"""One interface between models that train with DeepSeek Sparse Attention and the kernels that can run it."""

from __future__ import annotations

from dsa_dispatch import errors
from dsa_dispatch._backend import API_VERSION, BackendSpec, StageSpec
from dsa_dispatch._call import CallSpec, DeviceInfo, RowLayout, StageOptions
from dsa_dispatch._capability import AnyOf, Capability, Channels, Heads, IndexWidth, Requirement, Scratch
from dsa_dispatch._contract import LossTerms
from dsa_dispatch._decline import Decline, DeclineCode
from dsa_dispatch._dispatch.decision import Decision
from dsa_dispatch._dispatch.matrix import CapabilityMatrix, capability_matrix
from dsa_dispatch._dispatch.statistics import Stats, reset_stats, stats
from dsa_dispatch._operations.public import (
    TopK,
    TopKWithLoss,
    explain,
    run_fused_absorbed_sparse_attention,
    run_fused_dsa_attention,
    run_fused_gqa_sparse_attention,
    run_fused_qk_topk,
    run_fused_qk_topk_with_loss,
    use_fused_dsa_kernels,
)
from dsa_dispatch._policy.config import DSAConfig
from dsa_dispatch._policy.control import configure, use_backend
from dsa_dispatch._policy.files import load_config
from dsa_dispatch._registry.control import list_backends, refresh, register_backend, unregister_backend
from dsa_dispatch._registry.hooks import hookimpl
from dsa_dispatch._version import __version__

__all__ = [
    "API_VERSION",
    "AnyOf",
    "BackendSpec",
    "CallSpec",
    "Capability",
    "CapabilityMatrix",
    "Channels",
    "DSAConfig",
    "Decision",
    "Decline",
    "DeclineCode",
    "DeviceInfo",
    "Heads",
    "IndexWidth",
    "LossTerms",
    "Requirement",
    "RowLayout",
    "Scratch",
    "StageOptions",
    "StageSpec",
    "Stats",
    "TopK",
    "TopKWithLoss",
    "__version__",
    "capability_matrix",
    "configure",
    "errors",
    "explain",
    "hookimpl",
    "list_backends",
    "load_config",
    "refresh",
    "register_backend",
    "reset_stats",
    "run_fused_absorbed_sparse_attention",
    "run_fused_dsa_attention",
    "run_fused_gqa_sparse_attention",
    "run_fused_qk_topk",
    "run_fused_qk_topk_with_loss",
    "stats",
    "unregister_backend",
    "use_backend",
    "use_fused_dsa_kernels",
]
