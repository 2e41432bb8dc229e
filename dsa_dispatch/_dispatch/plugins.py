"""The hooks that policy and observer plugins have in a decision, each plugin guarded by itself.

A plugin is somebody else's code: one that raises is named and costs neither the call nor the other plugins anything.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import pluggy

from dsa_dispatch._call import CallSpec
from dsa_dispatch._registry.registry import Snapshot, plugin_title

if TYPE_CHECKING:
    from dsa_dispatch._dispatch.decision import Decision
    from dsa_dispatch._runtime import Runtime

LOGGER = logging.getLogger("dsa_dispatch")


def backend_order(snapshot: Snapshot, call: CallSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Backends as ``auto`` asks them, and what was wrong with policy plugins.

    Declared rank, ties by name, then the first permutation of it that a policy plugin returns.
    """
    declared = tuple(entry.spec.name for entry in snapshot.ranked())
    faults: list[str] = []
    manager = snapshot.plugins
    # Lengths are not part of a cached decision's key, so an order that depended on them would outlive its reason.
    call = dataclasses.replace(call, batch=1, rows=1, keys=1)
    for implementation in reversed(manager.hook.dsa_dispatch_order.get_hookimpls()):
        plugin = implementation.plugin
        hook = _hook_of(manager, plugin, "dsa_dispatch_order")
        try:
            proposed = hook(call=call, candidates=declared)
            order = declared if proposed is None else tuple(proposed)
            permutation = sorted(order) == sorted(declared)
        except Exception as error:
            faults.append(
                f"policy plugin {plugin_title(plugin)} raised in dsa_dispatch_order and was passed over: "
                f"{type(error).__name__}: {error}"
            )
            continue
        if not permutation:
            faults.append(
                f"policy plugin {plugin_title(plugin)} returned no permutation from dsa_dispatch_order and was "
                f"passed over: got {order!r}, candidates {declared!r}"
            )
        elif proposed is not None:
            return order, tuple(faults)
    return declared, tuple(faults)


def observe(runtime: Runtime, snapshot: Snapshot, decision: Decision) -> None:
    """Tell every observer plugin of a new decision."""
    manager = snapshot.plugins
    for implementation in reversed(manager.hook.dsa_dispatch_on_decision.get_hookimpls()):
        plugin = implementation.plugin
        try:
            _hook_of(manager, plugin, "dsa_dispatch_on_decision")(decision=decision)
        except Exception:
            name = plugin_title(plugin)
            if runtime.first_time("observer", name):
                LOGGER.warning(
                    "plugin %s raised in dsa_dispatch_on_decision (said once)", name, exc_info=True
                )


def _hook_of(manager: pluggy.PluginManager, plugin: object, hook: str) -> Any:
    others = [other for other in manager.get_plugins() if other is not plugin]
    return manager.subset_hook_caller(hook, others)
