"""Compile kernels before they are needed, in parallel, into the folder where a later process finds them.

``python -m dsa_backends.tilelang_kernels.precompile [--gpu 9.0] [--jobs N] [--only TEXT]``. Without ``--gpu`` for the
GPU of this machine; with it no GPU is needed, only CUDA's compiler, and the folder may be carried to the machine that
has one. ``--only`` keeps the kernels whose name holds the text, ``indexer`` for instance.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence

from dsa_backends.tilelang_kernels import compiler
from dsa_backends.tilelang_kernels.catalogue import Kernel, kernels
from dsa_dispatch.errors import BackendDeclined

Job = tuple[str, Kernel]
Outcome = tuple[str, float, str]
"""Name of the kernel, seconds, and why it failed; "" where it did not."""


def compile_one(job: Job) -> Outcome:
    arch, (where, static) = job
    start = time.perf_counter()
    failed = ""
    try:
        compiler.compile_kernel(arch, where, static)
    except BackendDeclined as declined:
        failed = str(declined.decline)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"[-800:]
    return compiler.name_of(where, static), time.perf_counter() - start, failed


def compile_all(arch: str, wanted: Sequence[Kernel], jobs: int) -> list[Outcome]:
    """Compile in ``jobs`` processes, and say how each ended as it does."""
    outcomes = []
    with multiprocessing.get_context("spawn").Pool(max(1, min(jobs, len(wanted)))) as pool:
        for outcome in pool.imap_unordered(compile_one, [(arch, kernel) for kernel in wanted]):
            outcomes.append(outcome)
            name, seconds, failed = outcome
            sys.stdout.write(f"{name}: {failed or f'{seconds:.1f} s'}\n")
            sys.stdout.flush()
    return outcomes


def capability_of(text: str) -> tuple[int, int]:
    if not text:
        import torch

        return torch.cuda.get_device_capability()
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="", metavar="MAJOR.MINOR")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="")
    chosen = parser.parse_args(arguments)
    capability = capability_of(chosen.gpu)
    wanted = [kernel for kernel in kernels(capability) if chosen.only in compiler.name_of(*kernel)]
    if not wanted:
        parser.error(f"no kernel's name holds {chosen.only!r}")
    arch, start = compiler.target_of(capability), time.perf_counter()
    outcomes = compile_all(arch, wanted, chosen.jobs)
    failed = sum(bool(reason) for _, _, reason in outcomes)
    sys.stdout.write(
        f"{len(outcomes) - failed} kernels for {arch} in {time.perf_counter() - start:.0f} s, {failed} failed; "
        f"kept in {compiler.cache_folder()}\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
