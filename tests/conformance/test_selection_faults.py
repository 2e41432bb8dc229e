"""A selection with one fault fails the check of that fault, with a message that names it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from conformance.candidates import HEADS

from dsa_dispatch import Heads
from dsa_dispatch.testing import ConformanceError, FakeBackend, conformance_checks, isolated_registry

INF = torch.inf


def scores(fault, q, k, w, use_relu):
    """``[T, S]``, head by head and without a zero to start from, as a kernel of one head would leave -0.0."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights = w.bfloat16() if fault == "weights in bf16" else w
    weights = weights.half() if fault == "weights in fp16" and w.dtype == torch.float32 else weights
    total = None
    for head in range(q.shape[1]):
        if fault == "heads after 32 dropped" and head >= 32:
            break
        dot = q[:, head].to(wide) @ k.to(wide).T
        if use_relu:
            dot = dot * (dot > 0) if fault == "-0.0 below +0.0" else dot.relu()
        term = dot * weights[:, head, None].to(wide)
        total = term if total is None else total + term
    return total.half().to(wide) if fault == "scores in fp16" else total


def row_choice(fault, score, low, high, topk):
    """Ids of one row, in the contract's order."""
    ids = torch.arange(low, high)
    own = score[low:high]
    if fault == "finite minus infinity in the buffer":
        ids = ids[own > -1e4]
    if fault == "-1e30 in the buffer":
        ids = ids[own > -1e30]
    if fault == "-inf is no score":
        ids = ids[own != -INF]
    if fault == "a buffer of 4096 candidates" and len(ids) > topk:
        threshold = own.nan_to_num(0.0, INF, -INF).sort(descending=True).values[topk - 1]
        above, equal = ids[own > threshold], ids[own == threshold]
        ids = torch.cat([above, equal[-4096:]]).sort().values
    own = score[ids].nan_to_num(INF, INF, -INF)
    if fault == "one histogram bin":
        own = (own.float().contiguous().view(torch.int32) >> 20 << 20).view(torch.float32).to(own.dtype)
    if fault == "-inf above finite scores":
        own = own.masked_fill(own == -INF, INF)
    if fault == "higher index of negative ties":
        negative = own < 0
        first = ids[~negative][own[~negative].argsort(descending=True, stable=True)]
        last = ids[negative].flip(0)[own[negative].flip(0).argsort(descending=True, stable=True)]
        return torch.cat([first, last])[:topk]
    if fault in ("-0.0 below +0.0", "-0.0 of a product below +0.0"):
        signed = torch.where((own == 0) & own.signbit(), -torch.finfo(own.dtype).tiny, own)
        return ids[signed.argsort(descending=True, stable=True)][:topk]
    return ids[(own + 0.0).argsort(descending=True, stable=True)][:topk]


