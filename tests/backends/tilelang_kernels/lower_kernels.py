"""Lowers every kernel to CUDA source and prints one line for each; run by ``test_lowering`` in a process of its own."""

from __future__ import annotations

import re
import sys

import tilelang
from tilelang import tvm

from dsa_backends.tilelang_kernels import compiler

HOPPER = (
    ("hopper_forward_kernel:hopper_forward", (64, "bfloat16")),
    ("hopper_few_forward_kernel:hopper_few_forward", (0, "float16")),
    ("pairs_kernels:row_shift", ("bfloat16",)),
    ("pairs_kernels:hopper_pairs", (64, "bfloat16")),
    ("balance_kernel:balance", (True, "bfloat16")),
    ("hopper_few_backward_kernel:hopper_few_backward", (64, "bfloat16")),
    ("query_gradient_kernel:hopper_query_gradient", (64, "bfloat16")),
    ("key_gradient_kernel:hopper_key_gradient", (64, 64, "bfloat16", False)),
    ("loss_kernel:index_loss", (16, 64, True)),
    ("score_kernel:index_scores", (64, 128, "bfloat16", True, True)),
    ("select_kernel:select_best", ()),
)
PORTABLE = (
    ("portable_forward_kernel:portable_forward", (16, 64, "bfloat16")),
    ("score_kernel:index_scores", (16, 64, "float16", True, False)),
    ("select_kernel:select_best", ()),
)


def source(arch, where, static):
    program = compiler.build(where, *static)
    configs = {getattr(key, "value", key): value for key, value in compiler.pass_configs(tilelang).items()}
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    with tvm.transform.PassContext(opt_level=3, config=configs), target:
        return tilelang.lower(program, target=target).kernel_source


for where, static in HOPPER if sys.argv[1] == "sm_90a" else PORTABLE:
    text = source(sys.argv[1], where, static)
    facts = {
        "wgmma": "wgmma_" in text,
        "copies16": "cp_async_gs_conditional<16>" in text,
        "scalar_gather": bool(re.search(r"= kv\[", text)),
    }
    line = " ".join([where.partition(":")[2], *(f"{name}={value}" for name, value in facts.items())])
    sys.stdout.write(line + "\n")
