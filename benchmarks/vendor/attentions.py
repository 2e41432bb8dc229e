"""Attention against fp64, and through streams, graphs and slices of a sequence."""

from __future__ import annotations

import torch
from common import DENSE, SCALE, VENDOR, attention, error, guarded, indexer, note, operands
from indexers import same_sets
from torch import Tensor

import dsa_dispatch
from dsa_dispatch.testing import assert_backend_ran


def check_attention(quick: bool) -> None:
    for heads in (64,) if quick else (128, 64, 16, 8, 1, 6, 192):
        with guarded(f"attention heads={heads}"):
            case = operands(96, 1, heads, 4096, 2048, seed=heads)
            want = attention(DENSE, case[0].double(), case[1].double(), case[2], case[3], case[4].double())
            with (
                assert_backend_ran("flashmla", "attention_forward"),
                assert_backend_ran("cudnn", "attention_backward"),
            ):
                got = attention(VENDOR, *case)
            compare(f"attention heads={heads}", got, want)
            if heads == 64:
                for first, second in (
                    ("flashmla", "triton"),
                    ("flashmla", "torch_dense"),
                    ("torch_dense", "cudnn"),
                ):
                    mixed = {
                        "dsa_kernel_backend": {"attention_forward": first, "attention_backward": second},
                        "dsa_kernel_fallback": "error",
                    }
                    compare(
                        f"attention heads=64 forward {first} backward {second}", attention(mixed, *case), want
                    )
                poisoned = case[1].clone()
                named = case[2].clone()
                named[(named < 0) | (named >= 4000)] = -1
                slots = torch.arange(named.shape[2], device="cuda")
                behind = slots >= case[3][..., None]
                named[behind] = 4090
                clean = attention(VENDOR, case[0], case[1], torch.where(behind, -1, named), case[3], case[4])
                poisoned[4000:] = torch.nan
                got = attention(VENDOR, case[0], poisoned, named, case[3], case[4])
                note(
                    "attention beside NaN keys",
                    equal_out=torch.equal(got["out"], clean["out"]),
                    equal_dq=torch.equal(got["dq"], clean["dq"]),
                    nan=bool(got["dkv"].isnan().any() | got["dq"].isnan().any()),
                )
    with guarded("attention batch 2"):
        case = operands(48, 2, 64, 2304, 2048, seed=7)
        want = attention(DENSE, case[0].double(), case[1].double(), case[2], case[3], case[4].double())
        compare("attention batch=2", attention(VENDOR, *case), want)
        small = {**VENDOR, "query_chunk": 17}
        compare("attention batch=2 in chunks of 17", attention(small, *case), want)
    with guarded("attention 512 channels"):
        case = operands(96, 1, 64, 4096, 2048, channels=512, seed=8)
        want = attention(DENSE, case[0].double(), case[1].double(), case[2], case[3], case[4].double())
        compare("attention channels=512", attention(VENDOR, *case), want)
    with guarded("attention x30"):
        case = operands(96, 1, 64, 4096, 2048, seed=9, holes=False)
        case = (case[0] * 30, case[1], *case[2:])
        want = attention(DENSE, case[0].double(), case[1].double(), case[2], case[3], case[4].double())
        compare("attention query x30", attention(VENDOR, *case), want)
        case = operands(96, 1, 64, 4096, 2048, seed=9, holes=False)
        case = (case[0] * 30, case[1] * 30, *case[2:])
        want = attention(DENSE, case[0].double(), case[1].double(), case[2], case[3], case[4].double())
        compare("attention query and key x30", attention(VENDOR, *case), want)
    with guarded("attention one key"):
        case = operands(4096, 1, 64, 256, 128, seed=10, holes=False)
        ids = torch.full_like(case[2], -1)
        ids[..., 0] = 5
        ids[..., 1] = torch.arange(4096, device="cuda") % 256
        want = attention(DENSE, case[0].double(), case[1].double(), ids, None, case[4].double())
        compare(
            "attention 4096 queries on one key", attention(VENDOR, case[0], case[1], ids, None, case[4]), want
        )


def check_delta(quick: bool) -> None:
    """Where the backward's error comes from: against fp64, and against fp64 with delta from the output in bf16."""
    for what, factor, case in (
        ("query x1", 1, operands(96, 1, 64, 4096, 2048, seed=9, holes=False)),
        ("query x30", 30, operands(96, 1, 64, 4096, 2048, seed=9, holes=False)),
        ("two keys a row", 1, operands(2048, 1, 64, 256, 128, seed=10, holes=False)),
        ("query x6, 128 keys a row", 6, operands(96, 1, 64, 256, 128, seed=12, holes=False)),
    ):
        with guarded(f"delta {what}"):
            query, key, ids, _, dout = case
            query = query * factor
            if what.startswith("two"):
                ids[..., 2:] = -1
            wide = (query.double(), key.double(), ids, None, dout.double())
            exact = attention(DENSE, *wide)
            forward = {
                "dsa_kernel_backend": {"attention_forward": "flashmla"},
                "dsa_kernel_fallback": "error",
            }
            found = {}
            for backward in ("cudnn", "triton", "torch_dense"):
                stages = {**forward["dsa_kernel_backend"], "attention_backward": backward}
                found[backward] = attention(
                    {**forward, "dsa_kernel_backend": stages}, query, *case[1:3], None, dout
                )
            rounded = gradients(*wide[:3], found["cudnn"]["out"].double(), dout.double())
            for name in ("dq", "dkv"):
                note(
                    f"delta {what}: {name}",
                    **{backward: error(got[name], exact[name]) for backward, got in found.items()},
                    fp64_with_delta_from_the_rounded_output=error(rounded[name], exact[name]),
                    cudnn_against_that=error(found["cudnn"][name], rounded[name]),
                )