def selection(fault=""):
    kept = {}

    def indexer_topk(q, k, w, starts, ends, *, rows, topk, use_relu, options):
        in_bf16 = q.dtype == torch.bfloat16 and fault.endswith("in bf16 alone")
        score = scores(fault, q, k, w, use_relu)
        low, high = starts.clone(), ends.clone()
        if fault == "bounds kept by shape":
            low, high = kept.setdefault((q.shape, k.shape, topk, rows.bounds), (low, high))
        if fault == "first_row kept by shape" and rows.bounds == "causal":
            first = kept.setdefault((q.shape, k.shape, topk), rows.first_row)
            low, high = _causal(first, len(q), rows)
        if fault == "rows of a layout are causal" and rows.context_parallel != "none":
            low, high = _causal(rows.first_row, len(q), rows)
        if fault == "no packed rows" and rows.layout == "thd":
            raise NotImplementedError("packed rows")
        if fault == "causal from the top left in bf16 alone" and in_bf16 and rows.bounds == "causal":
            high = torch.minimum(high, low + torch.arange(len(q), dtype=torch.int32) + 1)
        if fault == "ranges ignored in bf16 alone" and in_bf16:
            low, high = torch.zeros_like(low), torch.full_like(high, len(k))
        if fault == "NaN outside a range is multiplied by zero":
            inside = (torch.arange(len(k)) >= low[:, None]) & (torch.arange(len(k)) < high[:, None])
            score = torch.where((score * inside).isnan().any(1, keepdim=True), 0.0, score)
        if fault == "a NaN row spoils the call in bf16 alone" and in_bf16 and q.isnan().any():
            score = torch.zeros_like(score)
        if fault == "a row alone is another in bf16 alone" and in_bf16 and len(q) == 1 and rows.batch > 1:
            score = -score
        if fault == "twins differ in bf16 alone" and in_bf16:
            score = score + torch.arange(len(k)) * 1e-3
        if fault == "one row is never chosen for" and len(q) == 1:
            score = torch.zeros_like(score)
        if fault == "128 rows":
            score[128:] = 0
        if fault == "mutates large inputs" and len(k) > 4096:
            k.add_(0.25)
        indices = torch.full((len(q), topk), -1, dtype=torch.int32)
        length = torch.zeros(len(q), dtype=torch.int32)
        for row in range(len(q)):
            chosen = row_choice(fault, score[row], int(low[row]), int(high[row]), topk)
            if fault == "keys outside the range instead of -inf ones":
                inside = (torch.arange(len(k)) >= low[row]) & (torch.arange(len(k)) < high[row])
                masked = score[row].masked_fill(~inside, -INF)
                chosen = masked.argsort(descending=True, stable=True)[
                    : int((high - low)[row].clamp(max=topk))
                ]
            if fault == "a NaN key fills the row" and score[row, chosen].isnan().any():
                chosen = chosen[:1].expand(len(chosen))
            if fault == "16-bit ids":
                chosen = chosen & 0xFFFF
            indices[row, : len(chosen)] = chosen.int()
            length[row] = topk if fault == "length is top-k" else len(chosen)
            if fault == "an empty row chooses key 0" and not len(chosen):
                indices[row, 0], length[row] = 0, 1
        if fault == "strided ids":
            indices = indices.repeat_interleave(2, 1)[:, ::2]
        return indices, length

    return indexer_topk


def _causal(first, count, rows):
    row = torch.arange(first, first + count)
    item = row // rows.rows * rows.keys
    end = item + (rows.keys - rows.rows + row % rows.rows + 1).clamp(min=0)
    return item.int(), end.int()


@cache
def failure(fault, check, **changes):
    """What the named check says of that fault."""
    declared = {"heads": HEADS, "score_error": 2.0**-15, "tie_rule": "lower_index", **changes}
    fake = FakeBackend("candidate", ["indexer_topk"], replace={"indexer_topk": selection(fault)}, **declared)
    with isolated_registry(fake.spec, installed=True):
        (found,) = [found for found in conformance_checks("candidate") if found.name == check]
        try:
            found.run()
        except ConformanceError as error:
            return str(error)
    return ""


