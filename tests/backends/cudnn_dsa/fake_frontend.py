"""A frontend with the real one's signatures, limits and misbehaviours, in plain PyTorch on any device.

The attention's backward rounds where the kernel does; the other arithmetic is exact to rounding of the outputs, and
how accurate those kernels are is for a GPU to say.
"""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections.abc import Iterator
from unittest import mock

import torch

from dsa_backends.cudnn_dsa import attention_backward, attention_forward, frontend
from dsa_backends.cudnn_dsa.plans import PLANS

TILE = 64
CLIPPED = math.exp(-100.0)


class Plan:
    """What the frontend's plans have in common: nothing runs before it was checked and compiled."""

    built = 0

    def __init__(self) -> None:
        type(self).built += 1
        self.checked = self.compiled = False

    def check_support(self):
        self.checked = True
        return True

    def compile(self):
        assert self.checked
        self.compiled = True

    def scratch_workspace_bytes(self):
        return 256

    def ready(self, workspace, *tensors):
        assert self.compiled
        assert workspace is None or workspace.dtype == torch.uint8
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(f"must be contiguous; got strides {tensor.stride()}")


def refuse(condition, message, kind=ValueError):
    if condition:
        raise kind(message)


def gathered(kv, ids, length):
    """Keys of every slot of the tiles that a row's length reaches, and which of them count."""
    width = ids.shape[1]
    slots = torch.arange(width, device=ids.device)
    valid = (ids >= 0) & (ids < kv.shape[0]) & (slots < length[:, None])
    loaded = (ids >= 0) & (ids < kv.shape[0]) & (slots < -(-length[:, None] // TILE) * TILE)
    loaded = valid if FEATURES["ends at length"] else loaded
    keys = kv.float()[ids.clamp(0, kv.shape[0] - 1).long()]
    return torch.where(loaded[..., None], keys, 0.0), valid


def forward_rows(q, kv, ids, length, scale, v_channels):
    """Output and natural lse; a key that was loaded but does not count enters with weight 0, so its NaN stays."""
    outs, lses = [], []
    for first in range(0, q.shape[0], 64):
        part = slice(first, first + 64)
        keys, valid = gathered(kv, ids[part], length[part])
        score = torch.einsum("thd,twd->thw", q[part].float(), keys) * scale
        score = torch.where(valid[:, None], score, -torch.inf)
        lse = score.logsumexp(2)
        weight = torch.where(valid[:, None], (score - lse[..., None]).exp(), 0.0)
        outs.append(torch.einsum("thw,twd->thd", weight, keys[..., :v_channels]))
        lses.append(torch.where(lse == -torch.inf, torch.inf, lse))
    return torch.cat(outs).to(q.dtype), torch.cat(lses)


class SparseAttentionBackward(Plan):
    def __init__(
        self,
        sample_q,
        sample_kv,
        sample_out,
        sample_dout,
        sample_lse,
        sample_attn_sink,
        sample_topk_idxs,
        sample_dq=None,
        sample_dkv=None,
        sample_topk_length=None,
        softmax_scale=None,
        block_tile=64,
        deterministic=False,
        q_cluster_mode="off",
    ):
        super().__init__()
        refuse(deterministic, "deterministic DSA backward requires SM100")
        refuse(sample_q.shape[0] == 0, "total_S_q must be positive")
        refuse(sample_q.shape[1] < 2, "MLA/MQA requires num_head > num_head_kv", AssertionError)
        refuse(sample_q.shape[2] not in (512, 576), "head_dim must be 512 or 576")
        refuse(sample_topk_idxs.dtype != torch.int32, "topk_idxs must be int32")
        self.shape = sample_q.shape

    def execute(
        self,
        q,
        kv,
        out,
        dout,
        lse,
        attn_sink,
        topk_idxs,
        dq,
        dkv,
        topk_length=None,
        softmax_scale=None,
        current_stream=None,
        workspace=None,
        *,
        d_sink,
    ):
        self.ready(workspace, q, kv, out, dout, lse, attn_sink, topk_idxs, dq, dkv, topk_length)
        refuse(q.shape != self.shape, "q must have the plan's shape")
        total = torch.zeros(kv.shape[0] + 1, kv.shape[1])
        for first in range(0, q.shape[0], 64):
            part = slice(first, first + 64)
            keys, valid = gathered(kv, topk_idxs[part], topk_length[part])
            values = keys[..., : out.shape[2]]
            score = torch.einsum("thd,twd->thw", q[part].double(), keys.double()) * softmax_scale
            score = score.masked_fill(~valid[:, None], -torch.inf)
            # Exact but for an lse that is not what it should be: another base, another support.
            off = (score.logsumexp(2) - lse[part].double()).nan_to_num(0.0, 0.0, 0.0)
            weight = score.softmax(2).nan_to_num() * torch.where(off.abs() > 1e-2, off, 0.0).exp()[..., None]
            weight = weight.float()
            dp = torch.einsum("thd,twd->thw", dout[part].float(), values)
            # As the kernel: delta from the output in 16 bits, and 16 bits for P and dS in the products that follow.
            delta = (out[part].float() * dout[part].float()).sum(2, keepdim=True)
            ds = (weight * (dp - delta) * softmax_scale).to(q.dtype).float()
            weight = weight.to(q.dtype).float()
            dq[part] = torch.einsum("thw,twd->thd", ds, keys).to(dq.dtype)
            slot = torch.einsum("thw,thd->twd", ds, q[part].float())
            slot[..., : out.shape[2]] += torch.einsum("thw,thd->twd", weight, dout[part].float())
            target = torch.where(valid, topk_idxs[part], kv.shape[0]).long()
            total.index_add_(0, target.reshape(-1), slot.flatten(0, 1))
        dkv.copy_(total[:-1])
        d_sink.fill_(torch.nan)
        return dq, dkv, d_sink


def sparse_attention_forward_wrapper(
    q, kv, topk_idxs, *, attn_sink=None, topk_length=None, softmax_scale=None, indexer_topk=0, stream=None
):
    refuse(
        FEATURES["forward"] is False,
        "SparseAttentionForward requires an SM100-family GPU, found SM90",
        RuntimeError,
    )
    refuse((q.shape[1], q.shape[2]) not in {(64, 512), (64, 576), (128, 512)}, "unsupported (H, D_qk)")
    out, lse = forward_rows(q, kv, topk_idxs, topk_length, softmax_scale, 512)
    return {"out": out, "max_logits": lse, "lse": lse, "lse_indexer": None}


def indexer_forward_wrapper(
    q,
    k,
    w,
    ratio=4,
    qhead_per_kv_head=None,
    m_block_size=128,
    n_block_size=128,
    q_stage=2,
    kv_stage=4,
    sm_scale=1.0,
    out=None,
    stream=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    q_causal_offsets=None,
    precision="bf16",
    q_scale=None,
    k_scale=None,
    cu_seqlens_q_scale_padded=None,
    cu_seqlens_k_scale_padded=None,
    sf_vec_size=32,
    return_lse=False,
    lse_out=None,
):
    refuse(q.dtype != torch.bfloat16 or k.dtype != torch.bfloat16, "must be bfloat16", AssertionError)
    refuse(w.dtype not in (torch.bfloat16, torch.float32), "w dtype", AssertionError)
    refuse(
        q.shape[2] not in (16, 32, 64) or q.shape[3] != 128 or k.shape[2] != 1,
        "qhead_per_kv_head",
        AssertionError,
    )
    refuse(0 in q.shape or 0 in k.shape, "empty", AssertionError)
    refuse(q.shape[1] > k.shape[1] * ratio + ratio - 1, "its last row would see more keys than there are")
    dots = torch.einsum("bshd,bkd->bshk", q.float(), k[:, :, 0].float()).relu()
    # The first product, not a zero, starts the sum: that is how -0.0 comes about.
    scores = dots[:, :, 0] * w[:, :, :1].float()
    for head in range(1, q.shape[2]):
        scores = scores + dots[:, :, head] * w[:, :, head, None].float()
    offset = torch.zeros(q.shape[0], dtype=torch.int32) if q_causal_offsets is None else q_causal_offsets
    refuse(offset.dtype != torch.int32 or offset.shape != (q.shape[0],), "q_causal_offsets must be int32")
    limit = (offset[:, None] + torch.arange(q.shape[1]) + 1) // ratio
    seen = torch.arange(k.shape[1]) < limit[..., None]
    return {"scores": torch.where(seen, scores * sm_scale, -torch.inf)}


class IndexerTopK(Plan):
    def __init__(
        self,
        sample_input_values,
        sample_seq_lens,
        top_k,
        next_n=1,
        return_val=True,
        num_copy_bits=256,
        tie_break=0,
        deterministic=False,
    ):
        super().__init__()
        rows, columns = sample_input_values.shape
        refuse(rows <= 0 or columns <= 0, "n_rows and num_cols must be positive")
        refuse(not 0 < top_k <= 2048, f"top_k must be in (0, 2048], got {top_k}")
        refuse(rows != sample_seq_lens.numel() * next_n, "n_rows must equal seq_lens.numel() * next_n")
        self.top_k, self.return_val, self.deterministic = top_k, return_val, deterministic
        self.shape = (rows, columns)

    def execute(
        self, input_values, seq_lens, current_stream=None, *, out_indices, out_values=None, workspace=None
    ):
        self.ready(workspace, input_values, seq_lens, out_indices)
        refuse(self.return_val and out_values is None, "out_values is required")
        refuse(tuple(input_values.shape) != self.shape, "another shape than the plan's")
        refuse(bool(((seq_lens < 0) | (seq_lens > self.shape[1])).any()), "illegal address", AssertionError)
        out_indices.fill_(-1)
        for row, length in enumerate(seq_lens.tolist()):
            values = input_values[row, :length].tolist()
            signs = torch.signbit(input_values[row, :length]).tolist()
            order = sorted(range(length), key=lambda key: (-values[key], signs[key], key))[: self.top_k]
            order = sorted(order) if self.deterministic else order[::-1]
            out_indices[row, : len(order)] = torch.tensor(order, dtype=torch.int32)
        input_values.fill_(torch.nan)
        return out_indices, None


def indexer_forward_top_k_wrapper(
    q,
    k,
    w,
    top_k,
    ratio=4,
    qhead_per_kv_head=None,
    m_block_size=128,
    n_block_size=128,
    q_stage=2,
    kv_stage=4,
    sm_scale=1.0,
    stream=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    q_causal_offsets=None,
    precision="bf16",
    q_scale=None,
    k_scale=None,
    cu_seqlens_q_scale_padded=None,
    cu_seqlens_k_scale_padded=None,
    sf_vec_size=32,
    return_lse=False,
    lse_out=None,
    return_softmax=None,
    softmax_out=None,
    microbatch_rows=-1,
    topk_indices_global=True,
    cand_buffer=None,
    out_indices=None,
    out_logits=None,
    cand_batch_offsets=None,
    deterministic=False,
):
    scores = indexer_forward_wrapper(q, k, w, ratio, q_causal_offsets=q_causal_offsets)["scores"][0]
    seen = (scores > -torch.inf).sum(1, dtype=torch.int32)
    plan = IndexerTopK(scores, seen, top_k, return_val=False, deterministic=deterministic)
    plan.check_support()
    plan.compile()
    ids = torch.empty(scores.shape[0], top_k, dtype=torch.int32)
    plan.execute(scores + 0.0, seen, out_indices=ids)
    return {"indices": ids.flip(1)[None], "logits": None}


class SparseIndexerScoreRecompute(Plan):
    def __init__(
        self,
        sample_q_indexer,
        sample_k_indexer,
        sample_weights,
        sample_topk_indices,
        sample_out,
        sample_topk_length=None,
        qhead_per_kv_head=None,
        topk_indices_global=False,
    ):
        super().__init__()
        heads = sample_q_indexer.shape[2]
        refuse(heads > 64 and heads % 64 != 0, "must be divisible by tile_m", AssertionError)
        refuse(sample_weights.dtype != torch.bfloat16, "W must be bfloat16")
        refuse(sample_topk_indices.dtype != torch.int32, "topk_indices must be int32")

    def execute(
        self, q_indexer, k_indexer, weights, topk_indices, out, topk_length=None, current_stream=None
    ):
        self.ready(None, topk_indices, out)
        ids = topk_indices[0]
        inside = (ids >= 0) & (ids < k_indexer.shape[1])
        keys = torch.where(
            inside[..., None], k_indexer[0].float()[ids.clamp(0, k_indexer.shape[1] - 1).long()], 0.0
        )
        dots = torch.einsum("thd,twd->thw", q_indexer[0].float(), keys).relu()
        score = torch.einsum("thw,th->tw", dots, weights[0].float()).masked_fill(ids < 0, -torch.inf)
        top = score.amax(1, keepdim=True)
        weight = torch.where(top == -torch.inf, 0.0, (score - top).exp())
        out[0] = weight / (weight.sum(1, keepdim=True) + 1e-10)
        return out


def indexer_gradients(q, w, keys, gradient, dq, dw):
    """``gradient [T, W]`` of the scores into ``dq``, ``dw``; returns that of the keys, by slot."""
    dots = torch.einsum("thd,twd->thw", q.float(), keys)
    inner = gradient[:, None] * w.float()[..., None] * (dots > 0)
    dq.copy_(torch.einsum("thw,twd->thd", inner, keys))
    dw.copy_(torch.einsum("tw,thw->th", gradient, dots.relu()))
    return torch.einsum("thw,thd->twd", inner, q.float())


class IndexerBackward(Plan):
    def __init__(
        self,
        sample_index_q,
        sample_weights,
        sample_index_k,
        sample_d_index_q,
        sample_d_weights,
        sample_d_index_k,
        sample_attn_score,
        sample_index_score,
        sample_topk_indices,
        sm_scale=1.0,
        block_I=128,
        topk_indices_global=False,
        backend="default",
        deterministic=False,
        deterministic_dk_planes=96,
    ):
        super().__init__()
        refuse(sample_index_q.shape[2] < 64, "heads", AssertionError)
        refuse(sample_topk_indices.shape[2] % block_I != 0, "topk % block_I", AssertionError)
        refuse(
            sample_weights.dtype != torch.bfloat16 or sample_d_weights.dtype != torch.bfloat16,
            "weights: bf16",
        )
        refuse(deterministic, "deterministic IndexerBackward requires SM100")

    def execute(
        self,
        index_q,
        weights,
        index_k,
        d_index_q,
        d_weights,
        d_index_k,
        attn_score,
        index_score,
        topk_indices,
        grad_loss,
        loss_coeff=1.0,
        current_stream=None,
        workspace=None,
    ):
        self.ready(
            workspace, index_q, weights, index_k, d_index_q, d_weights, d_index_k, attn_score, index_score
        )
        refuse(tuple(grad_loss.shape) != (1,), "grad_loss must be a single element")
        factor = loss_coeff / (index_q.shape[0] * index_q.shape[1]) * float(grad_loss)
        target, predicted = attn_score[0].clamp(min=CLIPPED), index_score[0]
        teacher = target * (predicted >= CLIPPED) * factor
        attn_score[0] = predicted * teacher.sum(1, keepdim=True) - teacher
        ids = topk_indices[0]
        inside = (ids >= 0) & (ids < index_k.shape[1])
        keys = torch.where(
            inside[..., None], index_k[0].float()[ids.clamp(0, index_k.shape[1] - 1).long()], 0.0
        )
        slot = indexer_gradients(index_q[0], weights[0], keys, attn_score[0], d_index_q[0], d_weights[0])
        total = torch.zeros(index_k.shape[1] + 1, index_k.shape[2])
        total.index_add_(0, torch.where(inside, ids, index_k.shape[1]).reshape(-1).long(), slot.flatten(0, 1))
        d_index_k[0] = total[:-1]


class DenseIndexerBackward(Plan):
    def __init__(
        self,
        sample_index_q,
        sample_weights,
        sample_index_k,
        sample_d_index_q,
        sample_d_weights,
        sample_d_index_k,
        sample_attn_score,
        sample_attn_l1norm,
        sample_index_score,
        sample_index_lse,
        sm_scale=1.0,
        block_I=128,
        ratio=1,
        is_thd=False,
        batch=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        has_q_causal_offsets=False,
    ):
        super().__init__()
        refuse(sample_index_q.shape[2] < 64, "DenseIndexerBackward requires heads >= 64")
        self.offsets = has_q_causal_offsets

    def execute(
        self,
        index_q,
        weights,
        index_k,
        d_index_q,
        d_weights,
        d_index_k,
        attn_score,
        attn_l1norm,
        index_score,
        index_lse,
        grad_loss,
        loss_coeff=1.0,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        q_causal_offsets=None,
        current_stream=None,
        workspace=None,
    ):
        self.ready(workspace, index_q, weights, index_k, attn_score, index_score)
        refuse(self.offsets != (q_causal_offsets is not None), "q_causal_offsets must match the plan")
        rows, columns = index_score.shape[1:]
        limit = (int(q_causal_offsets[0]) + torch.arange(rows) + 1).clamp(0, columns)
        inside = torch.arange(columns) < limit[:, None]
        distance = index_score[0] - index_lse[0, :, None]
        target = (attn_score[0] / (attn_l1norm[0, :, None] + 1e-10)).clamp(min=CLIPPED)
        factor = loss_coeff / (index_q.shape[0] * rows) * float(grad_loss)
        teacher = torch.where(inside, target * (distance >= -100.0) * factor, 0.0)
        gradient = torch.where(inside, distance.exp() * teacher.sum(1, keepdim=True) - teacher, 0.0)
        keys = index_k[0].float().expand(rows, -1, -1)
        slot = indexer_gradients(index_q[0], weights[0], keys, gradient, d_index_q[0], d_weights[0])
        d_index_k[0] = slot.sum(0)
        attn_score.fill_(torch.nan)
        index_score.fill_(torch.nan)


FEATURES = {"forward": True, "ends at length": False}
SYMBOLS = {
    item.__name__: item
    for item in (
        SparseAttentionBackward,
        sparse_attention_forward_wrapper,
        indexer_forward_wrapper,
        IndexerTopK,
        indexer_forward_top_k_wrapper,
        SparseIndexerScoreRecompute,
        IndexerBackward,
        DenseIndexerBackward,
    )
}


def forget() -> None:
    frontend._namespace.cache_clear()
    frontend._compiles.cache_clear()
    attention_forward._lse_factor.cache_clear()
    PLANS.clear()


@contextlib.contextmanager
def module_is(module) -> Iterator[None]:
    """``module`` under the name ``cudnn``; None is a module that cannot be imported. Touches no other entry."""
    before = sys.modules.get("cudnn")
    sys.modules["cudnn"] = module
    try:
        yield
    finally:
        del sys.modules["cudnn"]
        if before is not None:
            sys.modules["cudnn"] = before


@contextlib.contextmanager
def installed(
    without: tuple[str, ...] = (), forward: bool = True, hopper: bool = False, **replaced
) -> Iterator[types.ModuleType]:
    """The fake as the module ``cudnn``, with some symbols left out or replaced; ``hopper`` is the backward of that
    architecture, which loads no key past a length, and an adapter that takes the CPU for one."""
    module = types.ModuleType("cudnn")
    symbols = {name: item for name, item in SYMBOLS.items() if name not in without} | replaced
    module.DSA = types.SimpleNamespace(**symbols)
    forget()
    features = {"forward": forward, "ends at length": hopper}
    patched = mock.patch.object(attention_backward, "is_hopper", return_value=hopper)
    with module_is(module), mock.patch.dict(FEATURES, features), patched:
        yield module
    forget()
