"""Sparse forwards with the signatures, limits and misbehaviours of the published ones, in plain PyTorch."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

import torch

from dsa_backends.flash_mla import providers
from dsa_backends.flash_mla.slots import LN2

TILE = 64


def kernel(q, kv, indices, sm_scale, d_v, topk_length, base_two=False, ends=False):
    """What every build does: 64 or 128 heads, widths of 128, no empty call, +inf for an empty row.

    A key behind the length, in a tile that the length reaches, is loaded: its NaN leaks through a zero probability.
    ``ends`` is the kernel that loads none of them.
    """
    rows, heads, channels = q.shape
    if heads not in (64, 128):
        raise RuntimeError(f"Unsupported h_q: {heads}")
    if rows == 0:
        raise RuntimeError("Assertion failed: res == CUDA_SUCCESS")
    width = indices.shape[2]
    if width % 128 or not width:
        raise RuntimeError("topk % B_TOPK == 0")
    if channels not in (512, 576) or d_v != 512 or kv.shape[1] != 1 or indices.dtype != torch.int32:
        raise RuntimeError("unsupported shape or dtype")
    if q.stride(-1) != 1 or kv.stride(-1) != 1:
        raise RuntimeError("last dimension must be contiguous")
    ids = indices[:, 0]
    slots = torch.arange(width)
    reach = topk_length if topk_length is not None else torch.full((rows,), width)
    if bool((reach > width).any()):
        raise AssertionError("read past the row")
    inside = (ids >= 0) & (ids < kv.shape[0])
    valid = inside & (slots < reach[:, None])
    loaded = valid if ends else inside & (slots < -(-reach[:, None] // TILE) * TILE)
    keys = torch.where(loaded[..., None], kv[:, 0].float()[ids.clamp(0, kv.shape[0] - 1).long()], 0.0)
    score = torch.einsum("thd,twd->thw", q.float(), keys) * sm_scale
    score = torch.where(valid[:, None], score, -torch.inf)
    lse = score.logsumexp(2)
    weight = torch.where(valid[:, None], (score - lse[..., None]).exp(), 0.0)
    out = torch.einsum("thw,twd->thd", weight, keys[..., :512]).to(q.dtype)
    lse = torch.where(lse == -torch.inf, torch.inf, lse / LN2 if base_two else lse)
    return out, score.amax(2), lse


def main_signature(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    return kernel(q, kv, indices, sm_scale, d_v, topk_length)


def base_two_signature(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    return kernel(q, kv, indices, sm_scale, d_v, topk_length, base_two=True)


def hopper_signature(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    return kernel(q, kv, indices, sm_scale, d_v, topk_length, ends=True)


def branch_signature(q, kv, indices, sm_scale, indexer_topk, d_v=512, attn_sink=None, topk_length=None):
    results = kernel(q, kv, indices, sm_scale, d_v, topk_length)
    return (*results, results[2]) if indexer_topk else results


def oldest_signature(q, kv, indices, sm_scale, d_v=512):
    return kernel(q, kv, indices, sm_scale, d_v, None)


def operator(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    """As ``torch.ops.sgl_kernel.sparse_prefill_fwd`` of release 0.4.5."""
    return list(kernel(q, kv, indices, sm_scale, d_v, topk_length, base_two=True, ends=True))


@contextlib.contextmanager
def flash_mla(function) -> Iterator[None]:
    """The package ``flash_mla`` with ``function``, the only provider there is; None is a package that fails."""
    module = types.ModuleType("flash_mla")
    module.__spec__ = types.SimpleNamespace(submodule_search_locations=[])
    if function is not None:
        module.flash_mla_sparse_fwd = function
    providers._usable.cache_clear()
    before = sys.modules.get("flash_mla")
    sys.modules["flash_mla"] = module
    try:
        yield
    finally:
        del sys.modules["flash_mla"]
        if before is not None:
            sys.modules["flash_mla"] = before
        providers._usable.cache_clear()
