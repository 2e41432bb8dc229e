"""What the operations cost beside the kernels that they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import SCALE, VENDOR, VENDOR_WIDE, bench, guarded, indexer, note, operands

import dsa_dispatch
from dsa_backends.cudnn_dsa import frontend
from dsa_backends.flash_mla.providers import usable


def check_speed(quick: bool) -> None:
    dsa = frontend.load(frontend.ATTENTION_BACKWARD)
    found = usable(torch.device("cuda", 0))
    raw = found.provider.run
    forwards: dict[str, Callable[[], Any]] = {}
    backwards: dict[str, Callable[[], Any]] = {}
    with guarded("speed attention"):
        counts = (64, 32, 8) if quick else (128, 64, 32, 16, 8)
        for heads in counts:
            q, kv, ids, _, dout = operands(4096, 1, heads, 8192, 2048, seed=30, holes=False)
            full = torch.full((4096,), 2048, dtype=torch.int32, device="cuda")
            flat = (q[:, 0], kv[:, 0, 0], ids[0])
            leaves = (q.detach().requires_grad_(), kv.detach().requires_grad_())
            if heads in (64, 128):
                out, lse = raw(flat[0], kv[:, 0], flat[2][:, None], SCALE, 512, full)
                sink = torch.full((heads,), -torch.inf, device="cuda")
                natural = lse * found.lse_factor
                forwards[f"forward_direct_{heads}"] = lambda flat=flat, kv=kv, full=full: raw(
                    flat[0], kv[:, 0], flat[2][:, None], SCALE, 512, full
                )
                backwards[f"backward_direct_{heads}"] = (
                    lambda flat=flat, out=out, dout=dout, natural=natural, sink=sink, full=full: (
                        dsa.sparse_attention_backward_wrapper(
                            flat[0], flat[1], out, dout[:, 0], natural, sink, flat[2], SCALE, full
                        )
                    )
                )
            budgets = (
                (("", VENDOR_WIDE), ("_default_budget", VENDOR)) if heads == 128 else (("", VENDOR_WIDE),)
            )
            for suffix, config in budgets:
                forwards[f"forward_{heads}{suffix}"] = lambda q=q, kv=kv, ids=ids, config=config: (
                    dsa_dispatch.run_fused_absorbed_sparse_attention(config, q, kv, ids, SCALE, 512)
                )
                made = dsa_dispatch.run_fused_absorbed_sparse_attention(config, *leaves, ids, SCALE, 512)
                backwards[f"backward_{heads}{suffix}"] = lambda made=made, leaves=leaves, dout=dout: (
                    torch.autograd.grad(made, leaves, dout, retain_graph=True)
                )
        figures = {**bench(forwards), **bench(backwards)}
        for way in ("forward", "backward"):
            for heads in (count for count in counts if count >= 64):
                figures[f"{way}_ratio_{heads}"] = figures[f"{way}_direct_{heads}"] / figures[f"{way}_{heads}"]
            for heads in (count for count in counts if count < 64):
                figures[f"{way}_{heads}_over_64"] = figures[f"{way}_{heads}"] / figures[f"{way}_64"]
        note("speed attention (ms; 4096 rows, 8192 keys, width 2048)", **figures)
    for keys in (8192,) if quick else (8192, 32768):
        with guarded(f"speed topk keys={keys}"):
            case = indexer(4096, 1, 64, keys, 31, False)
            q, k, w = case[0].transpose(0, 1), case[1].transpose(0, 1)[:, :, None], case[2].transpose(0, 1)
            offset = torch.full((1,), keys - 4096, dtype=torch.int32, device="cuda")
            position = (torch.arange(4096, device="cuda") + keys - 4096).int()
            ends, starts = position + 1, position // 6000 * 6000

            def direct(deterministic: bool = False, q=q, k=k, w=w, offset=offset, ends=ends):
                scores = dsa.indexer_forward_wrapper(q, k, w, ratio=1, q_causal_offsets=offset)["scores"][0]
                return dsa.indexer_top_k_wrapper(
                    scores, ends, 2048, return_val=False, deterministic=deterministic
                )

            figures = bench(
                {
                    "direct": direct,
                    "direct_deterministic": lambda: direct(True),
                    "dispatch": lambda case=case: dsa_dispatch.run_fused_qk_topk(VENDOR_WIDE, *case, 2048),
                    "dispatch_default_budget": lambda case=case: dsa_dispatch.run_fused_qk_topk(
                        VENDOR, *case, 2048
                    ),
                    "dispatch_packed": lambda case=case, starts=starts, ends=ends: (
                        dsa_dispatch.run_fused_qk_topk(VENDOR_WIDE, *case, 2048, starts, ends)
                    ),
                }
            )
            note(f"speed topk keys={keys} (ms; 4096 rows, 64 heads, top 2048)", **figures)
