"""What the types of a capability cannot say: names that exist, limits that leave something, fields that agree."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import torch
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from dsa_dispatch._capability import FLOATS, AnyOf, Capability, Channels, Heads, IndexWidth, Package
from dsa_dispatch._policy.values import nearest

DEVICE_TYPES: Final = ("cpu", "cuda", "hip", "xpu", "mps", "hpu", "npu", "mtia", "xla", "privateuseone")
LOSSES: Final = ("sparse", "dense")


def value_errors(capability: Capability, where: str) -> Iterator[str]:
    """One text per field that is no sensible declaration: its name, what was given, what is possible."""
    for name, values, known in (
        ("dtypes", capability.dtypes, sorted(FLOATS)),
        ("weights_dtypes", capability.weights_dtypes, sorted(FLOATS)),
        ("losses", capability.losses, LOSSES),
    ):
        yield from _unknown(values, known, f"{where}, field {name}")
    yield from _device_errors(capability, where)
    for name in ("dtypes", "weights_dtypes", "layouts", "bounds", "context_parallel", "relu", "losses"):
        if not getattr(capability, name):
            yield f"{where}, field {name}: got an empty set, so that no call would be accepted; name at least one"
    for name in ("max_rows", "max_keys", "max_elements"):
        yield from _maximum_errors(getattr(capability, name), f"{where}, field {name}")
    if capability.shared_memory < 0:
        yield f"{where}, field shared_memory: got {capability.shared_memory}, expected bytes, 0 for no need"
    yield from _heads_errors(capability.heads, f"{where}, field heads")
    yield from _heads_errors(capability.kv_heads, f"{where}, field kv_heads")
    yield from _channel_errors(capability.channels, f"{where}, field channels")
    yield from _width_errors(capability.width, f"{where}, field width")
    if not 0 <= capability.score_error < 1:
        yield (
            f"{where}, field score_error: got {capability.score_error}, expected a fraction from 0 to below 1 of the "
            f"sum of absolute products; with 1 every selection would be right"
        )
    if not 0 <= capability.gradient_error < 1:
        yield f"{where}, field gradient_error: got {capability.gradient_error}, expected a fraction from 0 to below 1"
    for package in capability.packages:
        yield from version_errors(package, where)


def _unknown(values: Collection[str], known: Collection[str], where: str) -> Iterator[str]:
    for value in sorted(values):
        if value not in known:
            yield f"{where}: got {value!r}, supports {', '.join(known)}.{nearest(value, known)}"


def _device_errors(capability: Capability, where: str) -> Iterator[str]:
    devices, ranges = capability.devices, capability.compute_capabilities
    if devices is not None and not devices:
        yield f"{where}, field devices: got an empty set; name at least one, or None for any device"
    yield from _unknown(
        {name for name in devices or () if not _is_device_type(name)}, DEVICE_TYPES, f"{where}, field devices"
    )
    if ranges is None:
        return
    field = f"{where}, field compute_capabilities"
    if not ranges:
        yield f"{field}: got no range; name at least one, or None for any"
    if devices is not None and "cuda" not in devices:
        yield f"{field}: got {ranges!r} beside devices without 'cuda', which alone has them"
    for low, high in ranges:
        if not (0, 0) <= low < high or min(*low, *high) < 0:
            yield (
                f"{field}: got {low} up to below {high}, expected a range that holds something, "
                f"such as ((9, 0), (10, 0))"
            )


def _is_device_type(name: str) -> bool:
    try:
        # A vendor's own type is known once its extension of torch is loaded.
        return name in DEVICE_TYPES or torch.device(name).type == name
    except RuntimeError:
        return False


def _maximum_errors(maximum: int | None, where: str) -> Iterator[str]:
    if maximum is not None and maximum < 1:
        yield f"{where}: got {maximum}, expected at least 1, or None for no limit"


def _step_errors(rule: Heads | Channels | IndexWidth, where: str) -> Iterator[str]:
    for name in ("multiple_of", "minimum"):
        if getattr(rule, name, 1) < 1:
            yield f"{where}, field {name}: got {getattr(rule, name)}, expected at least 1"
    yield from _maximum_errors(rule.maximum, f"{where}, field maximum")


def _beside(rule: Heads | Channels, listed: str, where: str) -> Iterator[str]:
    """Rules that a list of what runs leaves without effect."""
    plain = type(rule)()
    for name in ("multiple_of", "power_of_two", "minimum", "maximum"):
        if getattr(rule, name, None) != getattr(plain, name, None):
            yield (
                f"{where}, field {name}: got {getattr(rule, name)} beside {listed}, which already say what runs; "
                f"leave one of them out"
            )


def _heads_errors(heads: Heads, where: str) -> Iterator[str]:
    wrong = list(_step_errors(heads, where))
    if heads.values is not None:
        if not heads.values:
            wrong.append(
                f"{where}, field values: got an empty set; name at least one count, or None for a rule"
            )
        wrong += [
            f"{where}, field values: got {value}, expected counts of at least 1"
            for value in sorted(heads.values)
            if value < 1
        ]
        wrong += _beside(heads, "values", where)
    if not wrong and heads.smallest() is None:
        wrong.append(f"{where}: got {heads!r}, which no count satisfies")
    yield from wrong


def _channel_errors(channels: Channels, where: str) -> Iterator[str]:
    wrong = list(_step_errors(channels, where))
    if channels.pairs is not None:
        if not channels.pairs:
            wrong.append(f"{where}, field pairs: got none; name at least one pair, or None for a rule")
        wrong += [
            f"{where}, field pairs: got {(qk, v)}, expected a width of at least 1 for query and key, and for the value "
            f"at least 1, or 0 where there is none"
            for qk, v in channels.pairs
            if qk < 1 or v < 0
        ]
        wrong += _beside(channels, "pairs", where)
    elif not wrong and channels.maximum is not None and channels.maximum < channels.multiple_of:
        wrong.append(f"{where}: got {channels!r}, which no width satisfies")
    yield from wrong


def _width_errors(width: IndexWidth, where: str) -> Iterator[str]:
    wrong = list(_step_errors(width, where))
    if not wrong and width.power_of_two and width.multiple_of & (width.multiple_of - 1):
        wrong.append(
            f"{where}, field multiple_of: got {width.multiple_of} beside power_of_two, expected a power of two"
        )
    if not wrong and width.smallest() is None:
        wrong.append(f"{where}: got {width!r}, which no width satisfies")
    yield from wrong


def version_errors(package: Package, where: str) -> Iterator[str]:
    """Names that are empty, and version ranges that are none."""
    if isinstance(package, AnyOf):
        if not package.alternatives:
            yield f"{where}: got {package!r}, expected at least one alternative"
        for alternative in package.alternatives:
            yield from version_errors(alternative, where)
        return
    if not (package.distribution.strip() and package.module.strip()):
        yield f"{where}: got {package!r}, expected the names of a distribution and of its top-level module"
    try:
        SpecifierSet(package.versions)
    except InvalidSpecifier:
        yield f"{where}, package {package.distribution}: got version range {package.versions!r}, such as '>=1.2,<2'"
