"""Finding a provider: which is taken, and what is said of each that is not."""

from __future__ import annotations

import types
from unittest import mock

import fake_providers
import pytest
import torch

from dsa_backends.flash_mla import messages, providers
from dsa_backends.flash_mla.probe import Answer
from dsa_dispatch._decline import DeclineCode
from dsa_dispatch.errors import BackendDeclined

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_remembered():
    providers._usable.cache_clear()
    yield
    providers._usable.cache_clear()


def decline_of(function, *args):
    with pytest.raises(BackendDeclined) as raised:
        function(*args)
    return raised.value.decline


@pytest.fixture
def sgl_kernel(tmp_path, monkeypatch):
    """sglang-kernel as an installed package of a given release; its library loads as ``load`` says."""

    def install(release, load=lambda path: None, library=True, torch_version="2.11.0+cu130"):
        folder = tmp_path / "sgl_kernel"
        folder.mkdir(exist_ok=True)
        if library:
            (folder / "flashmla_ops.abi3.so").touch()
        found = types.SimpleNamespace(submodule_search_locations=[str(folder)])
        monkeypatch.setattr(providers, "find_spec", lambda name: found if name == "sgl_kernel" else None)
        monkeypatch.setattr(providers, "_version", lambda *names: release)
        monkeypatch.setattr(providers, "_read_library", load)
        monkeypatch.setattr(torch, "__version__", torch_version)
        operators = types.SimpleNamespace(
            sgl_kernel=types.SimpleNamespace(sparse_prefill_fwd=fake_providers.operator)
        )
        monkeypatch.setattr(torch, "ops", operators)
        return folder

    return install


def test_nothing_installed_names_the_release_for_this_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(providers, "find_spec", lambda name: None)
    decline = decline_of(providers.usable, CPU)
    assert decline.code is DeclineCode.NOT_INSTALLED
    assert "pip install --no-deps sglang-kernel==0.4.5" in decline.hint
    assert "pip install flash-mla" not in decline.hint


def test_a_torch_that_no_release_fits_is_said_to_be_one():
    assert "No release of sglang-kernel is known to fit torch 2.12" in messages.install_hint("2.12.1")


def test_the_library_is_loaded_alone_and_the_lse_base_found(sgl_kernel):
    loaded = []
    folder = sgl_kernel("0.4.5", loaded.append)
    found = providers.usable(CPU)
    assert loaded == [folder / "flashmla_ops.abi3.so"]
    assert found.title == "sgl_kernel 0.4.5, lse base 2"


def test_a_wrong_torch_is_refused_before_the_library_is_touched(sgl_kernel):
    load = mock.Mock(side_effect=AssertionError("loaded"))
    sgl_kernel("0.4.10", load)
    decline = decline_of(providers.usable, CPU)
    assert decline.code is DeclineCode.VERSION
    assert decline.got == "torch 2.11.0+cu130"
    assert "torch 2.14" in decline.supported
    assert "sglang-kernel==0.4.5" in decline.hint


def failing(text):
    def load(path):
        try:
            raise OSError(text)
        except OSError as cause:
            raise OSError(f"Could not load this library: {path}") from cause

    return load


def test_an_undefined_symbol_means_the_wrong_torch(sgl_kernel):
    sgl_kernel("0.4.7", failing("flashmla_ops.abi3.so: undefined symbol: _ZN3c104cuda"))
    decline = decline_of(providers.usable, CPU)
    assert decline.code is DeclineCode.VERSION
    assert "undefined symbol: _ZN3c104cuda" in decline.got


def test_a_missing_cuda_runtime_is_named(sgl_kernel, monkeypatch):
    sgl_kernel("0.4.5", failing("libcudart.so.13: cannot open shared object file"))
    monkeypatch.setattr(providers, "_preload", lambda name: False)
    decline = decline_of(providers.usable, CPU)
    assert decline.code is DeclineCode.IMPORT_FAILED
    assert decline.got == "libcudart.so.13 not found"
    assert "nvidia-cuda-runtime" in decline.hint


