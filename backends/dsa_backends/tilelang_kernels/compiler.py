"""TileLang itself: imported at first use, with a decline of its own for every way in which that can fail.

Compiled kernels are kept by TileLang on disk and found there by later processes; here they are kept for this process.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
from packaging.version import Version

from dsa_backends.tilelang_kernels.spec import TILELANG
from dsa_dispatch._decline import Decline, DeclineCode
from dsa_dispatch.errors import BackendDeclined

LOGGER: Final = logging.getLogger("dsa_dispatch")
CACHE_VARIABLE: Final = "TILELANG_CACHE_DIR"

SWITCHES: Final = {
    "TL_ENABLE_FAST_MATH": True,
    "TL_DISABLE_WARP_SPECIALIZED": True,
    "TL_DISABLE_THREAD_STORAGE_SYNC": True,
    "TL_DISABLE_SAFE_MEMORY_ACCESS": True,
    "TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE": False,
    "TL_DISABLE_BUFFER_INIT_CHECK": True,
    "TL_DISABLE_DATA_RACE_CHECK": True,
    "TL_DISABLE_OUT_OF_BOUND_WARNING": True,
}
"""Switches of the compiler by name; releases that lack one do not need it.

The kernels place their own barriers (a barrier inserted in one warp group only would wait for ever) and mask their own
accesses. The shared-memory merge miscompiled sparse attention in 0.1.9 and 0.1.10. Fast math turns division and
exponential into their approximate instructions, 2 units in the last place.
"""

_LOCK: Final = threading.Lock()
_KERNELS: dict[tuple[Any, ...], Any] = {}


def cache_folder() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".tilelang" / "cache")


def _writable(folder: Path) -> bool:
    for place in (folder, *folder.parents):
        if place.exists():
            return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return False


def _reject_abort() -> None:
    """TileLang 0.1.11 and 0.1.12 end the whole process when imported beside a newer foreign-function library."""
    try:
        library, foreign = version(TILELANG.distribution), version("apache-tvm-ffi")
    except PackageNotFoundError:
        return
    if Version(library) < Version("0.1.13") and Version(foreign) >= Version("0.1.12"):
        raise BackendDeclined(
            Decline(
                DeclineCode.VERSION,
                "apache-tvm-ffi",
                f"{foreign} beside tilelang {library}, whose import would end the process",
                "apache-tvm-ffi below 0.1.12 for tilelang below 0.1.13",
                "pip install 'apache-tvm-ffi<0.1.12', or tilelang 0.1.13 to 0.1.15.",
            )
        )


@lru_cache(maxsize=1)
def tilelang() -> Any:
    """The module. Raises ``BackendDeclined`` where it cannot be imported or has nowhere to keep kernels."""
    folder = cache_folder()
    if not _writable(folder):
        raise BackendDeclined(
            Decline(
                DeclineCode.IMPORT_FAILED,
                "tilelang",
                f"a cache folder that cannot be written: {folder}",
                "a writable folder for compiled kernels",
                f"Set {CACHE_VARIABLE} to a writable folder that every rank of this machine can share.",
            )
        )
    _reject_abort()
    try:
        module = importlib.import_module("tilelang")
        importlib.import_module("tilelang.language")
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise BackendDeclined(
            Decline(
                DeclineCode.IMPORT_FAILED,
                "tilelang",
                f"{type(error).__name__}: {first}",
                "an import that passes",
                f"pip install '{TILELANG.distribution}{TILELANG.versions}'.",
            )
        ) from error
    return module


def pass_configs(module: Any) -> dict[Any, bool]:
    keys = module.PassConfigKey
    return {getattr(keys, name): value for name, value in SWITCHES.items() if hasattr(keys, name)}


def target_of(capability: tuple[int, int]) -> str:
    """The compiler's name of a compute capability; "a" opens the instructions that exist on that one only."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def build(where: str, *static: Any) -> Any:
    """The program of ``"module:function"`` for the given constants, not yet compiled."""
    tilelang()
    module, _, function = where.partition(":")
    return getattr(importlib.import_module(f"dsa_backends.tilelang_kernels.{module}"), function)(*static)


def kernel(device: torch.device, where: str, *static: Any) -> Any:
    """The compiled kernel ``where`` ("module:function") for ``device``, from this process, the disk, or compiled now.

    ``static`` are the constants it is made for. Raises ``BackendDeclined`` where TileLang cannot be used.
    """
    capability = torch.cuda.get_device_capability(device)
    key = (capability, where, static)
    found = _KERNELS.get(key)
    if found is not None:
        return found
    with _LOCK:
        if key not in _KERNELS:
            _KERNELS[key] = compile_kernel(target_of(capability), where, static)
        return _KERNELS[key]


def name_of(where: str, static: tuple[Any, ...]) -> str:
    return f"{where.partition(':')[2]}({', '.join(map(str, static))})"


def compile_kernel(arch: str, where: str, static: tuple[Any, ...]) -> Any:
    """From the disk or compiled now; needs no GPU. Says what it is about, and how long it took."""
    module = tilelang()
    name = name_of(where, static)
    LOGGER.info("tilelang: compiling %s for %s, or finding it in %s", name, arch, cache_folder())
    start = time.perf_counter()
    compiled = module.compile(
        build(where, *static), target={"kind": "cuda", "arch": arch}, pass_configs=pass_configs(module)
    )
    seconds = time.perf_counter() - start
    LOGGER.log(
        logging.WARNING if seconds > 5 else logging.INFO,
        "tilelang: %s for %s took %.1f s; kept in %s, where later processes find it",
        name,
        arch,
        seconds,
        cache_folder(),
    )
    return compiled


def provider() -> str:
    return f"tilelang {tilelang().__version__}"


def forget() -> None:
    """Look at the environment anew."""
    tilelang.cache_clear()
    _KERNELS.clear()
