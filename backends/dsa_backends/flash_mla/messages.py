"""Declines of an installation: what was found, what is needed, and the command that mends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dsa_dispatch._decline import Decline, DeclineCode
from dsa_dispatch.errors import BackendDeclined

RELEASES: Final = {
    "0.4.3": "2.11",
    "0.4.5": "2.11",
    "0.4.6.post1": "2.13",
    "0.4.8": "2.13",
    "0.4.10": "2.14",
}
"""Which torch minor a release of sglang-kernel is linked against: its C++ symbols fit that one alone, and releases
before 0.4.8 do not declare it, so pip installs a wrong pair without a word."""
BEST: Final = {"2.11": "0.4.5", "2.13": "0.4.8", "2.14": "0.4.10"}
BUILD: Final = (
    "or build FlashMLA from source at a commit that still has compute capability 9.0 and 576 channels (branch nv_dev; "
    "the package `flash-mla` of the index predates the sparse kernels)"
)


def minor(torch_version: str) -> str:
    """``"2.11"`` of ``"2.11.0+cu130"``."""
    return ".".join(torch_version.partition("+")[0].split(".")[:2])


def install_hint(torch_version: str) -> str:
    release = BEST.get(minor(torch_version))
    if release is None:
        return f"No release of sglang-kernel is known to fit torch {minor(torch_version)}; {BUILD[3:]}."
    return f"pip install --no-deps sglang-kernel=={release}, {BUILD}."


def not_installed(package: str, torch_version: str) -> Decline:
    return Decline(
        DeclineCode.NOT_INSTALLED,
        f"package {package}",
        "not installed",
        "flash_mla or sglang-kernel",
        install_hint(torch_version),
    )


def wrong_torch(release: str, torch_version: str) -> Decline:
    return Decline(
        DeclineCode.VERSION,
        f"sglang-kernel {release}",
        f"torch {torch_version}",
        f"torch {RELEASES[release]}, which it is linked against",
        install_hint(torch_version),
    )


def no_library(folder: str) -> Decline:
    return Decline(
        DeclineCode.IMPORT_FAILED,
        "sglang-kernel",
        f"no flashmla_ops library in {folder}",
        "a CUDA build of sglang-kernel",
        "This build leaves FlashMLA out: install the CUDA wheel of sglang-kernel.",
    )


def missing_library(library: str, release: str) -> Decline:
    return Decline(
        DeclineCode.IMPORT_FAILED,
        f"sglang-kernel {release}",
        f"{library} not found",
        "the CUDA 13 runtime libraries on the loader's path",
        "Use a torch built for CUDA 13 or pip install 'nvidia-cuda-runtime>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'; or "
        f"put the folder of {library} on LD_LIBRARY_PATH.",
    )


def undefined_symbol(release: str, torch_version: str, text: str) -> Decline:
    return Decline(
        DeclineCode.VERSION,
        f"sglang-kernel {release}",
        f"torch {torch_version} ({text})",
        "the torch minor version it is linked against",
        install_hint(torch_version),
    )


def failed_import(package: str, error: BaseException) -> Decline:
    return Decline(
        DeclineCode.IMPORT_FAILED,
        package,
        f"{type(error).__name__}: {first_line(error)}",
        "an import that passes",
        f"Reinstall {package}, built for this torch and this CUDA.",
    )


def unknown_signature(package: str, signature: str) -> Decline:
    return Decline(
        DeclineCode.API_MISMATCH,
        f"{package}.flash_mla_sparse_fwd",
        signature,
        "(q, kv, indices, sm_scale, ...)",
        "Use a release of FlashMLA from 2025-09 to 2026-09.",
    )


def failed_probe(package: str, found: str, wanted: str) -> Decline:
    return Decline(
        DeclineCode.SELF_TEST_FAILED,
        package,
        found,
        wanted,
        "This build does not serve this GPU or this torch rightly: replace it.",
    )


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def declined(reasons: Sequence[Decline]) -> BackendDeclined:
    """One decline out of each provider's: the first that is more than "not installed" leads."""
    installed = [reason for reason in reasons if reason.code is not DeclineCode.NOT_INSTALLED]
    if not installed:
        return BackendDeclined(reasons[-1])
    lead = installed[0]
    others = "".join(f" Also: {reason}" for reason in installed[1:])
    return BackendDeclined(Decline(lead.code, lead.field, lead.got, lead.supported, lead.hint + others))