def test_a_cuda_runtime_in_a_wheel_is_preloaded(sgl_kernel, monkeypatch):
    preloaded = []
    fail = failing("libcudart.so.13: cannot open shared object file")

    def load(path):
        if not preloaded:
            fail(path)

    sgl_kernel("0.4.5", load)
    monkeypatch.setattr(providers, "_preload", lambda name: preloaded.append(name) or True)
    assert providers.usable(CPU).title.startswith("sgl_kernel")
    assert preloaded == ["libcudart.so.13", "libnvrtc.so.13"]


def test_a_library_that_fails_otherwise_keeps_the_loaders_words(sgl_kernel):
    sgl_kernel("0.4.5", failing("invalid ELF header"))
    decline = decline_of(providers.usable, CPU)
    assert decline.code is DeclineCode.IMPORT_FAILED
    assert "invalid ELF header" in decline.got


def test_a_build_without_flashmla_is_named(sgl_kernel):
    sgl_kernel("0.4.5", library=False)
    assert "no flashmla_ops library" in decline_of(providers.usable, CPU).got


def refuses(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    raise RuntimeError("Sparse Attention Forward Kernel is only supported on SM100")


def wrong_base(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    out, largest, lse = fake_providers.main_signature(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    return out, largest, lse * 2.302585


def ignores_length(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    out, largest, lse = fake_providers.main_signature(q, kv, indices, sm_scale)
    return out * 0.5, largest, lse


@pytest.mark.parametrize(
    ("function", "text"),
    [(refuses, "only supported on SM100"), (wrong_base, "1.59"), (ignores_length, "mean of two")],
)
def test_a_provider_that_answers_wrongly_is_declined_with_what_it_answered(function, text):
    with fake_providers.flash_mla(function):
        decline = decline_of(providers.usable, CPU)
    assert decline.code is DeclineCode.SELF_TEST_FAILED
    assert text in decline.got


@pytest.mark.parametrize(
    ("function", "ends"),
    [
        (fake_providers.main_signature, False),
        (fake_providers.base_two_signature, False),
        (fake_providers.oldest_signature, False),
        (fake_providers.hopper_signature, True),
    ],
)
def test_whether_a_length_ends_a_row_is_read_from_an_answer(function, ends):
    with fake_providers.flash_mla(function):
        assert providers.usable(CPU).answer.ends_at_length is ends


@pytest.mark.parametrize(("capability", "ends"), [((9, 0), True), ((10, 0), False), ((10, 3), False)])
def test_one_call_shows_it_only_where_there_is_one_kernel(capability, ends):
    answer = Answer(1.0, ends_at_length=True)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        assert providers._as_far_as_it_shows(answer, torch.device("cuda", 0)).ends_at_length is ends
    assert not providers._as_far_as_it_shows(Answer(1.0, False), CPU).ends_at_length


def test_a_provider_without_the_function_is_a_failed_import():
    with fake_providers.flash_mla(None):
        assert decline_of(providers.usable, CPU).code is DeclineCode.IMPORT_FAILED


def test_an_unknown_signature_is_declined_without_a_call():
    def other(query, cache):
        raise AssertionError("called")

    with fake_providers.flash_mla(other):
        decline = decline_of(providers.usable, CPU)
    assert decline.code is DeclineCode.API_MISMATCH
    assert decline.got == "(query, cache)"


def test_the_next_provider_is_taken_where_the_first_does_not_answer(sgl_kernel):
    sgl_kernel("0.4.5")
    broken = providers.Provider("flash_mla 1.0", lambda *operands: refuses(*operands))
    with mock.patch.object(providers, "load_flash_mla", return_value=broken):
        assert providers.usable(CPU).provider.name == "sgl_kernel 0.4.5"


def test_every_reason_is_told_when_none_works(sgl_kernel):
    sgl_kernel("0.4.10")
    broken = providers.Provider("flash_mla 1.0", lambda *operands: refuses(*operands))
    with mock.patch.object(providers, "load_flash_mla", return_value=broken):
        text = str(decline_of(providers.usable, CPU))
    assert "flash_mla 1.0" in text
    assert "sglang-kernel 0.4.10" in text
