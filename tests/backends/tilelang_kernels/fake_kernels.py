"""Kernels in torch that take exactly what the compiled ones take: flat tensors, strides in units of 8, sizes.

They read nothing but through those arguments, so an adapter that hands over a wrong stride, offset or size is found.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from dsa_backends.tilelang_kernels import attention_backward, attention_forward, indexer_loss, indexer_topk

SLOTS = 64
GPU = (9, 0)


def by_strides(tensor, *shape_and_strides):
    sizes, strides = shape_and_strides[::2], shape_and_strides[1::2]
    return tensor.as_strided(sizes, strides)


def attention_arguments(
    q, kv, idx, length, q_row8, q_head8, kv_row8, idx_row, rows, keys, width, heads, channels
):
    query = by_strides(q, rows, q_row8 * 8, heads, q_head8 * 8, channels, 1).double()
    key = by_strides(kv, keys, kv_row8 * 8, channels, 1).double()
    ids = by_strides(idx, rows, idx_row, width, 1).long()
    ok = (ids >= 0) & (ids < keys) & (torch.arange(width) < length[:rows, None])
    gathered = torch.where(ok[..., None], key[torch.where(ok, ids, 0)], 0.0)
    return query, gathered, ok, ids


def forward(tail):
    def run(
        q,
        kv,
        idx,
        length,
        out,
        lse,
        scale_log2,
        q_row8,
        q_head8,
        kv_row8,
        idx_row,
        rows,
        keys,
        width,
        heads,
        blocks,
    ):
        assert blocks >= 1
        query, key, ok, _ = attention_arguments(
            *(q, kv, idx, length, q_row8, q_head8, kv_row8, idx_row, rows, keys, width, heads, 512 + tail)
        )
        score = torch.einsum("thd,twd->thw", query, key) * (scale_log2 * math.log(2))
        score = score.masked_fill(~ok[:, None], -torch.inf)
        total = score.logsumexp(2)
        p = torch.where(ok[:, None], (score - total.nan_to_num(neginf=0.0)[..., None]).exp(), 0.0)
        out.view(rows, heads, 512).copy_(torch.einsum("thw,twd->thd", p, key[..., :512]))
        lse.view(rows, heads).copy_(total)

    return run


def row_shift(out, dout, lse, shift, out_row8, out_head8, dout_row8, dout_head8, places, heads):
    rows = places // heads
    o = by_strides(out, rows, out_row8 * 8, heads, out_head8 * 8, 512, 1).double()
    g = by_strides(dout, rows, dout_row8 * 8, heads, dout_head8 * 8, 512, 1).double()
    base = lse.view(rows, heads).double() / math.log(2)
    target = shift[: places * 2].view(rows, heads, 2)
    target[..., 0] = torch.where(base == -torch.inf, torch.inf, base)
    target[..., 1] = (o * g).sum(-1)


def p_and_ds(tail, q, kv, idx, length, shift, dout, scale, scale_log2, strides, rows, keys, width, heads):
    q_row8, q_head8, kv_row8, idx_row, dout_row8, dout_head8 = strides
    query, key, ok, _ = attention_arguments(
        *(q, kv, idx, length, q_row8, q_head8, kv_row8, idx_row, rows, keys, width, heads, 512 + tail)
    )
    g = by_strides(dout, rows, dout_row8 * 8, heads, dout_head8 * 8, 512, 1).double()
    moved = shift[: rows * heads * 2].view(rows, heads, 2).double()
    score = torch.einsum("thd,twd->thw", query, key) * scale_log2
    p = torch.where(ok[:, None], torch.exp2(score - moved[..., :1]), 0.0)
    ds = p * (torch.einsum("thd,twd->thw", g, key[..., :512]) - moved[..., 1:]) * scale
    # The products take both in 16 bits, and so does what is stored.
    return p.to(q.dtype).double(), ds.to(q.dtype).double(), key


def stored(pairs, rows, width, heads, key_major):
    """The pairs' tensor as ``[rows, 2, heads, tiles * 64]``."""
    tiles = -(-width // SLOTS)
    if key_major:
        view = pairs[: rows * tiles * 2 * SLOTS * 16].view(rows, tiles, 2, SLOTS, 16)
        return view.permute(0, 2, 4, 1, 3)[:, :, :heads]
    return pairs[: rows * tiles * 2 * heads * SLOTS].view(rows, tiles, 2, heads, SLOTS).permute(0, 2, 3, 1, 4)


def write_pairs(pairs, p, ds, rows, width, heads, key_major):
    target = stored(pairs, rows, width, heads, key_major)
    padded = -(-width // SLOTS) * SLOTS
    for which, value in ((0, ds), (1, p)):
        full = torch.zeros(rows, heads, padded, dtype=torch.float64)
        full[..., :width] = value
        target[:, which].copy_(full.view(rows, heads, -1, SLOTS))


def hopper_pairs(tail):
    def run(q, kv, idx, length, shift, dout, pairs, scale, scale_log2, *rest):
        *strides, rows, keys, width, heads, _blocks = rest
        p, ds, _ = p_and_ds(
            tail, q, kv, idx, length, shift, dout, scale, scale_log2, strides, rows, keys, width, heads
        )
        write_pairs(pairs, p, ds, rows, width, heads, key_major=False)
        shift[: rows * heads * 2].view(rows, heads, 2)[..., 1] = ds.sum(2)

    return run


def balance(head_major):
    def run(length, shift, pairs, rows, width, heads, stored_heads):
        assert stored_heads == (heads if head_major else 16)
        left = shift[: rows * heads * 2].view(rows, heads, 2)[..., 1]
        both = stored(pairs, rows, width, heads, not head_major)
        both[:, 0] -= (left[..., None, None] * both[:, 1].float()).to(pairs.dtype)

    return run


def hopper_query_gradient(tail):
    def run(kv, idx, length, pairs, dq, kv_row8, idx_row, rows, keys, width, heads, _blocks):
        key = by_strides(kv, keys, kv_row8 * 8, 512 + tail, 1).double()
        ids = by_strides(idx, rows, idx_row, width, 1).long()
        ok = (ids >= 0) & (ids < keys) & (torch.arange(width) < length[:rows, None])
        gathered = torch.where(ok[..., None], key[torch.where(ok, ids, 0)], 0.0)
        ds = stored(pairs, rows, width, heads, False)[:, 0].reshape(rows, heads, -1)[..., :width].double()
        dq.view(rows, heads, 512 + tail).copy_(torch.einsum("thw,twd->thd", ds, gathered))

    return run


def hopper_few_backward(tail):
    def run(q, kv, idx, length, shift, dout, out, pairs, dq, scale, scale_log2, *rest):
        *strides, out_row8, out_head8, rows, keys, width, heads, first_head, store, need_dq = rest
        assert first_head == 0
        p, ds, key = p_and_ds(
            tail, q, kv, idx, length, shift, dout, scale, scale_log2, strides, rows, keys, width, heads
        )
        if store:
            write_pairs(pairs, p, ds, rows, width, heads, key_major=True)
        left = ds.sum(2)
        shift[: rows * heads * 2].view(rows, heads, 2)[..., 1] = left
        if need_dq:
            mean = torch.einsum("thw,twd->thd", p, key)
            mean[..., :512] = by_strides(out, rows, out_row8 * 8, heads, out_head8 * 8, 512, 1)
            grad = torch.einsum("thw,twd->thd", ds, key) - left[..., None] * mean
            dq.view(rows, heads, 512 + tail).copy_(grad)

    return run


def hopper_key_gradient(block, tail, key_major):
    def run(q, dout, idx, length, pairs, dkv, *rest):
        q_row8, q_head8, dout_row8, dout_head8, idx_row, dkv_row4, rows, keys, width, heads, first_head = rest
        part = slice(first_head, min(first_head + block, heads))
        query = by_strides(q, rows, q_row8 * 8, heads, q_head8 * 8, 512 + tail, 1).double()[:, part]
        g = by_strides(dout, rows, dout_row8 * 8, heads, dout_head8 * 8, 512, 1).double()[:, part]
        ids = by_strides(idx, rows, idx_row, width, 1).long()
        ok = (ids >= 0) & (ids < keys) & (torch.arange(width) < length[:rows, None])
        ds, p = (
            value.reshape(rows, heads, -1)[:, part, :width].double()
            for value in stored(pairs, rows, width, heads, key_major).unbind(1)
        )
        grad = torch.einsum("thw,thd->twd", ds, query)
        grad[..., :512] += torch.einsum("thw,thd->twd", p, g)
        target = by_strides(dkv, keys, dkv_row4 * 4, 512 + tail, 1)
        target.index_add_(0, ids[ok], grad[ok].float())

    return run


def index_scores(dim, relu):
    def run(
        q,
        k,
        w,
        starts,
        ends,
        out,
        q_row8,
        q_head8,
        k_row8,
        w_row,
        out_row,
        rows,
        first_key,
        columns,
        heads,
        *tiles,
    ):
        assert tiles == (-(-columns // 256), -(-rows // 32))
        query = by_strides(q, rows, q_row8 * 8, heads, q_head8 * 8, dim, 1).double()
        key = k.as_strided(
            (columns, dim), (k_row8 * 8, 1), k.storage_offset() + first_key * k_row8 * 8
        ).double()
        weight = by_strides(w, rows, w_row, heads, 1).double()
        dot = torch.einsum("thd,sd->ths", query, key)
        score = ((dot.relu() if relu else dot) * weight[..., None]).sum(1)
        by_strides(out, rows, out_row, columns, 1).copy_(score)

    return run


def select_best(
    scores, starts, ends, indices, length, scores_row4, indices_row, rows, first_key, columns, topk
):
    table = by_strides(scores, rows, scores_row4 * 4, columns, 1)
    target = by_strides(indices, rows, indices_row, topk, 1)
    target.fill_(-1)
    for t in range(rows):
        low, high = max(int(starts[t]) - first_key, 0), min(int(ends[t]) - first_key, columns)
        inside = table[t, low : max(low, high)] + 0.0
        best = torch.sort(-inside, stable=True).indices[:topk]
        target[t, : len(best)] = (best + low + first_key).int()
        length[t] = len(best)


def index_loss(dim, relu):
    def run(q, k, w, idx, length, mass, scores, kl, dq, dw, dk, *rest):
        q_row8, q_head8, k_row8, w_row, idx_row, mass_row, scores_row, dk_row = rest[:8]
        rows, keys, width, heads, need_dq, need_dw, need_dk = rest[8:]
        assert scores_row % SLOTS == 0
        assert scores.numel() >= rows * scores_row
        query = by_strides(q, rows, q_row8 * 8, heads, q_head8 * 8, dim, 1).double().requires_grad_()
        key = by_strides(k, keys, k_row8 * 8, dim, 1).double().nan_to_num().requires_grad_()
        weight = by_strides(w, rows, w_row, heads, 1).double().requires_grad_()
        ids = by_strides(idx, rows, idx_row, width, 1).long()
        ok = (ids >= 0) & (ids < keys) & (torch.arange(width) < length[:rows, None])
        target = torch.where(ok, by_strides(mass, rows, mass_row, width, 1).double(), 0.0)
        total = target.sum(1, keepdim=True)
        teacher = target / total.clamp_min(1e-10)
        with torch.enable_grad():
            gathered = torch.where(ok[..., None], key[torch.where(ok, ids, 0)], 0.0)
            dot = torch.einsum("thd,twd->thw", query, gathered)
            score = ((dot.relu() if relu else dot) * weight[..., None]).sum(1).masked_fill(~ok, -1e300)
            log_p = torch.where(ok, score - score.logsumexp(1, keepdim=True), 0.0)
            divergence = (teacher * (teacher.clamp_min(1e-10).log() - log_p)).sum(1)
            found = torch.autograd.grad(divergence.sum(), (query, key, weight))
        kl.copy_(divergence)
        if need_dq:
            dq.view(rows, heads, dim).copy_(found[0])
        if need_dw:
            dw.view(rows, heads).copy_(found[2])
        if need_dk:
            by_strides(dk, keys, dk_row, dim, 1).add_(found[1].float())

    return run


def kernel(device, where, *static):
    """What ``compiler.kernel`` returns, by name."""
    name = where.partition(":")[2]
    if name.endswith("_forward"):
        return forward(static[-2])
    if name in ("row_shift", "select_best"):
        return globals()[name]
    if name == "hopper_key_gradient":
        return hopper_key_gradient(static[0], static[1], static[3])
    if name == "index_scores":
        return index_scores(static[1], static[3])
    if name == "index_loss":
        return index_loss(static[1], static[2])
    return globals()[name](static[0])


@contextmanager
def installed(gpu=GPU, kernel=kernel):
    """The adapters over these kernels, on whatever device the tensors are, as on a GPU of that compute capability."""
    modules = (attention_forward, attention_backward, indexer_topk, indexer_loss)
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "kernel", kernel))
        stack.enter_context(patch.object(attention_forward, "capability", lambda tensor: gpu))
        stack.enter_context(patch.object(indexer_topk, "is_hopper", lambda tensor: gpu == (9, 0)))
        yield
