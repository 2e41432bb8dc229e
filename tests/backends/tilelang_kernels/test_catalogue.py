"""Which kernels there are: all that is asked for can be compiled ahead, and no length or scale asks for another."""

from __future__ import annotations

import fake_kernels
import pytest
import torch

from dsa_backends.tilelang_kernels import compiler, precompile
from dsa_backends.tilelang_kernels.attention_backward import attention_backward
from dsa_backends.tilelang_kernels.attention_forward import attention_forward
from dsa_backends.tilelang_kernels.catalogue import kernels
from dsa_backends.tilelang_kernels.indexer_loss import indexer_loss
from dsa_backends.tilelang_kernels.indexer_topk import indexer_topk
from dsa_dispatch._call import RowLayout, StageOptions


def asked_for(gpu, *calls):
    """The kernels that the calls ask for, each a function without arguments."""
    found = set()

    def recorded(device, where, *static):
        found.add((where, static))
        return fake_kernels.kernel(device, where, *static)

    with fake_kernels.installed(gpu, kernel=recorded):
        for call in calls:
            call()
    return found


def attention(heads, *, channels=576, dtype=torch.bfloat16, rows=2, keys=9, width=5, scale=0.1, back=True):
    q = torch.ones(rows, heads, channels, dtype=dtype)
    kv = torch.ones(keys, channels, dtype=dtype)
    ids = torch.zeros(rows, width, dtype=torch.int32)
    length = torch.full((rows,), width, dtype=torch.int32)
    common = {
        "scale": scale,
        "v_channels": 512,
        "rows": RowLayout(1, rows, keys, "ranges"),
        "options": StageOptions(),
    }
    out, lse = attention_forward(q, kv, ids, length, **common)
    if back:
        dkv = torch.zeros(keys, channels)
        attention_backward(q, kv, ids, length, out, lse, out, need_dq=True, dkv=dkv, **common)


def select(heads, *, channels=128, dtype=torch.bfloat16, relu=True, rows=2, keys=9, topk=3):
    q, k = torch.ones(rows, heads, channels, dtype=dtype), torch.ones(keys, channels, dtype=dtype)
    starts = torch.zeros(rows, dtype=torch.int32)
    layout = RowLayout(1, rows, keys, "ranges")
    indexer_topk(
        *(q, k, torch.ones(rows, heads), starts, starts + keys),
        rows=layout,
        topk=topk,
        use_relu=relu,
        options=StageOptions(),
    )


def lose(heads, *, channels=128, relu=True, rows=2, keys=9, width=5):
    q, k = torch.ones(rows, heads, channels).bfloat16(), torch.ones(keys, channels).bfloat16()
    zero = torch.zeros(rows, dtype=torch.int32)
    indexer_loss(
        *(q, k, torch.ones(rows, heads)),
        indices=torch.zeros(rows, width, dtype=torch.int32),
        length=zero + width,
        starts=zero,
        ends=zero + keys,
        mass=torch.ones(rows, width),
        rows=RowLayout(1, rows, keys, "ranges"),
        use_relu=relu,
        need_dq=True,
        need_dw=True,
        dk=torch.zeros(keys, channels),
        options=StageOptions(),
    )


@pytest.mark.parametrize("gpu", [(9, 0), (8, 0), (8, 9), (10, 0), (12, 0)])
def test_all_that_the_adapters_ask_for_is_in_the_catalogue_and_nothing_else(gpu):
    hopper = gpu == (9, 0)
    calls = [
        lambda h=heads, c=channels, t=dtype: attention(
            h, channels=c, dtype=t, back=hopper and t == torch.bfloat16
        )
        for heads in (1, 16, 17, 64, 65, 200)
        for channels in (512, 576)
        for dtype in (torch.bfloat16, torch.float16)
    ]
    for heads in (1, 17, 64):
        for channels in (64, 128):
            for relu in (True, False):
                for dtype in (torch.bfloat16, torch.float16):
                    calls.append(
                        lambda h=heads, c=channels, t=dtype, r=relu: select(h, channels=c, dtype=t, relu=r)
                    )
                if hopper:
                    calls.append(lambda h=heads, c=channels, r=relu: lose(h, channels=c, relu=r))
    assert asked_for(gpu, *calls) == set(kernels(gpu))


def test_no_length_and_no_scale_asks_for_another_kernel():
    base = asked_for((9, 0), lambda: attention(20), lambda: select(5), lambda: lose(5))
    others = [
        *(lambda s=scale: attention(20, scale=s) for scale in (0.02, 3.0)),
        *(lambda r=rows, k=keys: attention(20, rows=r, keys=k) for rows, keys in ((1, 1), (7, 300))),
        *(lambda w=width: attention(20, width=w) for width in (1, 64, 67, 129)),
        *(lambda k=keys, t=topk: select(5, keys=k, topk=t) for keys, topk in ((1, 1), (70, 64), (300, 67))),
        *(lambda r=rows: select(5, rows=r) for rows in (1, 33, 70)),
        *(lambda w=width, k=keys: lose(5, width=w, keys=k) for width, keys in ((1, 1), (67, 300))),
        # Head counts that run in the same blocks.
        *(lambda h=heads: attention(h) for heads in (17, 33, 63)),
        *(lambda h=heads: select(h) for heads in (1, 16)),
    ]
    assert asked_for((9, 0), *others) == base


@pytest.fixture
def in_this_process(monkeypatch):
    """Compiles nothing, fails on one kernel, and keeps what was asked for."""
    seen = []

    def compile_kernel(arch, where, static):
        seen.append((arch, where, static))
        if where.endswith("select_best"):
            raise RuntimeError("nvcc: not found")

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    monkeypatch.setattr(
        precompile,
        "compile_all",
        lambda arch, wanted, jobs: [precompile.compile_one((arch, k)) for k in wanted],
    )
    return seen


def test_compiling_ahead_takes_the_whole_catalogue_without_a_gpu(in_this_process, capsys):
    assert precompile.main(["--gpu", "9.0"]) == 1
    assert in_this_process == [("sm_90a", *kernel) for kernel in kernels((9, 0))]
    assert f"{len(kernels((9, 0))) - 1} kernels for sm_90a in 0 s, 1 failed" in capsys.readouterr().out


def test_compiling_ahead_can_be_restricted_by_name(in_this_process):
    assert precompile.main(["--gpu", "8.0", "--only", "forward"]) == 0
    assert {where for _, where, _ in in_this_process} == {"portable_forward_kernel:portable_forward"}
    assert {arch for arch, _, _ in in_this_process} == {"sm_80"}
