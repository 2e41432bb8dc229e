"""The TileLang kernels on one GPU: values against fp64, then times, as one JSON file.

    PYTHONPATH=.:backends python benchmarks/tilelang/h200.py --out FOLDER

sq = 4096, sk = 8192, width 2048, d_qk = 576, d_v = 512, bf16, random distinct ids per row; median of
``triton.testing.do_bench``. TFLOP/s count 2·sq·h·width·1088 forward and 2·sq·h·width·2752 backward. The kernels are
compiled first, in parallel processes, into TileLang's folder on disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path

import torch

from dsa_backends.tilelang_kernels import compiler
from dsa_backends.tilelang_kernels.attention_backward import attention_backward
from dsa_backends.tilelang_kernels.attention_forward import Form, attention_forward, launch_forward
from dsa_backends.tilelang_kernels.indexer_loss import indexer_loss
from dsa_backends.tilelang_kernels.indexer_topk import indexer_topk, select_from_scores
from dsa_dispatch._call import RowLayout, StageOptions

ROWS, KEYS, WIDTH, SCALE = 4096, 8192, 2048, 576**-0.5


def kernels_used():
    for tail in (64, 0):
        for dtype in ("bfloat16", "float16"):
            static = (tail, dtype)
            yield "hopper_forward_kernel:hopper_forward", static
            yield "hopper_few_forward_kernel:hopper_few_forward", static
            yield "hopper_few_backward_kernel:hopper_few_backward", static
            yield "key_gradient_kernel:hopper_key_gradient", (16, *static, True)
            if dtype == "bfloat16":
                yield "pairs_kernels:hopper_pairs", static
                yield "query_gradient_kernel:hopper_query_gradient", static
                yield "key_gradient_kernel:hopper_key_gradient", (64, *static, False)
    yield "key_gradient_kernel:hopper_key_gradient", (128, 64, "bfloat16", False)
    yield "portable_forward_kernel:portable_forward", (16, 64, "bfloat16")
    yield "portable_forward_kernel:portable_forward", (32, 64, "bfloat16")
    yield "select_kernel:select_best", ()
    for dtype in ("bfloat16", "float16"):
        yield "pairs_kernels:row_shift", (dtype,)
        yield "score_kernel:index_scores", (16, 64, dtype, True, True)
    for relu in (True, False):
        yield "score_kernel:index_scores", (64, 128, "bfloat16", relu, True)
        yield "loss_kernel:index_loss", (16, 64, relu)
    yield "score_kernel:index_scores", (16, 64, "bfloat16", False, True)
    yield "loss_kernel:index_loss", (64, 128, True)


def compile_one(job):
    start = time.perf_counter()
    try:
        compiler.kernel(torch.device("cuda", 0), job[0], *job[1])
    except Exception as error:
        return job, -1.0, f"{type(error).__name__}: {error}"[-800:]
    return job, time.perf_counter() - start, ""


class Report:
    def __init__(self, out):
        self.out = out
        self.results = []

    def add(self, **entry):
        self.results.append(entry)
        print(entry, flush=True)
        self.out.mkdir(parents=True, exist_ok=True)
        facts = {
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "tilelang": compiler.tilelang().__version__,
            "results": self.results,
        }
        (self.out / "tilelang-h200.json").write_text(json.dumps(facts, indent=1))


def relative(value, wanted):
    return float((value.double() - wanted).norm() / wanted.norm().clamp_min(1e-300))


def attention_operands(rows, keys, width, heads, channels=576, up=1.0, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return (torch.randn(*shape, generator=generator, device="cuda") * up).to(dtype)

    q, kv, dout = normal(rows, heads, channels), normal(keys, channels), normal(rows, heads, 512) / up
    ids = torch.randint(-3, keys + 5, (rows, width), generator=generator, device="cuda", dtype=torch.int32)
    length = torch.randint(0, width + 1, (rows,), generator=generator, device="cuda", dtype=torch.int32)
    length[3], length[4], length[5] = 0, width, 1
    ids[6] = -1
    return q, kv, dout, ids, length


def exact_attention(q, kv, ids, length, scale):
    qd, kd = q.double().requires_grad_(), kv.double().requires_grad_()
    slots = torch.arange(ids.shape[1], device=ids.device)
    ok = (ids >= 0) & (ids < kv.shape[0]) & (slots < length[:, None])
    gathered = kd[torch.where(ok, ids.long(), 0)]
    score = torch.einsum("thd,twd->thw", qd, gathered) * scale
    score = score.masked_fill(~ok[:, None], -torch.inf)
    lse = score.logsumexp(-1)
    p = torch.where(ok[:, None], (score - lse.nan_to_num(neginf=0.0)[..., None]).exp(), 0.0)
    return torch.einsum("thw,twd->thd", p, gathered[..., :512]), lse, qd, kd


def check_attention(
    report, heads, width, channels=576, up=1.0, form=None, budget=1 << 21, dtype=torch.bfloat16
):
    rows, keys = 37, 300
    q, kv, dout, ids, length = attention_operands(rows, keys, width, heads, channels, up, dtype=dtype)
    ids[ids == 7] = -1
    scale = channels**-0.5 / up**2
    layout, options = RowLayout(1, rows, keys, "ranges"), StageOptions(memory_budget=budget)
    poisoned = kv.clone()
    poisoned[7] = torch.nan
    if form is None:
        out, lse = attention_forward(
            q, poisoned, ids, length, scale=scale, v_channels=512, rows=layout, options=options
        )
    else:
        out, lse = launch_forward(q, poisoned, ids, length, scale=scale, v_channels=512, form=form)
    wanted, exact_lse, qd, kd = exact_attention(q, kv, ids, length, scale)
    finite = torch.isfinite(exact_lse)
    entry = {
        "out": relative(out, wanted.detach()),
        "lse": float((lse.double() - exact_lse)[finite].abs().max()),
        "empty": bool((lse[~finite] == -torch.inf).all() and (out[~finite] == 0).all()),
    }
    if form is None:
        wanted.backward(dout.double())
        dkv = torch.ones(keys, channels, device="cuda")
        dq = attention_backward(
            *(q, poisoned, ids, length, out, lse, dout),
            scale=scale,
            v_channels=512,
            need_dq=True,
            dkv=dkv,
            rows=layout,
            options=options,
        )
        entry |= {"dq": relative(dq, qd.grad), "dkv": relative(dkv - 1, kd.grad)}
    kind = "" if form is None else form.where.partition(":")[2]
    report.add(check="attention", heads=heads, width=width, channels=channels, up=up, form=kind, **entry)


def check_topk(report, heads, dim, rows, keys, topk, relu, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(1)

    def whole(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, device="cuda").to(dtype)

    q, k, w = whole(-2, 3, rows, heads, dim), whole(-1, 2, keys, dim), whole(-2, 3, rows, heads).float()
    k[keys // 2 : keys // 2 * 2] = k[: keys // 2]
    layout = RowLayout(1, rows, keys)
    ends = (torch.arange(rows, device="cuda") + keys - rows + 1).clamp(0, keys).int()
    starts = torch.zeros_like(ends)
    ids, length = indexer_topk(
        q,
        k,
        w,
        starts,
        ends,
        rows=layout,
        topk=topk,
        use_relu=relu,
        options=StageOptions(memory_budget=1 << 19),
    )
    score = torch.einsum("thd,sd->ths", q.double(), k.double())
    score = ((score.relu() if relu else score) * w.double()[..., None]).sum(1)
    wrong = 0
    for t in range(rows):
        end = int(ends[t])
        wanted = torch.sort(-score[t, :end], stable=True).indices[:topk].sort().values
        got = ids[t, : int(length[t])].long().sort().values
        wrong += int(not torch.equal(got, wanted) or bool((ids[t, len(wanted) :] != -1).any()))
    report.add(check="topk", heads=heads, dim=dim, keys=keys, topk=topk, relu=relu, wrong_rows=wrong)


def check_select(report, columns, topk, kind):
    generator = torch.Generator("cuda").manual_seed(2)
    rows = 60
    if kind == "normal":
        scores = torch.randn(rows, columns, generator=generator, device="cuda")
    elif kind == "ties":
        scores = torch.randint(-3, 4, (rows, columns), generator=generator, device="cuda").float()
        scores[:, 1::2] = torch.where(scores[:, 1::2] == 0, -0.0, scores[:, 1::2])
        scores[3] = -torch.inf
    else:
        bits = torch.randint(0, 1024, (rows, columns), generator=generator, device="cuda", dtype=torch.int32)
        scores = (bits + 0x3F900000).view(torch.float32)
    starts = torch.randint(0, max(columns // 3, 1), (rows,), generator=generator, device="cuda").int()
    spans = torch.randint(0, columns, (rows,), generator=generator, device="cuda").int()
    ends = (starts + spans).clamp(max=columns)
    starts[1], ends[0], ends[1] = 0, starts[0], columns
    ids, length = select_from_scores(scores, starts, ends, topk)
    wrong = 0
    for t in range(rows):
        inside = torch.arange(int(starts[t]), int(ends[t]), device="cuda")
        wanted = inside[torch.sort(-(scores[t][inside] + 0.0), stable=True).indices[:topk]].sort().values
        got = ids[t, : int(length[t])].long().sort().values
        wrong += int(not torch.equal(got, wanted) or bool((ids[t, len(wanted) :] != -1).any()))
    report.add(check="select", columns=columns, topk=topk, kind=kind, wrong_rows=wrong)


def check_loss(report, heads, dim, width, relu):
    generator = torch.Generator("cuda").manual_seed(3)
    rows, keys = 33, 200

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k, w = normal(rows, heads, dim).bfloat16(), normal(keys, dim).bfloat16(), normal(rows, heads) / heads
    ids = torch.randint(-2, keys + 3, (rows, width), generator=generator, device="cuda", dtype=torch.int32)
    length = torch.randint(0, width + 1, (rows,), generator=generator, device="cuda", dtype=torch.int32)
    length[2], length[3] = 0, width
    slots = torch.arange(width, device="cuda")
    ok = (ids >= 0) & (ids < keys) & (slots < length[:, None])
    mass = torch.where(ok, torch.rand(rows, width, generator=generator, device="cuda"), 0.0)
    mass[4] = 0
    dk = torch.ones(keys, dim, device="cuda")
    zero = torch.zeros(rows, dtype=torch.int32, device="cuda")
    terms = indexer_loss(
        *(q, k, w),
        indices=ids,
        length=length,
        starts=zero,
        ends=zero + keys,
        mass=mass,
        rows=RowLayout(1, rows, keys, "ranges"),
        use_relu=relu,
        need_dq=True,
        need_dw=True,
        dk=dk,
        options=StageOptions(),
    )
    qd, kd, wd = (tensor.double().requires_grad_() for tensor in (q, k, w))
    dot = torch.einsum("thd,twd->thw", qd, kd[torch.where(ok, ids.long(), 0)])
    score = ((dot.relu() if relu else dot) * wd[..., None]).sum(1).masked_fill(~ok, -torch.inf)
    total = mass.double().sum(1, keepdim=True)
    teacher = mass.double() / total.clamp_min(1e-10)
    log_p = torch.where(ok, score - score.logsumexp(1, keepdim=True).nan_to_num(neginf=0.0), 0.0)
    kl = (teacher * (teacher.clamp_min(1e-10).log() - log_p)).sum(1)
    kl = torch.where(total[:, 0] > 0, kl, 0.0)
    kl.sum().backward()
    report.add(
        check="loss",
        heads=heads,
        dim=dim,
        width=width,
        relu=relu,
        kl=relative(terms.kl, kl.detach()),
        dq=relative(terms.dq, qd.grad),
        dw=relative(terms.dw, wd.grad),
        dk=relative(dk - 1, kd.grad),
    )


def checks(report):
    for heads, width in ((64, 200), (128, 130), (50, 129), (96, 70), (16, 200), (8, 129), (5, 64), (160, 65)):
        check_attention(report, heads, width)
    check_attention(report, 64, 200, up=30.0)
    check_attention(report, 16, 200, up=30.0)
    check_attention(report, 64, 333, channels=512)
    check_attention(report, 16, 333, channels=512)
    check_attention(report, 16, 100, dtype=torch.float16)
    for block in (16, 32):
        form = Form("portable_forward_kernel:portable_forward", (block, 64, "bfloat16"), block)
        check_attention(report, 50, 200, form=form)
    for heads, dim, relu in (
        (64, 128, True),
        (50, 128, True),
        (16, 64, True),
        (64, 128, False),
        (3, 64, False),
    ):
        check_topk(report, heads, dim, 100, 700, 64, relu)
    for columns, topk, kind in (
        *((1000, 64, "normal"), (5000, 2048, "normal"), (40000, 2048, "ties"), (40000, 3000, "normal")),
        *(
            (9000, 700, "one bin"),
            (36, 64, "ties"),
            (4, 1, "normal"),
            (6000, 2048, "ties"),
            (70000, 5000, "one bin"),
        ),
    ):
        check_select(report, columns, topk, kind)
    for heads, dim, width, relu in (
        (64, 128, 130, True),
        (16, 64, 64, True),
        (3, 64, 100, False),
        (50, 128, 65, True),
    ):
        check_loss(report, heads, dim, width, relu)


def times(report, peer):
    from triton.testing import do_bench

    def median(function, **options):
        return do_bench(function, return_mode="median", **options)

    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    report.add(time="matmul 8192", tflops=2 * 8192**3 / median(lambda: square @ square.mT) / 1e9)
    ids = torch.rand(ROWS, KEYS, device="cuda").topk(WIDTH, 1).indices.int().contiguous()
    length = torch.full((ROWS,), WIDTH, dtype=torch.int32, device="cuda")
    kv = torch.randn(KEYS, 576, device="cuda").bfloat16()
    layout = RowLayout(1, ROWS, KEYS, "ranges")
    common = {"scale": SCALE, "v_channels": 512, "rows": layout}
    for heads in (128, 64, 32, 16, 8):
        q = torch.randn(ROWS, heads, 576, device="cuda").bfloat16()
        work = 2 * ROWS * heads * WIDTH
        ms = median(lambda: attention_forward(q, kv, ids, length, **common, options=StageOptions()))
        report.add(time="forward", heads=heads, ms=ms, tflops=work * 1088 / ms / 1e9)
        if peer is not None and heads in (128, 64):
            ms = median(peer(q, kv, ids))
            report.add(time="peer forward", heads=heads, ms=ms, tflops=work * 1088 / ms / 1e9)
        dout = torch.randn(ROWS, heads, 512, device="cuda").bfloat16()
        out, lse = attention_forward(q, kv, ids, length, **common, options=StageOptions())
        dkv = torch.zeros(KEYS, 576, device="cuda")
        inputs = (q, kv, ids, length, out, lse, dout)

        def backward():
            return attention_backward(*inputs, **common, need_dq=True, dkv=dkv, options=StageOptions())

        ms = median(backward, warmup=10, rep=60)
        parts = kernel_times(backward)
        report.add(time="backward", heads=heads, ms=ms, tflops=work * 2752 / ms / 1e9, kernels=parts)
    scores = torch.randn(ROWS, 32768, device="cuda")
    starts = torch.zeros(ROWS, dtype=torch.int32, device="cuda")
    ends = torch.full_like(starts, 32768)
    ms = median(lambda: select_from_scores(scores, starts, ends, WIDTH))
    report.add(time="select", columns=32768, ms=ms)
    for keys in (8192, 32768):
        q = torch.randn(ROWS, 64, 128, device="cuda").bfloat16()
        k = torch.randn(keys, 128, device="cuda").bfloat16()
        w = torch.randn(ROWS, 64, device="cuda")
        ends = (torch.arange(ROWS, device="cuda") + keys - ROWS + 1).int()
        layout = RowLayout(1, ROWS, keys)

        def topk():
            options = StageOptions(memory_budget=64 << 20)
            return indexer_topk(
                q, k, w, starts, ends, rows=layout, topk=WIDTH, use_relu=True, options=options
            )

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        topk()
        scratch = torch.cuda.max_memory_allocated() - before - ROWS * (WIDTH + 1) * 4
        ms = median(topk)
        report.add(time="topk", keys=keys, ms=ms, scratch_mib=scratch / 2**20, kernels=kernel_times(topk))
    k = torch.randn(KEYS, 128, device="cuda").bfloat16()
    q = torch.randn(ROWS, 64, 128, device="cuda").bfloat16()
    w = torch.randn(ROWS, 64, device="cuda")
    mass = torch.rand(ROWS, WIDTH, device="cuda")
    dk = torch.zeros(KEYS, 128, device="cuda")

    def loss():
        return indexer_loss(
            *(q, k, w),
            indices=ids,
            length=length,
            starts=starts,
            ends=ends,
            mass=mass,
            rows=RowLayout(1, ROWS, KEYS, "ranges"),
            use_relu=True,
            need_dq=True,
            need_dw=True,
            dk=dk,
            options=StageOptions(),
        )

    report.add(time="loss", index_heads=64, ms=median(loss, warmup=10, rep=50))


def kernel_times(function):
    """Milliseconds per kernel of one call."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        function()
        torch.cuda.synchronize()
    return {
        event.key[:40]: round(event.device_time_total / 1e3, 3)
        for event in seen.key_averages()
        if event.device_time_total > 20
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--only", default="checks,times")
    parser.add_argument(
        "--peer", default="", help="module:function that makes a public forward to time beside ours"
    )
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for job, _, failed in pool.imap_unordered(compile_one, list(kernels_used())):
            if failed:
                print(job, failed, flush=True)
    report = Report(options.out)
    peer = None
    if options.peer:
        import importlib

        module, _, name = options.peer.partition(":")
        peer = getattr(importlib.import_module(module), name)
    if "checks" in options.only:
        checks(report)
    if "times" in options.only:
        times(report, peer)


if __name__ == "__main__":
    main()
