"""Finding, loading and probing a sparse forward of the FlashMLA family."""

from __future__ import annotations

import ctypes
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from dsa_backends.flash_mla import messages
from dsa_backends.flash_mla.probe import Answer, ProbeError, ask
from dsa_backends.flash_mla.slots import is_hopper
from dsa_dispatch.errors import BackendDeclined

Run = Callable[[Tensor, Tensor, Tensor, float, int, Tensor], tuple[Tensor, Tensor]]
"""``(q [T, H, D], kv [S, 1, D], indices [T, 1, W], scale, v_channels, length [T]) -> out, lse`` as the provider says
it."""
CUDA_LIBRARIES: Final = ("libcudart.so.13", "libnvrtc.so.13")


@dataclass(frozen=True, slots=True)
class Provider:
    """A sparse forward that loaded."""

    name: str
    run: Run


@dataclass(frozen=True, slots=True)
class Usable:
    """A provider that answered rightly on one device."""

    provider: Provider
    answer: Answer

    @property
    def title(self) -> str:
        base = "e" if self.answer.lse_factor == 1.0 else "2"
        return f"{self.provider.name}, lse base {base}"


def usable(device: torch.device) -> Usable:
    """The first provider that loads and answers rightly on ``device``. Raises ``BackendDeclined`` with every reason."""
    return _usable(str(device))


@lru_cache(maxsize=64)
def _usable(device: str) -> Usable:
    reasons = []
    for load in (load_flash_mla, load_sgl_kernel):
        try:
            provider = load()
        except BackendDeclined as declined:
            reasons.append(declined.decline)
            continue
        try:
            answer = ask(provider.run, torch.device(device))
            return Usable(provider, _as_far_as_it_shows(answer, torch.device(device)))
        except ProbeError as wrong:
            reasons.append(messages.failed_probe(provider.name, wrong.found, wrong.wanted))
        # Availability only: a foreign kernel that refuses the GPU or the arguments is a reason, not a crash.
        except Exception as error:
            found = f"{type(error).__name__}: {messages.first_line(error)}"
            reasons.append(messages.failed_probe(provider.name, found, "one that runs on this GPU"))
    raise messages.declined(reasons)


def _as_far_as_it_shows(answer: Answer, device: torch.device) -> Answer:
    """Compute capability 9.0 has one kernel, so that what one call shows holds of all; 10.x has one per head count."""
    one_kernel = device.type != "cuda" or is_hopper(device)
    return replace(answer, ends_at_length=answer.ends_at_length and one_kernel)


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def load_flash_mla() -> Provider:
    """The package ``flash_mla``, with either of its two signatures. Raises ``BackendDeclined``."""
    if find_spec("flash_mla") is None:
        raise BackendDeclined(messages.not_installed("flash_mla", torch.__version__))
    try:
        function = importlib.import_module("flash_mla").flash_mla_sparse_fwd
    except Exception as error:
        raise BackendDeclined(messages.failed_import("flash_mla", error)) from error
    release = _version("flash_mla", "flash-mla")
    return Provider(f"flash_mla {release}".strip(), _adapted(function))


def _adapted(function: Callable[..., Any]) -> Run:
    """Call by the names the function has.

    One branch demands ``indexer_topk`` and the other raises ``TypeError`` on it; the oldest has no ``topk_length``.
    """
    parameters = inspect.signature(function).parameters
    if not {"q", "kv", "indices", "sm_scale"} <= set(parameters):
        raise BackendDeclined(messages.unknown_signature("flash_mla", str(inspect.signature(function))))
    extra: dict[str, Any] = {}
    if "indexer_topk" in parameters and parameters["indexer_topk"].default is inspect.Parameter.empty:
        extra["indexer_topk"] = 0
    has_width, has_length = "d_v" in parameters, "topk_length" in parameters

    def run(
        q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_channels: int, length: Tensor
    ) -> tuple[Tensor, Tensor]:
        arguments = dict(extra)
        if has_width:
            arguments["d_v"] = v_channels
        if has_length:
            arguments["topk_length"] = length
        results = function(q=q, kv=kv, indices=indices, sm_scale=scale, **arguments)
        return results[0], results[2]

    return run


def load_sgl_kernel() -> Provider:
    """The operators of sglang-kernel, loaded from their library file. Raises ``BackendDeclined``.

    Importing ``sgl_kernel`` would load its other libraries too, initialise CUDA, and hide the reason of a failure.
    """
    found = find_spec("sgl_kernel")
    if found is None:
        raise BackendDeclined(messages.not_installed("sglang-kernel", torch.__version__))
    release = _version("sglang-kernel", "sgl-kernel")
    if messages.RELEASES.get(release, messages.minor(torch.__version__)) != messages.minor(torch.__version__):
        raise BackendDeclined(messages.wrong_torch(release, torch.__version__))
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    libraries = [path for folder in folders for path in sorted(folder.glob("flashmla_ops*.so"))]
    if not libraries:
        raise BackendDeclined(messages.no_library(", ".join(map(str, folders)) or "sgl_kernel"))
    _load_library(libraries[0], release)
    operator = torch.ops.sgl_kernel.sparse_prefill_fwd

    def run(
        q: Tensor, kv: Tensor, indices: Tensor, scale: float, v_channels: int, length: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, _, lse = operator(q, kv, indices, scale, v_channels, None, length)
        return out, lse

    return Provider(f"sgl_kernel {release}".strip(), run)


def _load_library(path: Path, release: str) -> None:
    try:
        _read_library(path)
        return
    except Exception as error:
        text = _texts(error)
        lost = next((name for name in CUDA_LIBRARIES if name in text), None)
        if lost is None:
            raise _load_failure(error, release) from error
    # The library names the CUDA runtime without a path: torch's wheels keep it in a folder of their own.
    for name in CUDA_LIBRARIES:
        if not _preload(name):
            raise BackendDeclined(messages.missing_library(name, release))
    try:
        _read_library(path)
    except Exception as error:
        raise _load_failure(error, release) from error


def _read_library(path: Path) -> None:
    load: Any = torch.ops.load_library
    load(str(path))


def _load_failure(error: BaseException, release: str) -> BackendDeclined:
    text = _texts(error)
    if "undefined symbol" in text:
        symbol = text[text.index("undefined symbol") :].splitlines()[0]
        return BackendDeclined(messages.undefined_symbol(release, torch.__version__, symbol))
    return BackendDeclined(messages.failed_import(f"sglang-kernel {release}", error.__cause__ or error))


def _texts(error: BaseException) -> str:
    """What an exception and its causes say: ``load_library`` keeps the loader's words in the cause."""
    texts, seen = [], error
    while seen is not None:
        texts.append(str(seen))
        following = seen.__cause__ or seen.__context__
        if following is None:
            break
        seen = following
    return "\n".join(texts)


def _preload(name: str) -> bool:
    for candidate in (name, *map(str, _packaged(name))):
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False


def _packaged(name: str) -> Iterator[Path]:
    """Where wheels put a CUDA library: ``nvidia/cu13/lib`` or ``nvidia/<component>/lib``."""
    found = find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        yield from sorted(Path(folder).glob(f"*/lib/{name}"))
