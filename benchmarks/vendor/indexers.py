"""Selection and loss against the reference, and the conformance suite."""

from __future__ import annotations

import time

import torch
from common import DENSE, SCALE, VENDOR, error, guarded, indexer, note

import dsa_dispatch
from dsa_dispatch.testing import assert_backend_ran
from dsa_dispatch.testing.conformance import conformance_checks
from dsa_dispatch.testing.judge import NotHere

CONFORMANCE_SECONDS = 150
SELECTIONS = (
    ("causal", 700, 1, 64, 3001, 512),
    ("cp slice", 300, 2, 32, 2000, 256),
    ("rows > keys", 900, 1, 16, 600, 64),
    ("8 heads", 300, 1, 8, 2000, 256),
    ("2048 of 8192", 512, 1, 64, 8192, 2048),
    ("more slots than keys", 300, 1, 64, 200, 256),
)
LOSSES = (
    ("64 heads", 256, 1, 64, 1500, 512, torch.float32, 1.0),
    ("32 heads", 200, 2, 32, 900, 256, torch.float32, 1.0),
    ("bf16 weights", 200, 1, 64, 900, 256, torch.bfloat16, 1.0),
    ("128 heads", 100, 1, 128, 900, 256, torch.float32, 1.0),
    ("peaked", 200, 1, 64, 900, 256, torch.float32, 300.0),
    ("steep", 200, 1, 64, 900, 256, torch.float32, 20000.0),
)
CHANGED = ("dense_form", "values", "large_scores", "NaN", "base")
"""Checks of the quick selection, of the indexer stages alone."""


def same_sets(got, want) -> int:
    a = got.indices.sort(-1).values
    b = want.indices.sort(-1).values
    return int((a != b).any(-1).sum())


def prefix_form(result) -> bool:
    slots = torch.arange(result.indices.shape[-1], device="cuda")
    return bool(((result.indices >= 0) == (slots < result.length[..., None])).all())


