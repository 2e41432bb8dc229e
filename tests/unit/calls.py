"""Small calls that the unit tests share: tensors for every operation, and where a decision is asked for directly."""

from __future__ import annotations

import torch

import dsa_dispatch
from dsa_dispatch._dispatch.table import Request, plan_for
from dsa_dispatch._policy.config import explicit_text

CPU = torch.device("cpu")


def attention(rows=3, keys=5, width=2, heads=2, channels=6, batch=1, dtype=torch.float32, grad=False):
    """Arguments of ``run_fused_absorbed_sparse_attention`` after ``config``."""
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(rows, batch, heads, channels, generator=generator, dtype=dtype).requires_grad_(grad)
    key = torch.randn(keys, batch, 1, channels, generator=generator, dtype=dtype).requires_grad_(grad)
    indices = torch.arange(width, dtype=torch.int32).expand(batch, rows, width).contiguous()
    return query, key, indices, 0.5, channels - 2


def run_attention(config=None, **sizes):
    return dsa_dispatch.run_fused_absorbed_sparse_attention(config, *attention(**sizes))


def indexer(rows=3, keys=5, heads=2, channels=4, batch=1, grad=False):
    """``q, k, weights`` of the indexer."""
    generator = torch.Generator().manual_seed(11)
    q = torch.randn(rows, batch, heads, channels, generator=generator).requires_grad_(grad)
    k = torch.randn(keys, batch, channels, generator=generator).requires_grad_(grad)
    return q, k, torch.randn(rows, batch, heads, generator=generator).requires_grad_(grad)


def arguments(operation, grad=False):
    """Positional and keyword arguments of a small legal call of any operation, ``config=None`` first."""
    query, key, indices, scale, value = attention(grad=grad)
    q, k, weights = indexer(grad=grad)
    if operation == "run_fused_qk_topk":
        return (None, q, k, weights, 2), {}
    if operation == "run_fused_qk_topk_with_loss":
        return (None, q, k, weights, 2, None, None, None, query, key, scale, 1.0), {}
    if operation == "run_fused_absorbed_sparse_attention":
        return (None, query, key, indices, scale, value), {}
    if operation == "run_fused_gqa_sparse_attention":
        return (None, query, key, key.detach()[..., :value].requires_grad_(grad), indices, scale), {}
    up = torch.randn(2, 3, value).requires_grad_(grad)
    return (), {
        "config": None,
        "query": query,
        "key": key,
        "up_v_weight": up,
        "q_indexer": q,
        "k_indexer": k,
        "indexer_weights": weights,
        "indexer_topk": 2,
        "softmax_scale": scale,
        "loss_coeff": 1.0,
    }


REQUEST = Request("attention", "run_fused_absorbed_sparse_attention", v_channels=4, bounds="ranges").text()


def plan_attention(config=None, grad=False, **sizes):
    """The plan of an attention, from the table or decided now."""
    query, key, indices, *_ = attention(**sizes)
    return plan_for([query, key, indices], REQUEST, [grad, grad], explicit_text(config))


def chosen(config=None, stage="attention_forward", **sizes):
    """The backend that serves one stage of a small attention."""
    return plan_attention(config, **sizes).stages[stage].backend
