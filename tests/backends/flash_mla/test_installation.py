"""Either provider makes the backend an installed one, by metadata alone."""

from __future__ import annotations

import sys
import types
from importlib.metadata import PackageNotFoundError

import pytest

from dsa_backends.flash_mla.spec import SPEC
from dsa_dispatch import list_backends
from dsa_dispatch._registry import packages
from dsa_dispatch._registry.availability import installation_declines
from dsa_dispatch.testing import isolated_registry


@pytest.fixture
def environment(monkeypatch):
    """An environment with exactly the given modules, none of them with distribution metadata."""

    def no_metadata(name):
        raise PackageNotFoundError(name)

    def holds(*modules):
        found = {name: types.SimpleNamespace() for name in modules}
        monkeypatch.setattr(packages, "find_spec", found.get)
        monkeypatch.setattr(packages, "version", no_metadata)
        packages.forget_packages()

    yield holds
    packages.forget_packages()


@pytest.mark.parametrize("module", ["flash_mla", "sgl_kernel"])
def test_one_provider_is_enough(environment, module):
    environment(module)
    assert installation_declines(SPEC, "attention_forward") == ()
    assert module not in sys.modules


def test_without_a_provider_the_backend_is_not_installed_and_says_which_would_do(environment):
    environment("cudnn")
    with isolated_registry(SPEC):
        (info,) = list_backends()
    assert not info.installed
    (text,) = info.missing
    assert text.startswith("NOT_INSTALLED package flash-mla or sglang-kernel: got none of them installed")
