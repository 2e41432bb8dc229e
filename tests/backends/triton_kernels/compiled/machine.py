"""Compiles a kernel for a GPU that need not be there, and reads what came out."""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = (("small", 86), ("small", 120), ("sm80", 80), ("sm90", 90), ("sm100", 100))
"""Tables of tiles, and the compute capabilities they are compiled for here."""
WIDE_INTEGERS = {"q_row8", "q_head8", "k_row8", "kv_row8", "w_row", "idx_row", "mass_row", "score_row", "target_row4",
                 "partial_row4", "dout_row8", "dout_head8", "out_row8", "out_head8", "pairs_row8"}  # fmt: skip
SIXTEEN_BITS = {"q", "k", "kv", "dout", "pairs", "out"}
INTEGERS = {"idx", "length", "starts", "ends", "carry_ids", "carry_order", "out_ids", "out_order"}
FLOATS = {"lse", "shift", "mass", "scores", "facts", "kl", "dw", "target", "w", "partial", "part", "part_lse"}


class Machine:
    """Registers, stack, shared memory, and how often each opcode stands in the machine code."""

    def __init__(self, kernel):
        self.shared = kernel.metadata.shared
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            code = self._run("nvdisasm", "-c", file.name)
            usage = self._run("cuobjdump", "-res-usage", file.name)
        self.stack = int(re.search(r"STACK:(\d+)", usage).group(1))
        self.registers = int(re.search(r"REG:(\d+)", usage).group(1))
        found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.x]+)", code)
        self.opcodes = collections.Counter(found)

    @staticmethod
    def _run(tool, *arguments):
        return subprocess.run(
            [str(TOOLS / tool), *arguments], capture_output=True, text=True, check=True
        ).stdout

    def count(self, prefix):
        return sum(n for name, n in self.opcodes.items() if name.startswith(prefix))

    @property
    def wide_copies(self):
        return sum(
            n for name, n in self.opcodes.items() if name.startswith("LDGSTS") and name.endswith(".128")
        )

    @property
    def narrow_copies(self):
        return self.count("LDGSTS") - self.wide_copies


def types_of(names, constants, dtype, overrides):
    types = {}
    for name in names:
        if name in constants:
            types[name] = "constexpr"
        elif name in overrides:
            types[name] = overrides[name]
        elif name in WIDE_INTEGERS:
            types[name] = "i64"
        elif name in SIXTEEN_BITS or (name == "dq" and dtype != "fp32"):
            types[name] = "*" + dtype
        elif name in INTEGERS:
            types[name] = "*i32"
        elif name in FLOATS or name == "dq":
            types[name] = "*fp32"
        elif name in ("slots", "begin"):
            types[name] = "*i64"
        elif name in ("scale", "scale_log2"):
            types[name] = "fp32"
        else:
            types[name] = "i32"
    return types


def compiled(kernel, constants, *, capability, warps, stages=1, registers=None, dtype="bf16", **overrides):
    """The kernel as a launch would compile it: pointers aligned to 16 bytes, nothing known of any integer."""
    names = kernel.arg_names
    types = types_of(names, constants, dtype, overrides)
    unaligned = set(kernel.do_not_specialize_on_alignment or ())
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if types[name].startswith("*") and name not in unaligned
    }
    source_type = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source_type
    source = source_type(
        fn=kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    # Said aloud because its default is about to change.
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True, "maxnreg": registers}
    return Machine(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options))