def gradients(query: Tensor, key: Tensor, ids: Tensor, out: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Of one batch item, in fp64, with ``delta = rowsum(out * dout)`` of the output as it is given."""
    q, kv, out, dout, ids = query[:, 0], key[:, 0, 0], out[:, 0], dout[:, 0], ids[0]
    dq, dkv = torch.zeros_like(q), torch.zeros_like(kv)
    for part in torch.arange(len(q), device=q.device).split(32):
        named = ids[part].long()
        keys = kv[named.clamp(min=0)]
        score = torch.einsum("thd,twd->thw", q[part], keys) * SCALE
        weight = score.masked_fill((named < 0)[:, None], -torch.inf).softmax(2)
        products = torch.einsum("thd,twd->thw", dout[part], keys[..., :512])
        delta = (out[part] * dout[part]).sum(2, keepdim=True)
        inner = weight * (products - delta) * SCALE
        dq[part] = torch.einsum("thw,twd->thd", inner, keys)
        slot = torch.einsum("thw,thd->twd", inner, q[part])
        slot[..., :512] += torch.einsum("thw,thd->twd", weight, dout[part])
        slot[named < 0] = 0
        dkv.index_add_(0, named.clamp(min=0).reshape(-1), slot.flatten(0, 1))
    return {"dq": dq[:, None], "dkv": dkv[:, None, None]}


def compare(what: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    figures = {name: error(got[name], want[name]) for name in ("out", "dq", "dkv")}
    infinite = torch.equal(got["lse"].isinf(), want["lse"].isinf())
    finite = want["lse"].isfinite()
    figures["lse_abs"] = float((got["lse"].double() - want["lse"].double())[finite].abs().max())
    note(
        what,
        **figures,
        infinities_agree=infinite,
        nan=any(bool(tensor.isnan().any()) for tensor in got.values()),
    )


def check_more(quick: bool) -> None:
    with guarded("side stream"):
        case = operands(256, 1, 64, 4096, 2048, seed=20)
        want = attention(VENDOR, *case)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = attention(VENDOR, *case)
        torch.cuda.current_stream().wait_stream(stream)
        note(
            "side stream",
            out=torch.equal(got["out"], want["out"]),
            dq=torch.equal(got["dq"], want["dq"]),
            dkv=error(got["dkv"], want["dkv"]),
        )
    with guarded("graph capture"):
        q, kv, _, _, dout = operands(256, 1, 64, 4096, 2048, seed=21)
        k_index = indexer(256, 1, 64, 4096, 22, False)

        def step():
            chosen = dsa_dispatch.run_fused_qk_topk(VENDOR, *k_index, 2048)
            leaf_q, leaf_kv = q.detach().requires_grad_(), kv.detach().requires_grad_()
            out = dsa_dispatch.run_fused_absorbed_sparse_attention(
                VENDOR, leaf_q, leaf_kv, chosen.indices, SCALE, 512, chosen.length
            )
            return (out, *torch.autograd.grad(out, (leaf_q, leaf_kv), dout))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        other = operands(256, 1, 64, 4096, 2048, seed=23)
        q.copy_(other[0])
        kv.copy_(other[1])
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        eager = step()
        note(
            "graph capture",
            out=torch.equal(replayed[0], eager[0]),
            dq=torch.equal(replayed[1], eager[1]),
            dkv=error(replayed[2], eager[2]),
        )
    with guarded("context parallel"):
        rows, keys, topk = 512, 1024, 256
        full = indexer(keys, 1, 64, keys, 24, True)
        boundary = torch.tensor([0, 300, 700, 1024], device="cuda")
        position = torch.arange(keys, device="cuda")
        starts = boundary[torch.bucketize(position, boundary, right=True) - 1].int()
        ends = (position + 1).int()
        whole = dsa_dispatch.run_fused_qk_topk(VENDOR, *full, topk, starts, ends)
        mine = dsa_dispatch.run_fused_qk_topk(
            VENDOR, full[0][rows:], full[1], full[2][rows:], topk, starts[rows:], ends[rows:]
        )
        want = dsa_dispatch.run_fused_qk_topk(DENSE, *full, topk, starts, ends)
        note(
            "packed, cp=2 rank 1",
            equals_rows_of_the_whole=torch.equal(mine.indices, whole.indices[:, rows:]),
            rows_that_differ_from_the_reference=same_sets(whole, want),
        )
        causal = dsa_dispatch.run_fused_qk_topk(VENDOR, full[0][rows:], full[1], full[2][rows:], topk)
        reference = dsa_dispatch.run_fused_qk_topk(DENSE, full[0][rows:], full[1], full[2][rows:], topk)
        note("causal, cp=2 rank 1", rows_that_differ_from_the_reference=same_sets(causal, reference))
