"""Are the packages that a backend needs here? Judged by metadata alone: nothing is imported."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.specifiers import SpecifierSet

from dsa_dispatch._capability import AnyOf, Package, Requirement
from dsa_dispatch._decline import Decline, DeclineCode


@dataclass(frozen=True, slots=True)
class _Unmet:
    """A requirement that this environment does not meet."""

    title: str
    code: DeclineCode
    got: str
    supported: str
    pip: str
    """What to hand to ``pip install``; "" where ``hint`` says it."""
    hint: str = ""


def package_declines(packages: Iterable[Package]) -> tuple[Decline, ...]:
    """Why these packages do not do: those of one fault in one decline, with one command for all that pip can mend."""
    unmet = [found for package in dict.fromkeys(packages) if (found := _unmet(package)) is not None]
    arguments = " ".join(dict.fromkeys(f"'{entry.pip}'" for entry in unmet if entry.pip))
    groups: dict[tuple[DeclineCode, str], list[_Unmet]] = {}
    for entry in unmet:
        groups.setdefault((entry.code, entry.got), []).append(entry)
    return tuple(_decline(group, f"pip install {arguments}.") for group in groups.values())


def _decline(group: Sequence[_Unmet], command: str) -> Decline:
    names = ", ".join(entry.title for entry in group)
    hints = [command if entry.pip else entry.hint for entry in group]
    return Decline(
        group[0].code,
        f"package{'s' if len(group) > 1 else ''} {names}",
        group[0].got,
        "; ".join(entry.supported for entry in group),
        " ".join(dict.fromkeys(hints)),
    )


def _unmet(package: Package) -> _Unmet | None:
    return _unmet_all(package) if isinstance(package, AnyOf) else _unmet_one(package)


def _unmet_one(package: Requirement) -> _Unmet | None:
    importable, release = _found(package.distribution, package.module)
    supported = package.versions or "any version"
    extras = f"[{package.extras}]" if package.extras else ""
    pip = f"{package.distribution}{extras}{package.versions}"
    if not importable and release and package.path_hint:
        got = f"{release}, but no module {package.module} on the path"
        return _Unmet(package.distribution, DeclineCode.NOT_INSTALLED, got, supported, "", package.path_hint)
    if not importable:
        return _Unmet(
            package.distribution,
            DeclineCode.NOT_INSTALLED,
            "not installed",
            supported,
            "" if package.hint else pip,
            package.hint,
        )
    # A module without distribution metadata, such as a source checkout: its version cannot be judged here.
    if release and not SpecifierSet(package.versions).contains(release, prereleases=True):
        return _Unmet(package.distribution, DeclineCode.VERSION, release, supported, pip)
    return None


def _unmet_all(choice: AnyOf) -> _Unmet | None:
    found = [_unmet_one(package) for package in choice.alternatives]
    unmet = [entry for entry in found if entry is not None]
    if len(unmet) < len(found):
        return None
    wrong = [entry for entry in unmet if entry.code is DeclineCode.VERSION]
    ranged = any(package.versions for package in choice.alternatives)
    ranges = " or ".join(f"{entry.title} {entry.supported}" for entry in unmet)
    return _Unmet(
        " or ".join(entry.title for entry in unmet),
        DeclineCode.VERSION if wrong else DeclineCode.NOT_INSTALLED,
        ", ".join(f"{entry.title} {entry.got}" for entry in wrong) or "none of them installed",
        ranges if ranged else "any one of them",
        "" if choice.hint else unmet[0].pip,
        choice.hint or unmet[0].hint,
    )


@lru_cache(maxsize=256)
def _found(distribution: str, module: str) -> tuple[bool, str]:
    """Whether the module can be found, and the version of the distribution, "" where it has no metadata."""
    # Only top-level names: find_spec on a dotted name imports the parent.
    try:
        importable = find_spec(module.partition(".")[0]) is not None
    except ValueError:
        # A loaded module without a spec, as a test or an embedding application may put there: it is there.
        importable = True
    return importable, installed_version(distribution)


def installed_version(distribution: str) -> str:
    """The version of a distribution; "" where there is none, or metadata that tells none."""
    try:
        return version(distribution) or ""
    except PackageNotFoundError:
        return ""
    except Exception:  # metadata that cannot be read, as an interrupted uninstallation leaves it
        return ""


def forget_packages() -> None:
    """Look at the environment anew (after an installation in a running process)."""
    importlib.invalidate_caches()
    _found.cache_clear()
