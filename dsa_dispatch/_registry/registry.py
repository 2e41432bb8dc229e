"""The registry: an immutable snapshot of backends and plugins, replaced as a whole when it changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType, ModuleType

import pluggy

from dsa_dispatch._backend import BackendSpec
from dsa_dispatch._policy.values import SPECIAL
from dsa_dispatch._registry import hooks
from dsa_dispatch._registry.faults import raised, traced
from dsa_dispatch.errors import PluginError


@dataclass(frozen=True, slots=True)
class Registered:
    """A backend and who brought it."""

    spec: BackendSpec
    origin: str


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin, or one backend of it, that could not be used. It costs the others nothing."""

    plugin: str
    distribution: str
    step: str
    error: str
    traceback: str


@dataclass(frozen=True)
class Snapshot:
    """All that dispatch knows of backends. Immutable; readers take no lock."""

    backends: Mapping[str, Registered] = field(default_factory=lambda: MappingProxyType({}))
    failures: tuple[PluginFailure, ...] = ()
    plugins: pluggy.PluginManager = field(default_factory=lambda: _plugin_manager())
    distributions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The names that plugins are registered under, to the distributions that brought them."""
    row_limits: tuple[int, ...] = ()
    key_limits: tuple[int, ...] = ()
    element_limits: tuple[int, ...] = ()
    sized: bool = False
    """Some capability asks for lengths."""
    exact_sizes: bool = False
    """Some capability has an ``extra_check``, so cached decisions must distinguish exact sizes."""

    def names(self) -> frozenset[str]:
        """Every name a policy may use: backends and their families."""
        families = {family for entry in self.backends.values() for family in entry.spec.families}
        return frozenset(self.backends) | families

    def members(self, name: str) -> tuple[str, ...]:
        """The backends a policy name allows, the highest rank first, ties by name."""
        return tuple(
            entry.spec.name
            for entry in self.ranked()
            if entry.spec.name == name or name in entry.spec.families
        )

    def ranked(self) -> tuple[Registered, ...]:
        return tuple(sorted(self.backends.values(), key=lambda entry: (-entry.spec.rank, entry.spec.name)))

    def distribution_of(self, plugin: object) -> str:
        """Who brought a plugin."""
        return self.distributions.get(self.plugins.get_name(plugin) or "", "this process")

    def described(self, plugin: object) -> str:
        """A plugin and who brought it."""
        return f"{plugin_title(plugin)} of {self.distribution_of(plugin)}"

    def order_plugins(self) -> tuple[object, ...]:
        """Policy plugins, in the order they are asked in."""
        implementations = self.plugins.hook.dsa_dispatch_order.get_hookimpls()
        return tuple(entry.plugin for entry in reversed(implementations))

    def observers(self) -> tuple[object, ...]:
        """Plugins that are told of decisions, in the order they are told in."""
        implementations = self.plugins.hook.dsa_dispatch_on_decision.get_hookimpls()
        return tuple(entry.plugin for entry in reversed(implementations))

    def fingerprint(self) -> str:
        """A digest of what decides: names, versions, ranks, capabilities, and policy plugins."""
        digest = hashlib.sha256()
        for entry in self.ranked():
            digest.update(repr(_stable(replace(entry.spec, doc=""))).encode())
        orders = self.plugins.hook.dsa_dispatch_order.get_hookimpls()
        # In their order, since the first that answers decides.
        digest.update(repr([plugin_title(entry.plugin) for entry in orders]).encode())
        return digest.hexdigest()[:16]


def plugin_title(plugin: object) -> str:
    """A name that is the same in every process: that of a module or a class."""
    named = plugin if hasattr(plugin, "__name__") else type(plugin)
    module = "" if isinstance(named, ModuleType) else f"{getattr(named, '__module__', '')}:"
    return f"{module}{getattr(named, '__qualname__', None) or getattr(named, '__name__', '')}"


def _stable(value: object) -> object:
    """Data in a form whose text is the same in every process: sets sorted, functions by name."""
    if is_dataclass(value) and not isinstance(value, type):
        return [(entry.name, _stable(getattr(value, entry.name))) for entry in fields(value)]
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    if isinstance(value, Mapping):
        return sorted((repr(key), repr(_stable(entry))) for key, entry in value.items())
    if isinstance(value, tuple):
        return [_stable(entry) for entry in value]
    if isinstance(value, partial):
        return ["partial", _stable(value.func), _stable(value.args), _stable(value.keywords)]
    if callable(value):
        return plugin_title(value)
    return value


def _plugin_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    return manager


def with_backend(snapshot: Snapshot, spec: BackendSpec, origin: str) -> Snapshot:
    """A snapshot that also holds ``spec``. Raises ``PluginError`` on a second backend of the same name."""
    if not isinstance(spec, BackendSpec):
        raise PluginError(f"register_backend: expected a BackendSpec, got {type(spec).__name__}")
    if spec.name in SPECIAL:
        raise PluginError(
            f"backend {spec.name!r} of {origin}: {' and '.join(SPECIAL)} are policies, not names"
        )
    for family in spec.families:
        if not family.isidentifier() or family in SPECIAL:
            raise PluginError(f"backend {spec.name!r} of {origin}: {family!r} cannot name a family")
    known = snapshot.backends.get(spec.name)
    if known is not None:
        raise PluginError(
            f"backend {spec.name!r} of {origin} is already registered by {known.origin}; choose another name or call "
            f"unregister_backend({spec.name!r}) first"
        )
    return _with_backends(snapshot, {**snapshot.backends, spec.name: Registered(spec, origin)})


def without_backend(snapshot: Snapshot, name: str) -> Snapshot:
    if name not in snapshot.backends:
        raise PluginError(
            f"unregister_backend: no backend {name!r}; registered: {', '.join(sorted(snapshot.backends))}"
        )
    return _with_backends(snapshot, {key: entry for key, entry in snapshot.backends.items() if key != name})


def _with_backends(snapshot: Snapshot, backends: dict[str, Registered]) -> Snapshot:
    capabilities = [stage.capability for entry in backends.values() for stage in entry.spec.stages.values()]

    def limits(values: Iterable[int | None]) -> tuple[int, ...]:
        return tuple(sorted({value for value in values if value is not None}))

    rows = limits(capability.max_rows for capability in capabilities)
    keys = limits(capability.max_keys for capability in capabilities)
    elements = limits(capability.max_elements for capability in capabilities)
    exact = any(capability.extra_check is not None for capability in capabilities)
    return replace(
        snapshot,
        backends=MappingProxyType(backends),
        row_limits=rows,
        key_limits=keys,
        element_limits=elements,
        sized=bool(rows or keys or elements or exact),
        exact_sizes=exact,
    )


def load_plugins(snapshot: Snapshot) -> Snapshot:
    """Add the backends of every installed plugin, each guarded by itself: a broken one is recorded and skipped."""
    points = sorted(
        entry_points(group=hooks.ENTRY_POINT_GROUP),
        key=lambda point: (_distribution(point) != "dsa-dispatch", point.name, point.value),
    )
    for point in dict.fromkeys(points):
        snapshot = _load_plugin(snapshot, point)
    return snapshot


def _distribution(point: EntryPoint) -> str:
    unknown = "unknown distribution"
    try:
        return (point.dist.name if point.dist is not None else None) or unknown
    except Exception:  # an entry point outlives its metadata where an uninstallation was cut short
        return unknown


def _load_plugin(snapshot: Snapshot, point: EntryPoint) -> Snapshot:
    failures = list(snapshot.failures)
    manager = snapshot.plugins
    distribution = _distribution(point)
    origin = f"entry point {point.name!r} of {distribution}"

    def failed(step: str, error: BaseException) -> None:
        failures.append(PluginFailure(point.name, distribution, step, raised(error), traced(error)))

    plugin: object = None
    added = False
    specs: list[BackendSpec] = []
    step = "import"
    # A plugin is somebody else's code: whatever it raises must not cost the user the other backends.
    try:
        plugin = point.load()
        step = "register"
        name = _register(snapshot, plugin, point, distribution)
        added = True
        manager.check_pending()
        callers = manager.get_hookcallers(plugin) or []
        if not callers:
            raise PluginError(
                f"{point.value} implements no hook of dsa_dispatch; decorate dsa_dispatch_backends() with "
                f"dsa_dispatch.hookimpl"
            )
        step = "dsa_dispatch_backends"
        others = [other for other in manager.get_plugins() if other is not plugin]
        results = manager.subset_hook_caller("dsa_dispatch_backends", others)()
        implemented = any(caller.name == "dsa_dispatch_backends" for caller in callers)
        if implemented and not results:
            raise PluginError(
                f"dsa_dispatch_backends() of {point.value} returned None; return a list of BackendSpec"
            )
        for result in results:
            specs.extend(result)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        failed(step, error)
        if added:
            manager.unregister(plugin)
        return replace(snapshot, failures=tuple(failures))
    for spec in specs:
        try:
            snapshot = with_backend(snapshot, spec, origin)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failed("backend", error)
    distributions = MappingProxyType({**snapshot.distributions, name: distribution})
    return replace(snapshot, failures=tuple(failures), distributions=distributions)


def _register(snapshot: Snapshot, plugin: object, point: EntryPoint, distribution: str) -> str:
    """Give the plugin to pluggy; the name it is known by there. Entry points of two distributions may share a name."""
    manager = snapshot.plugins
    known = manager.get_name(plugin)
    if known is not None:
        raise PluginError(
            f"{point.value} is already registered, as {known!r} of {snapshot.distribution_of(plugin)}; name a module "
            f"in one entry point only"
        )
    taken = manager.has_plugin(point.name)
    name = f"{point.name} of {distribution} ({point.value})" if taken else point.name
    manager.register(plugin, name=name)
    return name
