"""The kernels as TileLang lowers them for a GPU, run on the CPU: see ``cuda_on_cpu.h``.

``kernel(device, where, *static)`` stands in for ``compiler.kernel``: the same source, compiled with g++ instead of nvcc
and called with the same arguments. Every tensor is copied to where its last byte is followed by a page that nobody may
touch, so that a read or write past its end stops the process.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import importlib.util
import mmap
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dsa_backends.tilelang_kernels import compiler

HERE = Path(__file__).parent
HEADER = HERE / "cuda_on_cpu.h"
PAGE = mmap.PAGESIZE
FLAGS = (
    "-std=c++17",
    "-O2",
    "-march=native",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-w",
    "-shared",
    "-fPIC",
)
C_TYPES = {"int": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


class EmulatedFault(RuntimeError):
    """A block that nobody can go on in, a copy that is not aligned, and the like."""


@dataclass
class How:
    """How the next launches run: asynchronous work late or early, and the order of the threads."""

    late: bool = True
    seed: int = 1
    arch: str = "sm_90a"
    changed: Callable[[str, str], str] | None = None
    """Takes a kernel's name and source, and returns the source to run."""
    launches: list[str] = field(default_factory=list)


HOW = How()


GRIDS = {
    "row_shift": lambda v: -(-v["places"] // 4),
    "balance": lambda v: v["rows"],
    "hopper_few_backward": lambda v: v["rows"],
    "hopper_key_gradient": lambda v: v["rows"] * 4,
    "index_scores": lambda v: v["tiles"] * v["row_tiles"],
    "index_loss": lambda v: v["rows"],
    "select_best": lambda v: v["rows"],
}
"""Blocks of a launch, as the kernels declare them; the others have ``rows * blocks``."""


def lowered(where, static, arch):
    """CUDA source of a kernel."""
    import tilelang
    from tilelang import tvm

    program = compiler.build(where, *static)
    configs = {getattr(key, "value", key): value for key, value in compiler.pass_configs(tilelang).items()}
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    with tvm.transform.PassContext(opt_level=3, config=configs), target:
        return tilelang.lower(program, target=target).kernel_source


def parameters(where):
    """Names of a kernel's arguments in the caller's order; the generated function has an order of its own."""
    module, _, function = where.partition(":")
    tree = ast.parse(
        Path(importlib.util.find_spec(f"dsa_backends.tilelang_kernels.{module}").origin).read_text()
    )
    made = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    inner = [
        node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == f"dsa_{function}"
    ]
    return [argument.arg for argument in inner[0].args.args]


SIGNATURE = re.compile(r'extern "C" __global__ void (\w+_kernel)\(([^)]*)\);')
THREADS = re.compile(r"__launch_bounds__\((\d+)")


def translated(source):
    """The source with a function that fetches the arguments and runs the grid."""
    name, parameters = SIGNATURE.search(source).groups()
    types, names = [], []
    for parameter in parameters.split(","):
        kind, _, word = parameter.replace("__restrict__", "").strip().rpartition(" ")
        types.append(kind.strip())
        names.append(word)
    text = "\n".join(line for line in source.splitlines() if not line.startswith("#include"))
    text = re.sub(r"^\s*extern __shared__ .*$", "", text, flags=re.M)
    fetched = ", ".join(f"*({kind} *)arguments[{place}]" for place, kind in enumerate(types))
    text = f"""#include "{HEADER}"
{text}
static void **arguments;
static void call() {{ {name}({fetched}); }}
extern "C" const char *run(void **given, int grid, int threads, int late, int seed) {{
  arguments = given;
  return emulator::run_grid(call, grid, threads, late, seed);
}}
"""
    return text, types, names


def shared_object(text):
    key = hashlib.sha256((text + HEADER.read_text() + " ".join(FLAGS)).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("DSA_EMULATOR_CACHE") or Path(tempfile.gettempdir()) / "dsa-emulator")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{key}.so"
    if not library.exists():
        source, made = folder / f"{key}.{os.getpid()}.cpp", folder / f"{key}.{os.getpid()}.so"
        source.write_text(text)
        subprocess.run(["g++", *FLAGS, "-o", made, source], check=True)
        made.rename(library)
    return library


class Fenced:
    """A copy of a tensor whose end meets a page without access, as an address for the kernel."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.size = tensor.numel() * tensor.element_size()
        pages = -(-max(self.size, 1) // PAGE)
        self.map = mmap.mmap(-1, (pages + 2) * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        # Vectors of 16 bytes must stay aligned: up to 15 bytes past the end can be touched unseen.
        self.address = start + PAGE + pages * PAGE - -(-self.size // 16) * 16
        libc = ctypes.CDLL(None, use_errno=True)
        for place in (start, start + (pages + 1) * PAGE):
            if libc.mprotect(ctypes.c_void_p(place), PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        ctypes.memmove(self.address, tensor.data_ptr(), self.size)

    def back(self):
        if bytes_changed(self.tensor.data_ptr(), self.address, self.size):
            ctypes.memmove(self.tensor.data_ptr(), self.address, self.size)


def bytes_changed(one, other, size):
    return ctypes.string_at(one, size) != ctypes.string_at(other, size)


class Emulated:
    """One kernel; called as the compiled one is."""

    def __init__(self, where, static, arch, changed=None):
        source = source_of(where, static, arch)
        if changed is not None:
            source = changed(where.partition(":")[2], source)
        self.names = parameters(where)
        self.threads = int(THREADS.search(source)[1])
        self.grid = GRIDS.get(where.partition(":")[2], lambda v: v["rows"] * v["blocks"])
        text, self.types, self.wanted = translated(source)
        self.where = where
        self.library = ctypes.CDLL(str(shared_object(text)))
        self.library.run.restype = ctypes.c_char_p

    def __call__(self, *values):
        assert len(values) == len(self.names), (self.where, len(values), len(self.names))
        given = dict(zip(self.names, values, strict=True))
        fenced, cells = {}, []
        for kind, name in zip(self.types, self.wanted, strict=True):
            value = given[name]
            if kind.endswith("*"):
                # One tensor under two names stays one, as on the GPU.
                key = (value.data_ptr(), value.numel())
                if key not in fenced:
                    fenced[key] = Fenced(value)
                cells.append(ctypes.c_void_p(fenced[key].address))
            else:
                cells.append(C_TYPES[kind](value))
        arguments = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        HOW.launches.append(self.where)
        fault = self.library.run(arguments, self.grid(given), self.threads, int(HOW.late), HOW.seed)
        for tensor in fenced.values():
            tensor.back()
        if fault:
            raise EmulatedFault(f"{self.where}: {fault.decode()}")


@cache
def source_of(where, static, arch):
    return lowered(where, static, arch)


@cache
def emulated(where, static, arch, changed=None):
    return Emulated(where, static, arch, changed)


def kernel(device, where, *static):
    """What ``compiler.kernel`` returns, on the CPU."""
    return emulated(where, static, HOW.arch, HOW.changed)


def available():
    """Why the kernels cannot be run here; "" where they can."""
    import platform
    import shutil

    if importlib.util.find_spec("tilelang") is None:
        return "needs tilelang (the extra of that name)"
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        return "needs g++ on x86-64"
    return ""