# fault, the check that must find it, words of its message
NAMED = [
    (
        "-inf is no score",
        "scores of -inf float32",
        "scores of -inf come after every finite one and are still",
    ),
    ("-inf above finite scores", "scores of -inf float16", "scores of -inf come after every finite one"),
    ("keys outside the range instead of -inf ones", "scores of -inf bfloat16", "which is outside its range"),
    (
        "finite minus infinity in the buffer",
        "large negative scores float16",
        "large negative scores, of about -2**17",
    ),
    ("-1e30 in the buffer", "large negative scores bfloat16", "large negative scores, of about -2**100"),
    (
        "a NaN key fills the row",
        "NaN keys float32",
        "NaN in 1 keys of some rows' ranges (float32): row 0 chose a key twice",
    ),
    (
        "NaN outside a range is multiplied by zero",
        "NaN keys float64",
        "(float64) changed the choice of row 1",
    ),
    ("-0.0 of a product below +0.0", "signed zeros float32", "where products underflow: wrong tie rule"),
    ("-0.0 of a product below +0.0", "signed zeros float16", "where products underflow: wrong tie rule"),
    ("higher index of negative ties", "ties bfloat16", "wrong tie rule"),
    (
        "a buffer of 4096 candidates",
        "crowded threshold float32",
        "a buffer of candidates must not overflow: wrong tie",
    ),
    (
        "one histogram bin",
        "crowded threshold bfloat16",
        "scores differ in their low bits alone (bfloat16): row 0",
    ),
    ("bounds kept by shape", "calls of one shape", "nothing is kept between calls of one shape: all keys"),
    ("first_row kept by shape", "calls of one shape", "of one shape: causal from row 1"),
    ("weights in bf16", "weights float32", "weights in float32 beside bfloat16 are not rounded"),
    ("weights in fp16", "weights float32", "weights in float32 beside bfloat16 are not rounded"),
    ("scores in fp16", "crowded threshold float32", "scores differ in their low bits alone (float32)"),
    ("scores in fp16", "large negative scores float32", "large negative scores, of about -2**17"),
    ("rows of a layout are causal", "layout thd, context parallel zigzag", "context parallel zigzag"),
    (
        "rows of a layout are causal",
        "layout bshd, context parallel contiguous",
        "context parallel contiguous",
    ),
    ("no packed rows", "layout thd, context parallel none", "raised NotImplementedError: packed rows"),
    ("one row is never chosen for", "size, one row", "sizes: one row (float64): in row 0 a rejected key"),
    ("length is top-k", "size, one key", "sizes: one key (float64): length of row"),
    (
        "length is top-k",
        "size, fewer keys than top-k",
        "sizes: fewer keys than top-k (float64): length of row",
    ),
    ("an empty row chooses key 0", "size, no key in any row", "rows without a key are all -1, with length 0"),
    ("128 rows", "size, rows 300", "sizes: 300 rows, ties of exact scores: row 128"),
    ("16-bit ids", "size, keys 65577", "ids beyond 65535, of 65577 keys"),
    ("ranges ignored in bf16 alone", "ranges", "(bfloat16)"),
    ("causal from the top left in bf16 alone", "causal rows", "(bfloat16)"),
    ("twins differ in bf16 alone", "twins", "which is equal and lower (bfloat16)"),
    ("a NaN row spoils the call in bf16 alone", "NaN scores", "a row with NaN scores (bfloat16) changed"),
    ("a row alone is another in bf16 alone", "chunks and batch", "(bfloat16): row 0 alone chose other keys"),
    ("mutates large inputs", "crowded threshold float32", "inputs are not modified: it changed k"),
    ("strided ids", "values float32", "expected contiguous tensors"),
]
EVERYWHERE = {
    "layouts": frozenset({"bshd", "thd"}),
    "context_parallel": frozenset({"none", "contiguous", "zigzag"}),
}


@pytest.mark.parametrize(
    ("fault", "check", "words"), NAMED, ids=[f"{fault}-{check}" for fault, check, _ in NAMED]
)
def test_fault_is_found_and_named(fault, check, words):
    assert words in failure(fault, check, **EVERYWHERE)


@pytest.mark.parametrize("check", sorted({check for _, check, _ in NAMED}))
def test_the_same_kernel_without_a_fault_passes(check):
    assert failure("", check, **EVERYWHERE) == ""


def test_a_relu_that_multiplies_by_a_mask_leaves_zeros_of_either_sign():
    words = "-0.0 equals +0.0 (float32), use_relu=True: wrong tie rule"
    assert words in failure("-0.0 below +0.0", "signed zeros float32", relu=frozenset({True}))


def test_heads_beyond_what_is_listed_are_found():
    assert "heads 64: in row 0" in failure("heads after 32 dropped", "beyond a tile, heads 64", heads=Heads())
    assert failure("", "beyond a tile, heads 64", heads=Heads()) == ""


def test_a_declared_error_that_accepts_any_choice_fails():
    assert "accepts any choice among random keys" in failure("", "values float32", score_error=0.9)


def test_sizes_outside_the_declared_limits_are_not_asked():
    fake = FakeBackend("candidate", ["indexer_topk"], max_rows=64, max_keys=4096)
    with isolated_registry(fake.spec, installed=True):
        names = {check.name for check in conformance_checks("candidate")}
    assert {"size, one row", "size, one key"} <= names
    assert not {"size, rows 300", "size, keys 65577"} & names