def check_topk(quick: bool) -> None:
    def run(config, case, topk, starts=None, ends=None):
        return dsa_dispatch.run_fused_qk_topk(config, *case, topk, starts, ends)

    for name, rows, batch, heads, keys, topk in SELECTIONS[:1] if quick else SELECTIONS:
        with guarded(f"topk {name}"):
            case = indexer(rows, batch, heads, keys, 3, True)
            with assert_backend_ran("cudnn", "indexer_topk"):
                got = run(VENDOR, case, topk)
            want = run(DENSE, case, topk)
            chunked = run({**VENDOR, "query_chunk": 97}, case, topk)
            note(
                f"topk {name}",
                rows_that_differ=same_sets(got, want),
                lengths=torch.equal(got.length, want.length),
                prefix=prefix_form(got),
                chunked_rows_that_differ=same_sets(got, chunked),
            )
    for name, high in (("packed", False), ("ranges", True)):
        with guarded(f"topk {name}"):
            rows, keys, topk = 600, 3000, 256
            case = indexer(rows, 1, 64, keys, 4, True)
            position = torch.arange(rows, device="cuda") + keys - rows
            starts = (position // 700 * 700).int() if not high else (position // 3).int()
            ends = (
                (position + 1).int()
                if not high
                else (starts + torch.arange(rows, device="cuda").int() * 4).clamp(max=keys)
            )
            got, want = run(VENDOR, case, topk, starts, ends), run(DENSE, case, topk, starts, ends)
            note(
                f"topk {name}",
                rows_that_differ=same_sets(got, want),
                lengths=torch.equal(got.length, want.length),
                prefix=prefix_form(got),
            )
    with guarded("topk infinities"):
        q, k, w = indexer(400, 1, 64, 2000, 5, True)
        k[::2] = -k[::2].abs() * 1e38
        k[1::4] = k[1::4].abs() * 1e38
        w = -w.abs() - 1
        got, want = run(VENDOR, (q.abs(), k, w), 512), run(DENSE, (q.abs(), k, w), 512)
        note(
            "topk with infinities",
            rows_that_differ=same_sets(got, want),
            lengths=torch.equal(got.length, want.length),
            prefix=prefix_form(got),
        )
    with guarded("topk NaN"):
        q, k, w = indexer(400, 1, 64, 2000, 5, False)
        k[100] = torch.nan
        clean = indexer(400, 1, 64, 2000, 5, False)
        q[7] = torch.nan
        got = run(VENDOR, (q, clean[1], w), 512)
        other = run(VENDOR, clean, 512)
        rest = torch.arange(400, device="cuda") != 7
        unique = all(
            len(set(row)) == len(row)
            for row in [[i for i in r if i >= 0] for r in got.indices[0, 5:9].tolist()]
        )
        note(
            "topk with a NaN row",
            others_untouched=torch.equal(got.indices[0, rest], other.indices[0, rest]),
            prefix=prefix_form(got),
            unique=unique,
            high=int(got.indices.max()),
        )
        got = run(VENDOR, (clean[0], k, w), 512)
        unique = all(
            len(set(row)) == len(row)
            for row in [[i for i in r if i >= 0] for r in got.indices[0, ::50].tolist()]
        )
        note(
            "topk with a NaN key",
            prefix=prefix_form(got),
            unique=unique,
            high=int(got.indices.max()),
            lengths=torch.equal(got.length, other.length),
        )
    with guarded("topk random"):
        case = indexer(512, 1, 64, 8192, 6, False)
        got = run(VENDOR, case, 2048)
        q, k, w = (tensor.double() for tensor in case)
        dots = torch.einsum("shd,kd->shk", q[:128, 0], k[:, 0])
        score = torch.einsum("shk,sh->sk", dots.relu(), w[:128, 0])
        bound = torch.einsum("shk,sh->sk", q[:128, 0].abs() @ k[:, 0].abs().T, w[:128, 0].abs())
        chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(
            1, got.indices[0, :128].long().clamp(min=0), True
        )
        allowed = torch.arange(8192, device="cuda") <= torch.arange(128, device="cuda")[:, None] + 8192 - 512
        worst = torch.where(chosen & allowed, score, torch.inf).amin(1)
        best = torch.where(~chosen & allowed, score, -torch.inf).amax(1)
        note(
            "topk random",
            worst_inversion_relative=float(((best - worst) / bound.amax(1)).max()),
            declared=2 * 2.0**-15,
        )


def check_loss(quick: bool) -> None:
    def run(config, case, query, key, topk, sparse, starts=None, ends=None):
        q, k, w = (tensor.detach().requires_grad_() for tensor in case)
        result = dsa_dispatch.run_fused_qk_topk_with_loss(
            config, q, k, w, topk, starts, ends, None, query, key, SCALE, 1.0, None, sparse_loss=sparse
        )
        grads = torch.autograd.grad(result.loss, (q, k, w))
        return result, dict(zip(("dq", "dk", "dw"), grads, strict=True))

    for name, rows, batch, heads, keys, topk, weights, factor in LOSSES[-2:] if quick else LOSSES:
        for sparse in (True, False):
            with guarded(f"loss {name} sparse={sparse}"):
                q, k, w = indexer(rows, batch, heads, keys, 11, False, weights)
                w = w * factor
                make = torch.Generator("cuda").manual_seed(1)
                query = torch.randn(rows, batch, 16, 576, generator=make, device="cuda").bfloat16() * 0.3
                key = torch.randn(keys, batch, 1, 576, generator=make, device="cuda").bfloat16()
                # One selection for both, so that only the loss is compared.
                mixed = {
                    "dsa_kernel_backend": {
                        "indexer_topk": "torch_dense",
                        "indexer_target": "torch_dense",
                        "indexer_loss": "cudnn",
                    },
                    "dsa_kernel_fallback": "error",
                    "memory_budget": 2 << 30,
                }
                with assert_backend_ran("cudnn", "indexer_loss"):
                    got, grads = run(mixed, (q, k, w), query, key, topk, sparse)
                want, exact = run(
                    DENSE, (q.double(), k.double(), w.double()), query.double(), key.double(), topk, sparse
                )
                note(
                    f"loss {name} sparse={sparse}",
                    loss=want.loss.item(),
                    loss_error=abs(got.loss.item() / want.loss.item() - 1),
                    selections_differ=same_sets(got, want),
                    **{name: error(grads[name], exact[name]) for name in exact},
                )


def check_conformance(quick: bool) -> None:
    begun = time.time()
    for name in ("flashmla", "cudnn"):
        passed, skipped, failed, left = 0, [], [], 0
        for check in conformance_checks(name):
            if quick and not (
                check.stage.startswith("indexer") and any(part in str(check) for part in CHANGED)
            ):
                continue
            if time.time() - begun > CONFORMANCE_SECONDS:
                left += 1
                continue
            try:
                check.run()
                passed += 1
            except NotHere as reason:
                skipped.append(f"{check}: {reason}"[:300])
            except Exception as fault:
                failed.append(f"{check}: {fault}"[:600])
                print(f"FAILED {failed[-1]}", flush=True)
        note(
            f"conformance {name}",
            passed=passed,
            failed=failed,
            skipped=len(skipped),
            reasons=sorted(set(skipped))[:6],
            not_run_for_want_of_time=left,
        )
