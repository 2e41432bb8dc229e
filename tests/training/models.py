"""A small model that uses every operation, a sharing model of modules, and what one training step of them ran."""

from __future__ import annotations

from collections import Counter

import torch
from contract import make
from torch import nn
from torch.utils.checkpoint import checkpoint

import dsa_dispatch as dsa
from dsa_dispatch.nn import AbsorbedSparseAttention, Indexer, rope_angles, rotate

ROWS, BATCH = 12, 2


def every_operation(x, wq, wk, wi, up):
    """All five operations with their losses: a scalar."""
    rows, batch, _ = x.shape
    query, key = (x @ wq).view(rows, batch, 2, 24), (x @ wk).view(rows, batch, 1, 24)
    q = (x @ wi).view(rows, batch, 2, 8)
    k, weights = q[:, :, 0], q[..., 0]
    out, loss = dsa.run_fused_dsa_attention(
        config=None, query=query, key=key, up_v_weight=up, q_indexer=q, k_indexer=k, indexer_weights=weights,
        indexer_topk=4, softmax_scale=0.3, loss_coeff=0.1,
    )  # fmt: skip
    chosen = dsa.run_fused_qk_topk(None, q, k, weights, 4)
    absorbed, lse = dsa.run_fused_absorbed_sparse_attention(
        None, query, key, chosen.indices, 0.3, 16, chosen.length, return_lse=True
    )
    learnt = dsa.run_fused_qk_topk_with_loss(
        None, q, k, weights, 3, None, None, None, query, key, 0.3, 0.2, sparse_loss=False
    )
    grouped = dsa.run_fused_gqa_sparse_attention(
        None, query, key, key[..., :16], learnt.indices, 0.3, learnt.length
    )
    return out.sum() + loss + (absorbed * grouped).sum() + learnt.loss + lse.mean()


def operation_inputs(rows=ROWS):
    x = make.normal(rows, BATCH, 16, seed=rows)
    shapes = ((16, 48), (16, 24), (16, 16), (2, 5, 16))
    return [x, *(make.normal(*shape, seed=number, grad=True) for number, shape in enumerate(shapes))]


def step(function, inputs):
    """``(value, gradients of the inputs that need one, how often each stage ran)`` of one step."""
    dsa.reset_stats()
    value = function(*inputs)
    value.backward()
    gradients = [tensor.grad for tensor in inputs if tensor.requires_grad]
    return value.detach(), gradients, stages_run()


def stages_run():
    runs = Counter()
    for (stage, _, _), count in dsa.stats().runs.items():
        runs[stage] += count
    return runs


def assert_same_step(got, wanted, tolerance=1e-10):
    """Value and gradients; fp64, where only the order of sums may differ."""
    torch.testing.assert_close(got[0], wanted[0], rtol=tolerance, atol=tolerance)
    for mine, other in zip(got[1], wanted[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


class Layer(nn.Module):
    """A residual layer: attention over keys it selects, or over those of another layer."""

    def __init__(self, computes=True, rope="half_split", pool=1, topk=4):
        super().__init__()
        self.query = nn.Linear(16, 2 * 12, bias=False)
        self.latent = nn.Linear(16, 8 + 4, bias=False)
        indexer = None
        if computes:
            indexer = Indexer(
                16,
                16,
                heads=2,
                channels=8,
                topk=topk,
                rope=None if pool > 1 else rope,
                pool=pool,
                row_chunk=8,
            )
        self.core = AbsorbedSparseAttention(2, 8, 8, 6, softmax_scale=12**-0.5, indexer=indexer)
        self.output = nn.Linear(2 * 6, 16, bias=False)

    def forward(self, x, shared=None, loss_coeff=0.1):
        angles = rope_angles(torch.arange(x.shape[0], device=x.device), 4)
        nope, turning = self.query(x).unflatten(-1, (2, 12)).split([8, 4], dim=-1)
        latent, key_turning = self.latent(x).split([8, 4], dim=-1)
        indexer = self.core.indexer
        pooled = indexer is not None and indexer.pool > 1
        out, selection = self.core(
            nope, rotate(turning, angles, "half_split"), latent, rotate(key_turning, angles, "half_split"),
            shared=shared, hidden=x, query_latent=x, angles=None if pooled else angles,
            loss_coeff=0.0 if pooled else loss_coeff,
        )  # fmt: skip
        return x + self.output(out.flatten(2)), selection


class SharingModel(nn.Module):
    """Layers by a schedule; ``wrap`` puts a checkpoint, or nothing, around each. Returns a scalar."""

    def __init__(self, schedule, wrap=None, **layer):
        super().__init__()
        torch.manual_seed(0)
        self.schedule = schedule
        self.wrap = wrap
        self.layers = nn.ModuleList(
            Layer(computes=schedule.computes(number), **layer) for number in schedule.logical_layers
        ).double()

    def run_layer(self, number, x, selections):
        source = self.schedule.source(number)
        shared = selections[source].shared() if source < number else None
        layer = self.layers[number]
        x, selection = self.wrap(layer, x, shared) if self.wrap else layer(x, shared)
        selections[number] = selection
        return x

    def forward(self, x):
        selections = {}
        for number in self.schedule.logical_layers:
            x = self.run_layer(number, x, selections)
        return self.total(x, selections)

    def total(self, x, selections):
        losses = [selection.loss for selection in selections.values() if selection.loss is not None]
        return x.square().mean() + sum(losses)

    def gradients(self):
        return {name: parameter.grad for name, parameter in self.named_parameters()}


def checkpointed(policy=None, reentrant=False):
    """A ``wrap`` for ``SharingModel``."""

    def wrap(layer, x, shared):
        keywords = {} if policy is None else {"context_fn": policy}
        return checkpoint(layer, x, shared, use_reentrant=reentrant, **keywords)

    return wrap
