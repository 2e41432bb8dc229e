"""Each fault of an installation has a message of its own, with what mends it."""

from __future__ import annotations

import types
from unittest import mock

import fake_frontend
import pytest
import torch

from dsa_backends.cudnn_dsa import attention_backward, attention_forward, frontend, indexer_loss, indexer_topk
from dsa_dispatch._decline import DeclineCode
from dsa_dispatch.errors import BackendDeclined


@pytest.fixture(autouse=True)
def nothing_remembered():
    fake_frontend.forget()
    yield
    fake_frontend.forget()


def decline_of(function):
    with pytest.raises(BackendDeclined) as raised:
        function()
    return raised.value.decline


class Broken:
    """A namespace whose symbols fail to import, as lazily imported ones do."""

    def __init__(self, error):
        self.error = error

    def __getattr__(self, name):
        raise self.error


def test_not_installed_says_what_to_install():
    with fake_frontend.module_is(None):
        decline = decline_of(attention_backward.provider)
    assert decline.code is DeclineCode.IMPORT_FAILED
    assert "pip install 'nvidia-cudnn-frontend>=1.32" in decline.hint


def test_another_module_of_that_name_is_named():
    other = types.ModuleType("cudnn")
    other.__file__ = "/somewhere/cudnn.py"
    with fake_frontend.module_is(other):
        decline = decline_of(attention_backward.provider)
    assert "/somewhere/cudnn.py" in decline.got


def test_a_version_without_the_kernel_is_too_old():
    with fake_frontend.installed(without=("SparseAttentionBackward",)):
        decline = decline_of(attention_backward.provider)
        assert indexer_topk.provider()
    assert decline.code is DeclineCode.VERSION
    assert "SparseAttentionBackward" in decline.got


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("cutlass", "dsl_packages on PYTHONPATH"),
        ("tvm_ffi", "apache-tvm-ffi"),
        ("cuda.bindings", "cuda-bindings"),
    ],
)
def test_a_missing_dependency_is_told_apart(module, hint):
    package = types.ModuleType("cudnn")
    package.DSA = Broken(ModuleNotFoundError(f"No module named {module!r}", name=module))
    with fake_frontend.module_is(package):
        decline = decline_of(indexer_loss.provider)
    assert decline.code is DeclineCode.IMPORT_FAILED
    assert hint in decline.hint


def failing_plan(text):
    class IndexerTopK(fake_frontend.IndexerTopK):
        def compile(self):
            raise RuntimeError(text)

    return IndexerTopK


def test_a_runtime_of_the_dsl_that_is_not_found_names_the_variables_to_set():
    plan = failing_plan("The CuTe DSL runtime library could not be resolved or is missing")
    with fake_frontend.installed(IndexerTopK=plan):
        decline = decline_of(attention_backward.provider)
    assert decline.field == "CuTe DSL runtime"
    assert "CUTE_DSL_LIBS" in decline.hint


def test_a_kernel_that_does_not_compile_is_a_failed_self_test():
    with fake_frontend.installed(IndexerTopK=failing_plan("ptxas fatal: unsupported")):
        decline = decline_of(attention_backward.provider)
    assert decline.code is DeclineCode.SELF_TEST_FAILED
    assert "ptxas" in decline.got


def test_a_gpu_without_a_forward_is_declined_and_the_other_stages_stay():
    with fake_frontend.installed(forward=False):
        decline = decline_of(attention_forward.provider)
        assert attention_backward.provider()
    assert decline.code is DeclineCode.COMPUTE_CAPABILITY
    assert "found SM90" in decline.got
    assert "flashmla" in decline.hint


def test_a_forward_that_answers_wrongly_is_declined():
    def wrong(*args, **kwargs):
        result = fake_frontend.sparse_attention_forward_wrapper(*args, **kwargs)
        return {**result, "lse": result["lse"] + 1}

    with fake_frontend.installed(sparse_attention_forward_wrapper=wrong):
        decline = decline_of(attention_forward.provider)
    assert decline.code is DeclineCode.SELF_TEST_FAILED


def test_the_compile_is_tried_once():
    with fake_frontend.installed():
        attention_backward.provider()
        built = fake_frontend.IndexerTopK.built
        indexer_topk.provider()
        assert fake_frontend.IndexerTopK.built == built


def test_the_cpu_is_asked_where_there_is_no_gpu():
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert frontend.probe_device() == torch.device("cpu")


def test_the_first_gpu_that_the_kernels_know_is_asked():
    capabilities = {0: (8, 0), 1: (12, 0), 2: (9, 0)}
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "device_count", return_value=3),
        mock.patch.object(torch.cuda, "get_device_capability", side_effect=capabilities.__getitem__),
    ):
        assert frontend.probe_device() == torch.device("cuda", 2)
