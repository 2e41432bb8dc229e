"""Activation checkpointing that leaves the selection alone: ``save_topk_policy()``."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dsa_dispatch._operations import library
from dsa_dispatch.errors import ConfigError
from dsa_dispatch.offload import WINDOW, unpack

SAVED: Final = frozenset({library.decide, library.indexer_topk})
"""The decision is saved with the ids, so that a replay runs the backends of the first pass."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def save_topk_policy(extra_ops: Iterable[torch._ops.OpOverload] = ()) -> Callable[[], Contexts]:
    """A ``context_fn`` for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.

    The replay in backward then runs neither the selection nor the decision again, which costs
    ``4 * index_topk`` bytes a row and layer; everything else is recomputed. ``extra_ops`` are saved too.
    Give the same policy to all layers, those that only share indices and those of multi-token prediction included.
    Without it a replay decides anew: there ``configure``, the environment and an explicit config hold, and a
    ``use_backend`` block that has ended does not.

    Inside ``offload_topk()`` what it saves waits in host memory. For reentrant checkpointing, which takes no
    ``context_fn``, see ``save_topk_reentrant``.

    The forward of a region in which none of the saved ops ran raises ``ConfigError``: such a policy saves nothing.
    Raises ``TypeError`` when an extra op is not a functional overload (``torch.ops.x.y.default``): a packet would match
    nothing, and what an op changes in place cannot be saved.
    """
    extra = frozenset(extra_ops)
    for op in extra:
        if not isinstance(op, torch._ops.OpOverload):
            raise TypeError(
                f"save_topk_policy: expected op overloads such as torch.ops.x.y.default, got {op!r}"
            )
        if any(argument.alias_info is not None for argument in op._schema.arguments):
            raise TypeError(
                f"save_topk_policy: {op} returns a view of its input or changes it; save another op"
            )
    return functools.partial(_contexts, SAVED | extra)


def save_topk_reentrant(function: Callable[..., Any]) -> Callable[..., Any]:
    """``save_topk_policy()`` for ``checkpoint(save_topk_reentrant(function), ..., use_reentrant=True)``.

    Wraps one call: its first run, without gradients, saves the ids, and every later one is a replay that takes them
    from there. So make a new wrapper for each call of ``checkpoint``. The first run knows of no gradient, so the replay
    decides anew, with a backward: keep a ``use_backend`` block around both.

    Raises ``ConfigError`` when a second call comes through the same wrapper, which would attend with the ids of the
    first, and when the first run has gradients, as under ``use_reentrant=False``.
    """
    keep, replay = _eager_contexts(frozenset({library.indexer_topk}))
    entered = False

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal entered
        # Reentrant checkpointing runs a first pass without gradients and a replay with them: nothing else tells the
        # replay of one call from the first pass of the next.
        replaying = torch.is_grad_enabled()
        if replaying and not entered:
            raise ConfigError(
                "save_topk_reentrant: the first run has gradients, so this is no reentrant checkpoint. Call "
                "checkpoint(save_topk_reentrant(function), ..., use_reentrant=True), or with use_reentrant=False pass "
                "context_fn=save_topk_policy()"
            )
        if entered and not replaying:
            raise ConfigError(
                "save_topk_reentrant: a second call through one wrapper, which holds the selection of the first. Make "
                "a wrapper for each call: checkpoint(save_topk_reentrant(function), ..., use_reentrant=True)"
            )
        entered = True
        with replay if replaying else keep:
            return function(*args, **kwargs)

    return run


def _contexts(saved: frozenset[Any]) -> Contexts:
    if _tracing():
        # The tracer marks nodes of its graph through torch's own modes; the partitioner saves what they mark.
        seen: set[Any] = set()
        forward, replay = create_selective_checkpoint_contexts(functools.partial(_policy, saved, seen))
        return _CheckedTrace(forward, seen), replay
    return _eager_contexts(saved)


def _tracing() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _policy(
    saved: frozenset[Any], seen: set[Any], context: Any, op: torch._ops.OpOverload, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if op not in saved:
        return CheckpointPolicy.PREFER_RECOMPUTE
    seen.add(op)
    return CheckpointPolicy.MUST_SAVE


def _check_matched(matched: bool) -> None:
    if not matched:
        raise ConfigError(
            "save_topk_policy: no selection or attention of this library ran in the checkpointed region, so the policy "
            "saves nothing. Checkpoint the function that calls them, or leave the policy out here"
        )


class _CheckedTrace(TorchDispatchMode):
    """Torch's caching mode with a check at the end. A mode only because ``checkpoint`` asks for one; never pushed."""

    def __init__(self, mode: Any, seen: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._mode = mode
        self._seen = seen

    @property
    def ac_graph_id(self) -> Any:
        """Set by the tracer, read by torch's mode."""
        return self._mode.ac_graph_id

    @ac_graph_id.setter
    def ac_graph_id(self, value: Any) -> None:
        self._mode.ac_graph_id = value

    def __enter__(self) -> Any:
        self._mode.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._mode.__exit__(kind, error, traceback)
        if kind is None:
            _check_matched(bool(self._seen))


def _eager_contexts(saved: frozenset[Any]) -> tuple[_Keep, _Replay]:
    kept: dict[Any, list[Any]] = defaultdict(list)
    return _Keep(saved, kept), _Replay(saved, kept)


class _Eager(TorchDispatchMode):
    """What the two modes of an eager region share: the saved results of every saved op, in the order of its calls."""

    supports_higher_order_operators = True

    def __init__(self, saved: frozenset[Any], kept: dict[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._saved = saved
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function in the region stays compiled: its opaque ops are seen here all the same."""
        return True


class _Keep(_Eager):
    """First pass. Not torch's caching mode, whose results no saved-tensor hook, and so no offload, can reach."""

    _matched = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._matched = self._matched or func in self._saved or func in SAVED
        if func in self._saved:
            window = WINDOW.get()
            pack = _as_it_is if window is None else window.pack
            self._kept[func].append(tree_map(lambda x: _Saved(x, pack) if isinstance(x, Tensor) else x, out))
        return out

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]  # untyped in torch
        if kind is None:
            _check_matched(self._matched)


class _Replay(_Eager):
    """Recomputation: a saved op returns what it returned at its call of the same number."""

    def __enter__(self) -> Any:
        # Counted anew at every entry: with retain_graph a region is recomputed more than once.
        self._calls: dict[Any, int] = defaultdict(int)
        return super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._saved:
            return func(*args, **(kwargs or {}))
        number = self._calls[func]
        self._calls[func] += 1
        if number >= len(self._kept[func]):
            raise RuntimeError(
                f"save_topk_policy: the replay calls {func} more often than the first pass did; the checkpointed "
                f"function must make the same calls both times"
            )
        return tree_map(lambda x: x.read() if isinstance(x, _Saved) else x, self._kept[func][number])


class _Saved:
    """One result of a saved op, kept or offloaded."""

    __slots__ = ("_packed", "_version")

    def __init__(self, result: Tensor, pack: Callable[[Tensor], Any]) -> None:
        self._packed = pack(_detached(result))
        self._version = result._version

    def read(self) -> Tensor:
        tensor = unpack(self._packed)
        if tensor is self._packed and tensor._version != self._version:
            raise RuntimeError(
                "save_topk_policy: a saved selection was changed in place after the first pass; change a copy of it"
            )
        return _detached(tensor)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _detached(tensor: Tensor) -> Tensor:
    """A new tensor over the same memory: autograd attaches the region's graph to what an op returns.

    Below autograd ``detach`` forgets the version counter unless this key is put back, and changes would go unseen.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
