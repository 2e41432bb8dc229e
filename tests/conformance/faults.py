"""Backends with one fault each. What a kernel would do to memory is done here with views of the same memory."""

from __future__ import annotations

import math

import torch

from dsa_backends.torch_dense.spec import SPEC
from dsa_dispatch._registry.availability import resolve_reference

FORWARD = "attention_forward"


def forward(fault="", base_two=False):
    """A plain ``attention_forward`` with at most one fault."""
    earlier = {}

    def attention_forward(q, kv, indices, length, *, scale, v_channels, rows, options):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        ids = indices.long()
        used = torch.arange(ids.shape[1]) < length[:, None]
        valid = (ids >= 0) & (ids < len(kv)) & used
        if fault == "ignores topk_length":
            valid = (ids >= 0) & (ids < len(kv))
        if fault == "counts a hole as key 0":
            valid = used
        if fault == "mutates its input":
            q.mul_(scale)
            scale = 1.0
        if fault == "drops what is left of a tile of 64 slots" and ids.shape[1] > 64:
            valid[:, ids.shape[1] // 64 * 64 :] = False
        ids = torch.where(valid & (ids >= 0) & (ids < len(kv)), ids, 0)
        keys = torch.where(valid[..., None], kv[ids], 0.0)
        if fault == "reads id -1":
            valid = used & (indices >= -1) & (indices < len(kv))
            keys = torch.where(valid[..., None], _row_before(kv)[indices.clamp(-1, len(kv) - 1) + 1], 0.0)
        if fault == "multiplies what a hole holds by zero":
            keys = kv[ids]
        if fault == "counts a duplicate once":
            for row in range(len(ids)):
                seen = set()
                for slot, key in enumerate(ids[row].tolist()):
                    valid[row, slot] &= key not in seen
                    seen |= {key} if valid[row, slot] else set()
        seen = slice(64) if fault == "looks at 64 channels" else slice(None)
        score = torch.einsum("thd,twd->thw", q[..., seen].to(wide), keys[..., seen].to(wide)) * scale
        score = score.masked_fill(~valid[:, None], -torch.inf)
        lse = score.logsumexp(-1)
        probability = _exponential(score, lse, base_two)
        if fault != "NaN for an empty row":
            probability = probability.nan_to_num(0.0)
        if fault == "NaN after a tile of holes":
            probability[valid.any(1) & ~valid[:, :16].any(1)] = torch.nan
        value = keys[..., :v_channels].to(wide)
        out = torch.einsum("thw,twv->thv", probability, value)
        if fault == "no maximum subtracted":
            raw = torch.where(valid[:, None], score.to(torch.float16).exp(), 0.0)
            out = torch.einsum(
                "thw,twv->thv", (raw / raw.sum(-1, keepdim=True)).nan_to_num(0.0).to(wide), value
            )
        if fault == "bf16 accumulation" and q.dtype == torch.bfloat16:
            total = torch.zeros(out.shape, dtype=torch.bfloat16)
            for slot in range(ids.shape[1]):
                total += (probability[:, :, slot, None] * value[:, None, slot]).bfloat16()
            out = total
        if fault == "base-2 lse":
            lse = lse / math.log(2.0)
        if fault == "right for 16 heads only" and q.shape[1] > 16:
            out[:, 16:] = 0
        if fault == "raises above 16 heads" and q.shape[1] > 16:
            raise ValueError(f"no kernel for {q.shape[1]} heads")
        if fault == "one tile of 16 heads" and q.shape[1] % 16:
            out[:, 16:] = 0
        if fault == "one tile of 64 rows":
            out[64:] = 0
        if fault.startswith("lse"):
            lse = _wrong_lse(fault, lse, score, q, kv, indices, valid, scale, rows)
        if fault == "keeps an earlier result":
            key = tuple(q.shape)
            out = earlier.setdefault(key, out.clone()) if not out.isnan().any() else out
        if fault == "reads the neighbour":
            first = kv[: rows.keys].to(wide).mean() * 1e-3
            out = out + torch.where(torch.arange(len(out))[:, None, None] >= rows.rows, first, 0.0)
            out = out + kv[-1].to(wide).sum() * 0 if rows.batch > 1 else out
        result = torch.empty(out.shape, dtype=q.dtype)
        written = (
            valid.any(1) if fault == "skips rows without a key" else torch.ones(len(q), dtype=torch.bool)
        )
        result[written] = out[written].to(q.dtype)
        if fault == "writes past a padded head":
            _write_after(result)
        return result, lse.to(wide)

    return attention_forward


def _wrong_lse(fault, lse, score, q, kv, indices, valid, scale, rows):
    """Right outputs beside an lse that is wrong where no check of outputs looks."""
    if fault == "lse without the maximum subtracted":
        return score.float().exp().sum(-1).log()
    if fault == "lse multiplies what a hole holds by zero":
        raw = kv[indices.long().clamp(0, len(kv) - 1)].to(lse.dtype)
        found = (torch.einsum("thd,twd->thw", q.to(lse.dtype), raw) * scale).exp() * valid[:, None]
        return torch.where(valid.any(1)[:, None], found.sum(-1).log(), -torch.inf)
    if fault == "lse of the row before in a slice" and rows.first_row:
        return lse.roll(1, 0)
    if fault == "lse of packed queries" and not q.is_contiguous():
        # What pointer arithmetic with the strides of a contiguous q would read.
        rows_of_q = torch.cat([q, torch.full_like(q, torch.nan)], 1).flatten(0, 1)[: q.shape[0] * q.shape[1]]
        return lse + rows_of_q.view(q.shape).sum(-1) * 0
    return lse


def _row_before(kv):
    """The keys with the row in front of them, as pointer arithmetic with id -1 sees them."""
    if kv.storage_offset() < kv.stride(0):
        return torch.cat([kv[-1:], kv])  # a test cannot read before an allocation; a kernel would
    return kv.as_strided((len(kv) + 1, kv.shape[1]), kv.stride(), kv.storage_offset() - kv.stride(0))


def _write_after(result):
    """One more head behind the last, where the allocation has room for it; elsewhere a kernel would corrupt memory."""
    head = result.shape[-1]
    end = result.storage_offset() + result.numel()
    if result.untyped_storage().nbytes() // result.element_size() >= end + head:
        result.as_strided((head,), (1,), end).fill_(0)


def _exponential(score, lse, base_two):
    """``exp(score - lse)``, as kernels do it where ``base_two``: both in units of log 2, the scores first."""
    if not base_two:
        return (score - lse[..., None]).exp()
    return (score * math.log2(math.e) - lse[..., None] * math.log2(math.e)).exp2()


def backward(fault="", base_two=False):
    def attention_backward(
        q, kv, indices, length, out, lse, dout, *, scale, v_channels, need_dq, dkv, rows, options
    ):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        ids = indices.long()
        valid = (ids >= 0) & (ids < len(kv)) & (torch.arange(ids.shape[1]) < length[:, None])
        ids = torch.where(valid, ids, 0)
        keys = torch.where(valid[..., None], kv[ids], 0.0).to(wide)
        score = torch.einsum("thd,twd->thw", q.to(wide), keys) * scale
        probability = torch.where(valid[:, None], _exponential(score, lse.to(wide), base_two), 0.0)
        dvalue = torch.einsum("thw,thv->twv", probability, dout.to(wide))
        dscore = torch.einsum("thv,twv->thw", dout.to(wide), keys[..., :v_channels])
        delta = (dout.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        dscore = probability * (dscore - delta) * scale
        dkey = torch.einsum("thw,thd->twd", dscore, q.to(wide))
        dkey[..., :v_channels] += dvalue
        dkey = torch.where(valid[..., None], dkey, 0.0)
        if dkv is not None:
            if fault == "overwrites dkv":
                dkv.zero_()
            if fault == "sums dkv in bf16":
                total = torch.zeros(dkv.shape, dtype=torch.bfloat16)
                for row in range(len(ids)):
                    total.index_add_(0, ids[row], dkey[row].bfloat16())
                dkv += total
            else:
                dkv.index_add_(0, ids.flatten(), dkey.flatten(0, 1))
        if fault == "computes dq always":
            need_dq = True
        return torch.einsum("thw,twd->thd", dscore, keys).to(q.dtype) if need_dq else None

    return attention_backward


CAUSAL = ("causal in the first batch item alone", "causal without first_row")


def _causal(fault, row, rows, count):
    """Which of ``count`` keys a row sees, worked out from host data with a mistake."""
    at = row if fault == "causal without first_row" else row + rows.first_row
    item, inside = divmod(at, rows.rows)
    first = 0 if fault == "causal in the first batch item alone" else item * rows.keys
    keys = torch.arange(count)
    return (keys >= first) & (keys < first + rows.keys - rows.rows + inside + 1)


def selection(fault=""):
    def indexer_topk(q, k, w, starts, ends, *, rows, topk, use_relu, options):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        dots = torch.einsum("thd,sd->ths", q.to(wide), k.to(wide))
        score = torch.einsum("ths,th->ts", dots.relu() if use_relu else dots, w.to(wide))
        if fault == "scores in bf16":
            score = score.bfloat16().to(wide)
        keys = torch.arange(len(k))
        indices = torch.full((len(q), topk), -1, dtype=torch.int32)
        length = torch.zeros(len(q), dtype=torch.int32)
        for row in range(len(q)):
            allowed = keys[(keys >= starts[row]) & (keys < ends[row])]
            if rows.bounds == "causal" and fault in CAUSAL:
                allowed = keys[_causal(fault, row, rows, len(k))]
            if fault == "looks at 2048 keys":
                allowed = allowed[allowed < starts[row] + 2048]
            if fault == "ignores the bounds":
                allowed = keys
            if fault == "wrong tie rule":
                allowed = allowed.flip(0)
            order = score[row][allowed].nan_to_num(0.0).argsort(descending=True, stable=True)
            chosen = allowed[order][:topk]
            if fault != "claims an order it has not":
                indices[row, : len(chosen)] = chosen.int()
            else:
                indices[row, : len(chosen)] = chosen.sort().values.int()
            length[row] = len(chosen)
        return indices, length

    return indexer_topk


def target(fault=""):
    def indexer_target(query, key, *, indices, length, starts, ends, lse, scale, rows, options):
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        if indices is None:
            first = (torch.arange(len(query)) + rows.first_row) // rows.rows * rows.keys
            ids = first[:, None] + torch.arange(rows.keys)
            valid = (ids >= starts[:, None]) & (ids < ends[:, None])
            if rows.bounds == "causal" and fault in CAUSAL:
                seen = torch.stack([_causal(fault, row, rows, len(key)) for row in range(len(query))])
                valid = seen.gather(1, ids)
        else:
            ids = indices.long()
            valid = (ids >= 0) & (ids < len(key)) & (torch.arange(ids.shape[1]) < length[:, None])
        keys = torch.where(valid[..., None], key[torch.where(valid, ids, 0)], 0.0).to(wide)
        score = torch.einsum("thd,twd->thw", query.to(wide), keys) * scale
        probability = score.masked_fill(~valid[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        mass = probability.sum(1)
        if fault == "normalises the mass":
            mass = mass / mass.sum(-1, keepdim=True).clamp(min=1e-10)
        return mass

    return indexer_target


def loss(fault=""):
    right = resolve_reference(SPEC.stages["indexer_loss"].function)

    def indexer_loss(q, k, w, *, indices, length, starts, ends, mass, rows, **rest):
        empty = mass.sum(1) == 0
        if fault == "a uniform teacher for zero mass":
            mass = torch.where(empty[:, None], 1.0, mass).to(mass.dtype)
        terms = right(
            q, k, w, indices=indices, length=length, starts=starts, ends=ends, mass=mass, rows=rows, **rest
        )
        if fault == "divides by a zero mass":
            some = (
                ends > starts
                if indices is None
                else ((indices >= 0) & (torch.arange(indices.shape[1]) < length[:, None])).any(1)
            )
            terms.kl[empty & some] = torch.nan
        return terms

    return indexer_loss


def grouped(fault=""):
    right = resolve_reference(SPEC.stages["gqa_forward"].function)

    def gqa_forward(q, k, v, *args, **rest):
        out, lse = right(q, k, v, *args, **rest)
        if fault == "values no wider than keys":
            out[..., q.shape[2] :] = 0
        return out, lse

    return gqa_forward
