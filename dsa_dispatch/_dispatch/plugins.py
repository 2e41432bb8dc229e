"""The hooks that policy and observer plugins have in a decision, each plugin guarded by itself.

A plugin is somebody else's code: one that raises is named and costs neither the call nor the other plugins anything.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from dsa_dispatch._call import CallSpec
from dsa_dispatch._policy.values import shown
from dsa_dispatch._registry.faults import raised
from dsa_dispatch._registry.registry import Snapshot

if TYPE_CHECKING:
    from dsa_dispatch._dispatch.decision import Decision
    from dsa_dispatch._runtime import Runtime

LOGGER = logging.getLogger("dsa_dispatch")


@dataclass(frozen=True, slots=True)
class Order:
    """Backends as ``auto`` asks them, who put them in that order, and what was wrong with policy plugins."""

    names: tuple[str, ...]
    policy_plugin: str = ""
    """Empty where the declared ranks decided."""
    faults: tuple[str, ...] = ()


def backend_order(snapshot: Snapshot, call: CallSpec) -> Order:
    """Declared rank, ties by name, then the first permutation of it that a policy plugin returns."""
    declared = tuple(entry.spec.name for entry in snapshot.ranked())
    faults: list[str] = []
    manager = snapshot.plugins
    # Lengths are not part of a cached decision's key, so an order that depended on them would outlive its reason.
    call = dataclasses.replace(call, batch=1, rows=1, keys=1)
    for plugin in snapshot.order_plugins():
        who = snapshot.described(plugin)
        hook = _hook_of(manager, plugin, "dsa_dispatch_order")
        try:
            proposed = hook(call=call, candidates=declared)
            order = declared if proposed is None else tuple(proposed)
            permutation = sorted(order) == sorted(declared)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            faults.append(
                f"policy plugin {who} raised in dsa_dispatch_order and was passed over: {raised(error)}"
            )
            continue
        if not permutation:
            faults.append(
                f"policy plugin {who} returned no permutation from dsa_dispatch_order and was passed over: "
                f"got {shown(order)}, candidates {declared!r}"
            )
        elif proposed is not None:
            return Order(order, who, tuple(faults))
    return Order(declared, "", tuple(faults))


def observe(runtime: Runtime, snapshot: Snapshot, decision: Decision) -> None:
    """Tell every observer plugin of a new decision."""
    manager = snapshot.plugins
    for plugin in snapshot.observers():
        try:
            _hook_of(manager, plugin, "dsa_dispatch_on_decision")(decision=decision)
        except KeyboardInterrupt:
            raise
        except BaseException:
            name = snapshot.described(plugin)
            if runtime.first_time("observer", name):
                LOGGER.warning(
                    "plugin %s raised in dsa_dispatch_on_decision (said once)", name, exc_info=True
                )


def _hook_of(manager: pluggy.PluginManager, plugin: object, hook: str) -> Any:
    others = [other for other in manager.get_plugins() if other is not plugin]
    return manager.subset_hook_caller(hook, others)
