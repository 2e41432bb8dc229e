"""Loading the cuDNN frontend, with a message of its own for everything that can be wrong with an installation."""

from __future__ import annotations

import importlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

from dsa_backends.cudnn_dsa.spec import COMPUTE_CAPABILITIES, FRONTEND
from dsa_backends.flash_mla.messages import first_line
from dsa_backends.flash_mla.slots import on_device
from dsa_dispatch._decline import Decline, DeclineCode
from dsa_dispatch.errors import BackendDeclined

RUNTIME_HINT: Final = (
    "Its packages are found through a .pth file, which `pip install --target` and PYTHONPATH leave unread: put "
    "<site-packages>/nvidia_cutlass_dsl/dsl_packages on PYTHONPATH and set CUTE_DSL_LIBS to "
    "<site-packages>/nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so."
)
ATTENTION_BACKWARD: Final = ("SparseAttentionBackward",)
ATTENTION_FORWARD: Final = ("sparse_attention_forward_wrapper",)
INDEXER_TOPK: Final = ("indexer_forward_wrapper", "indexer_forward_top_k_wrapper", "IndexerTopK")
INDEXER_LOSS: Final = (
    "indexer_forward_wrapper",
    "SparseIndexerScoreRecompute",
    "IndexerBackward",
    "DenseIndexerBackward",
)


def load(symbols: tuple[str, ...]) -> Any:
    """``cudnn.DSA``, once it is known to have ``symbols`` and to compile. Raises ``BackendDeclined``."""
    dsa = _namespace()
    for symbol in symbols:
        try:
            getattr(dsa, symbol)
        except AttributeError as error:
            raise BackendDeclined(
                _decline(DeclineCode.VERSION, f"no cudnn.DSA.{symbol} in {title()}", FRONTEND.versions)
            ) from error
        except Exception as error:
            raise BackendDeclined(_import_failed(error)) from error
    _compiles()
    return dsa


def title() -> str:
    try:
        return f"cudnn-frontend {version(FRONTEND.distribution)}"
    except PackageNotFoundError:
        return "cudnn-frontend without metadata"


def _decline(code: DeclineCode, got: str, supported: str, hint: str = "") -> Decline:
    return Decline(
        code,
        FRONTEND.distribution,
        got,
        supported,
        hint or f"pip install '{FRONTEND.distribution}{FRONTEND.versions}'.",
    )


@lru_cache(maxsize=1)
def _namespace() -> Any:
    try:
        module = importlib.import_module("cudnn")
    except Exception as error:
        raise BackendDeclined(_import_failed(error)) from error
    dsa = getattr(module, "DSA", None)
    if dsa is None:
        where = getattr(module, "__file__", None) or "an unknown place"
        raise BackendDeclined(
            _decline(
                DeclineCode.IMPORT_FAILED,
                f"a module cudnn without DSA, from {where}",
                f"the cudnn of {FRONTEND.distribution}",
                "Another module of that name hides the frontend, or the frontend is older than its DSA kernels.",
            )
        )
    return dsa


def _import_failed(error: Exception) -> Decline:
    missing = (getattr(error, "name", None) or "").partition(".")[0]
    found = f"{type(error).__name__}: {first_line(error)}"
    if missing in ("cutlass", "nvidia_cutlass_dsl"):
        hint = f"pip install 'nvidia-cutlass-dsl[cu13]>=4.8'. {RUNTIME_HINT}"
    elif missing == "tvm_ffi":
        hint = "pip install 'apache-tvm-ffi>=0.1.11'."
    elif missing == "cuda":
        hint = "pip install 'cuda-bindings>=13'."
    else:
        hint = ""
    return _decline(DeclineCode.IMPORT_FAILED, found, "an import that passes", hint)


@lru_cache(maxsize=1)
def _compiles() -> None:
    """Compile and run the smallest kernel: whether the CuTe DSL finds its runtime shows at a compile only."""
    device = probe_device()
    scores = torch.zeros(1, 128, device=device)
    lengths = torch.full((1,), 128, dtype=torch.int32, device=device)
    ids = torch.empty(1, 2, dtype=torch.int32, device=device)
    try:
        with on_device(scores):
            plan = _namespace().IndexerTopK(scores, lengths, 2, return_val=False)
            plan.check_support()
            plan.compile()
            workspace = torch.empty(plan.scratch_workspace_bytes(), dtype=torch.uint8, device=device)
            plan.execute(scores, lengths, out_indices=ids, workspace=workspace)
    except Exception as error:
        raise BackendDeclined(_compile_failed(error)) from error


def _compile_failed(error: Exception) -> Decline:
    found = f"{type(error).__name__}: {first_line(error)}"
    if "runtime library" in str(error):
        return Decline(
            DeclineCode.IMPORT_FAILED,
            "CuTe DSL runtime",
            found,
            "libcute_dsl_runtime.so of nvidia-cutlass-dsl",
            RUNTIME_HINT,
        )
    return _decline(
        DeclineCode.SELF_TEST_FAILED,
        found,
        "a kernel that compiles and runs",
        "Check that nvidia-cutlass-dsl (>=4.8), apache-tvm-ffi (>=0.1.11) and the driver fit each other.",
    )


def probe_device() -> torch.device:
    """The current device, or the first one whose architecture the kernels know."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    current = torch.cuda.current_device()
    order = (current, *(index for index in range(torch.cuda.device_count()) if index != current))
    known = [index for index in order if knows(torch.cuda.get_device_capability(index))]
    return torch.device("cuda", known[0] if known else current)


def knows(capability: tuple[int, int]) -> bool:
    return any(low <= capability < high for low, high in COMPUTE_CAPABILITIES)


def is_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
