"""Lowers every kernel for an architecture and prints one line of JSON for each; ``test_lowering`` runs it in a process
of its own, since TileLang's imports and warnings are none of pytest's business.

    python lower_kernels.py MAJOR.MINOR [TEXT]       with TEXT only the kernels whose name holds it
"""

from __future__ import annotations

import json
import re
import sys

import tilelang
from tilelang import tvm

from dsa_backends.tilelang_kernels import compiler
from dsa_backends.tilelang_kernels.catalogue import kernels


def lowered(arch, where, static):
    program = compiler.build(where, *static)
    configs = {getattr(key, "value", key): value for key, value in compiler.pass_configs(tilelang).items()}
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    with tvm.transform.PassContext(opt_level=3, config=configs), target:
        return tilelang.lower(program, target=target)


def shared_bytes(artifact):
    """The last argument of the launch, where the kernel asks for shared memory at all."""
    if "use_dyn_shared_memory" not in str(artifact.device_mod):
        return 0
    return int(re.search(r'call_packed\("dsa[^)]*, (\d+)\)', str(artifact.host_mod))[1])


def main():
    gpu = tuple(map(int, sys.argv[1].split(".")))
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    for where, static in kernels(gpu):
        if only in compiler.name_of(where, static):
            artifact = lowered(compiler.target_of(gpu), where, static)
            text = artifact.kernel_source
            facts = {
                "kernel": compiler.name_of(where, static),
                "shared": shared_bytes(artifact),
                "wgmma": "wgmma_" in text,
                "copies16": "cp_async_gs_conditional<16>" in text,
                "scalar_gather": bool(re.search(r"= kv\[", text)),
            }
            sys.stdout.write(json.dumps(facts) + "\n")
            sys.stdout.flush()


main()
