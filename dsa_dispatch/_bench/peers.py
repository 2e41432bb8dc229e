"""Who is measured: registered backends through the public operations, and functions that a person names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsa_dispatch._bench.inputs import AttentionInputs, Inputs, LossInputs, TopKInputs
from dsa_dispatch._dispatch.statistics import stats
from dsa_dispatch._operations import library
from dsa_dispatch._operations.attention import run_fused_absorbed_sparse_attention
from dsa_dispatch._operations.indexer import link_to, request_of, run_fused_qk_topk
from dsa_dispatch._policy.config import DSAConfig, explicit_text
from dsa_dispatch._registry.faults import raised
from dsa_dispatch._stages import Stage
from dsa_dispatch.errors import ConfigError, NoBackendError

Call = Callable[[], object]


class SitsOut(Exception):
    """This peer does not serve this case; the text says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A name, and what makes a call without arguments from the inputs of a case.

    ``prepare`` raises ``SitsOut`` where the peer does not serve the case. ``backend`` and its ``stages`` are what must
    have run; None for a function that a person named.
    """

    name: str
    prepare: Callable[[Inputs], Call]
    backend: str | None = None
    stages: frozenset[Stage] = frozenset()


def backend_peer(name: str, stages: frozenset[Stage], missing: Mapping[Stage, str] | None = None) -> Peer:
    """A registered backend, pinned for those of its ``stages`` that the case measures; the others are ``auto``'s.

    ``missing``: stages that it provides and that cannot be used here, with the reason.
    """

    def prepare(inputs: Inputs) -> Call:
        mine = [stage for stage in inputs.case.stages if stage in stages]
        # The last stage is what a case is named after: cuDNN's loss with another's teacher counts, not the reverse.
        named = inputs.case.stages[-1]
        if named not in mine:
            raise SitsOut((missing or {}).get(named) or f"provides no {named}")
        config = DSAConfig(
            dsa_kernel_backend=dict.fromkeys(mine, name),
            dsa_kernel_fallback="error",
            deterministic=inputs.case.deterministic,
            memory_budget=inputs.case.memory_budget,
        )
        try:
            call = _operation(inputs, config)
            found = ran(call)
        except NoBackendError as error:
            raise SitsOut(_reasons(error, name)) from None
        for stage in mine:
            # A family stands for its members: where `cudnn` is named, `flashmla` may serve.
            if set(found.get(stage, ())) != {name}:
                raise SitsOut(f"{stage} ran on {', '.join(found.get(stage, ['nothing']))}")
        return call

    return Peer(name, prepare, name, stages)


def _reasons(error: NoBackendError, name: str) -> str:
    declines = (
        str(decline)
        for stage in error.decision.stages
        for candidate in stage.declined()
        if candidate.backend == name
        for decline in candidate.declines
    )
    return "; ".join(dict.fromkeys(declines)) or str(error)


def ran(call: Call) -> dict[Stage, list[str]]:
    """Run once; stage to the backends that ran in it."""
    before = stats().runs
    call()
    found: dict[Any, list[str]] = {}
    for key, count in stats().runs.items():
        if count > before.get(key, 0):
            found.setdefault(key[0], []).append(key[1])
    return found


def external_peer(text: str) -> Peer:
    """``NAME=module:function``. The function takes the inputs of a case and returns a call without arguments, or None
    where it does not serve the case. Raises ``ConfigError`` where there is no such function, or no import of it."""
    name, equals, target = text.partition("=")
    module, colon, function = target.partition(":")
    if not (name and equals and module and colon and function):
        raise ConfigError(f"--peer: got {text!r}, expected NAME=module:function")
    try:
        made: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--peer {text}: {error}. Is its folder on PYTHONPATH?") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever somebody else's module raises at import
        raise ConfigError(f"--peer {text}: the import of {module} raised {raised(error)}") from error
    if not callable(made):
        raise ConfigError(f"--peer {text}: {target} is a {type(made).__name__}, expected a function")

    def prepare(inputs: Inputs) -> Call:
        call: Call | None = made(inputs)
        if call is None:
            raise SitsOut("returned None for this case")
        if not callable(call):
            raise ConfigError(
                f"--peer {text}: returned a {type(call).__name__}, expected a call without arguments or None"
            )
        return call

    return Peer(name, prepare)


def _operation(inputs: Inputs, config: DSAConfig) -> Call:
    if isinstance(inputs, TopKInputs):
        return lambda: run_fused_qk_topk(config, inputs.q, inputs.k, inputs.weights, inputs.case.topk)
    if isinstance(inputs, LossInputs):
        return _loss(inputs, config)
    return (
        _backward(inputs, config) if inputs.case.stage == "attention_backward" else _forward(inputs, config)
    )


def _forward(inputs: AttentionInputs, config: DSAConfig) -> Call:
    case = inputs.case
    return lambda: run_fused_absorbed_sparse_attention(
        config, inputs.query, inputs.key, inputs.indices, case.scale, case.v_channels, return_lse=True
    )


def _backward(inputs: AttentionInputs, config: DSAConfig) -> Call:
    leaves = (inputs.query.detach().requires_grad_(), inputs.key.detach().requires_grad_())
    out = run_fused_absorbed_sparse_attention(
        config, *leaves, inputs.indices, inputs.case.scale, inputs.case.v_channels
    )
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


def _loss(inputs: LossInputs, config: DSAConfig) -> Call:
    """Teacher, loss and gradients of a given selection, and of an lse as ``run_fused_dsa_attention`` has it.

    A public operation would time its selection and its attention too.
    """
    case = inputs.case
    indexer = (inputs.indexer.q, inputs.indexer.k, inputs.indexer.weights)
    teacher = (inputs.attention.query, inputs.attention.key)
    request = request_of("loss", "run_fused_qk_topk_with_loss", case.topk, True, None, None, 1)
    policy = explicit_text(config)
    length = torch.full((1, case.rows), case.topk, dtype=torch.int32, device=teacher[0].device)
    lse = None
    if not case.finds_lse:
        _, lse = run_fused_absorbed_sparse_attention(
            None, *teacher, inputs.attention.indices, case.scale, case.v_channels, return_lse=True
        )

    def call() -> object:
        leaves = [tensor.detach().requires_grad_() for tensor in indexer]
        plan = library.decide([*indexer, *teacher], request, [True] * 3, policy)
        loss, *_ = library.indexer_loss(
            *leaves, *teacher, inputs.attention.indices, length, lse, None, None, None, case.scale, 1.0, False, True,
            True, True, True, None, link_to(*leaves), plan,
        )  # fmt: skip
        return torch.autograd.grad(loss, leaves)

    return call
