"""Calls through the public operations: a declared value is run, on this backend, and gives the exact answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dsa_dispatch as dsa
from dsa_dispatch._backend import BackendSpec
from dsa_dispatch._call import CallSpec
from dsa_dispatch._dispatch.check import declines
from dsa_dispatch._dispatch.device import device_info
from dsa_dispatch._stages import BACKWARD_STAGES, Stage
from dsa_dispatch.errors import NoBackendError
from dsa_dispatch.testing import formulas
from dsa_dispatch.testing.cases import Accepted, Declined
from dsa_dispatch.testing.judge import ConformanceError, DeclinedHere, compare
from dsa_dispatch.testing.operands import Ids, exact_results, scale_for
from dsa_dispatch.testing.ran import assert_backend_ran
from dsa_dispatch.testing.rounding import allowances
from dsa_dispatch.testing.selection import Scores, check_close, check_form


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of one operation in the caller's layout."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    w: Tensor | None
    indices: Tensor
    length: Tensor
    starts: Tensor | None
    ends: Tensor | None


def check_accepted(spec: BackendSpec, stage: Stage, case: Accepted, device: torch.device) -> None:
    """Raise unless the declared data accept the call and, where it can be run here, the answer is right.

    Raises ``DeclinedHere`` where the backend has a reason of its own: an ``extra_check``, or one found at run time.
    """
    capability = spec.stages[stage].capability
    refused = declines(capability, stage, case.call, device_info(device))
    if refused:
        reasons = "; ".join(str(decline) for decline in refused)
        fields = dataclasses.replace(capability, extra_check=None)
        if not declines(fields, stage, case.call, device_info(device)):
            raise DeclinedHere(f"{case.label} is declared, declined: {reasons}")
        raise ConformanceError(f"{case.label} is declared, but declined: {reasons}")
    if not case.runs:
        return
    claim = f"{case.label} is declared, but"
    strict = dsa.use_backend({stage: spec.name}, fallback="error", deterministic=case.call.deterministic)
    try:
        with strict, assert_backend_ran(spec.name, stage):
            try:
                _RUN[stage](spec, stage, case.call, device)
            except ConformanceError as error:
                raise ConformanceError(f"{claim} the answer is wrong: {error}") from error
            except NoBackendError as error:
                own = _reasons(error, spec, stage)
                if own:
                    raise DeclinedHere(f"{case.label} is declared, declined: {own}") from None
                raise ConformanceError(f"{claim} was not served: {error}") from None
            except Exception as error:
                raise ConformanceError(f"{claim} the call raised {type(error).__name__}: {error}") from error
    except (ConformanceError, DeclinedHere):
        raise
    except AssertionError as error:
        raise ConformanceError(f"{claim} did not run here: {error}") from error


def check_some_accepted(
    spec: BackendSpec, stage: Stage, cases: Sequence[Accepted], device: torch.device
) -> None:
    """``check_accepted`` for the first case; where the backend declines it, some other one must be served instead.

    Raises ``ConformanceError`` when nothing ran: a backend that declines all it declares has shown nothing.
    """
    try:
        check_accepted(spec, stage, cases[0], device)
    except DeclinedHere as declined:
        if any(_is_served(spec, stage, case, device) for case in cases[1:]):
            raise
        raise ConformanceError(
            f"{cases[0].label} is declared, but was not served, nor was any other declared call, so that nothing ran "
            f"here: {declined}"
        ) from None


def _is_served(spec: BackendSpec, stage: Stage, case: Accepted, device: torch.device) -> bool:
    """A wrong answer is an answer here; it is the business of that case's own check."""
    try:
        check_accepted(spec, stage, case, device)
    except DeclinedHere:
        return False
    except ConformanceError:
        return True
    return case.runs


def _reasons(error: NoBackendError, spec: BackendSpec, stage: Stage) -> str:
    """Why this backend was not chosen; "" where something else is missing."""
    return "; ".join(
        str(reason)
        for entry in error.decision.stages
        if entry.stage == stage
        for candidate in entry.declined()
        if candidate.backend == spec.name
        for reason in candidate.declines
    )


def check_declined(spec: BackendSpec, stage: Stage, case: Declined) -> None:
    """Raise unless the call is declined with the expected code, and for that reason alone the base is not."""
    found = declines(spec.stages[stage].capability, stage, case.call, case.device)
    if case.code not in [decline.code for decline in found]:
        reasons = "; ".join(str(decline) for decline in found) or "nothing"
        raise ConformanceError(
            f"{case.label} is not declared and must be declined with {case.code}, but found: {reasons}"
        )
    decision = dsa.explain(
        case.call.operation,
        {"dsa_kernel_backend": {stage: spec.name}, "dsa_kernel_fallback": "error"},
        call=case.call,
        device=case.device,
    )
    outcome = next((entry for entry in decision.stages if entry.stage == stage), None)
    if outcome is not None and outcome.chosen is not None and outcome.chosen.backend == spec.name:
        raise ConformanceError(f"{case.label} is not declared, but dispatch chose {spec.name}")


def _draw(call: CallSpec, device: torch.device, dtype: str, *shape: int, seed: int) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, kind)


def _indices(call: CallSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Distinct keys with a hole in every other row, and a last row without a key."""
    generator = torch.Generator().manual_seed(3)
    indices = torch.full((call.batch, call.rows, call.width), -1)
    count = min(call.width, call.keys)
    for item in range(call.batch):
        for row in range(call.rows):
            indices[item, row, :count] = torch.randperm(call.keys, generator=generator)[:count]
    indices[:, ::2, :1] = -1
    length = torch.full((call.batch, call.rows), count, dtype=torch.int32)
    if call.rows > 1:
        length[:, -1] = 0
    kind: torch.dtype = getattr(torch, call.index_dtype)
    return indices.to(device, kind), length.to(device)


def _inputs(call: CallSpec, device: torch.device, grouped: bool) -> Inputs:
    heads = call.kv_heads if grouped else 1
    indices, length = _indices(call, device)
    q = _draw(call, device, call.dtype, call.rows, call.batch, call.heads, call.qk_channels, seed=1)
    k = _draw(call, device, call.dtype, call.keys, call.batch, heads, call.qk_channels, seed=2)
    v = None
    if grouped:
        v = _draw(call, device, call.dtype, call.keys, call.batch, heads, call.v_channels, seed=4)
    return Inputs(q, k, v, None, indices, length, None, None)


def _flat(tensor: Tensor) -> Tensor:
    """``[n, b, ...] -> [b * n, ...]``."""
    return tensor.transpose(0, 1).flatten(0, 1)


def _global(indices: Tensor, length: Tensor, keys: int) -> Tensor:
    batch, rows, _ = indices.shape
    local = Ids(indices.cpu().long().flatten(0, 1), length.cpu().flatten()).named(keys)
    offset = torch.arange(batch * rows)[:, None] // rows * keys
    return torch.where(local >= 0, local + offset, -1)


def _run_attention(spec: BackendSpec, stage: Stage, call: CallSpec, device: torch.device) -> None:
    """Forward and gradients. Where the backend has no backward, the default one must fit what its forward gave."""
    grouped = stage.startswith("gqa")
    inputs = _inputs(call, device, grouped)
    scale = scale_for(call.qk_channels)
    named = {"query": inputs.q, "key": inputs.k, "value": inputs.v}
    needed = call.needs_grad if stage in BACKWARD_STAGES else frozenset({"query", "key", "value"})
    for name, tensor in named.items():
        if tensor is not None:
            tensor.requires_grad_(name in needed)
    if grouped:
        assert inputs.v is not None
        out, lse = dsa.run_fused_gqa_sparse_attention(
            None, inputs.q, inputs.k, inputs.v, inputs.indices, scale, inputs.length, return_lse=True
        )
    else:
        out, lse = dsa.run_fused_absorbed_sparse_attention(
            None, inputs.q, inputs.k, inputs.indices, scale, call.v_channels, inputs.length, return_lse=True
        )
    dout = _draw(call, device, call.dtype, *out.shape, seed=5)
    wanted_inputs = [tensor for tensor in named.values() if tensor is not None and tensor.requires_grad]
    gradients = torch.autograd.grad(out, wanted_inputs, dout)
    plain = {
        "q": _flat(inputs.q),
        "k": _flat(inputs.k) if grouped else _flat(inputs.k)[:, 0],
        "dout": _flat(dout),
    }
    if inputs.v is not None:
        plain["v"] = _flat(inputs.v)
    ids = _global(inputs.indices, inputs.length, call.keys)
    host = {"scale": scale, "v_channels": call.v_channels}
    forward: Stage = "gqa_forward" if grouped else "attention_forward"
    backward: Stage = "gqa_backward" if grouped else "attention_backward"
    wanted = exact_results(forward, plain, ids, host)
    got = {"out": _flat(out), "lse": lse.flatten(0, 1)}
    compare(f"{call.operation}", got, wanted, call.dtype)
    exact = exact_results(backward, plain, ids, host)
    key_name = "dk" if grouped else "dkv"
    names = [
        {"query": "dq", "key": key_name, "value": "dv"}[name]
        for name, tensor in named.items()
        if tensor is not None and tensor.requires_grad
    ]
    found = dict(zip(names, map(_flat, gradients), strict=True))
    if not grouped and key_name in found:
        found[key_name] = found[key_name][:, 0]
    declared = spec.stages[stage].capability.gradient_error
    wanted = {name: exact[name] for name in names}
    given = {**plain, **got}
    compare(
        f"gradients of {call.operation}",
        found,
        wanted,
        call.dtype,
        gradient_error=declared,
        allowances=partial(allowances, backward, given, ids, host, call.dtype),
    )


def _indexer_inputs(call: CallSpec, device: torch.device) -> Inputs:
    q = _draw(call, device, call.dtype, call.rows, call.batch, call.index_heads, call.index_channels, seed=1)
    k = _draw(call, device, call.dtype, call.keys, call.batch, call.index_channels, seed=2)
    w = _draw(call, device, call.weights_dtype, call.rows, call.batch, call.index_heads, seed=3)
    starts = ends = None
    if call.bounds == "ranges" or call.layout == "thd" or call.context_parallel != "none":
        generator = torch.Generator().manual_seed(7)
        starts = torch.randint(0, max(call.keys // 3, 1), (call.rows,), generator=generator)
        ends = call.keys - torch.randint(0, max(call.keys // 3, 1), (call.rows,), generator=generator)
        starts, ends = starts.to(device, torch.int32), ends.to(device, torch.int32)
    empty = torch.empty(0, device=device)
    return Inputs(q, k, None, w, empty, empty, starts, ends)


def _allowed(call: CallSpec, inputs: Inputs) -> Tensor:
    """``[b * sq, b * sk]`` bool over global keys."""
    columns = torch.arange(call.keys)
    row = torch.arange(call.rows)
    first, last = torch.zeros_like(row), call.keys - call.rows + row + 1
    if inputs.starts is not None and inputs.ends is not None:
        first, last = inputs.starts.cpu(), inputs.ends.cpu()
    one = (columns >= first[:, None]) & (columns < last[:, None])
    allowed = torch.zeros(call.batch, call.rows, call.batch, call.keys, dtype=torch.bool)
    for item in range(call.batch):
        allowed[item, :, item] = one
    return allowed.flatten(0, 1).flatten(1)


def _packing(call: CallSpec) -> dict[str, Any]:
    return {
        "packed_seq_params": object() if call.layout == "thd" else None,
        "cp_size": 1 if call.context_parallel == "none" else 2,
    }


def _run_topk(spec: BackendSpec, stage: Stage, call: CallSpec, device: torch.device) -> None:
    inputs = _indexer_inputs(call, device)
    assert inputs.w is not None
    selected = dsa.run_fused_qk_topk(
        None,
        inputs.q,
        inputs.k,
        inputs.w,
        call.width,
        inputs.starts,
        inputs.ends,
        use_relu=call.use_relu,
        **_packing(call),
    )
    q, k, w = (_flat(tensor).detach().to("cpu", torch.float64) for tensor in (inputs.q, inputs.k, inputs.w))
    allowed = _allowed(call, inputs)
    ids = torch.where(allowed, torch.arange(len(k)), -1)
    score = formulas.index_scores(q, k, w, ids, call.use_relu).masked_fill(~allowed, -torch.inf)
    bound = formulas.index_score_bound(q, k, w, ids).amax(1)
    slack = 2 * spec.stages[stage].capability.score_error * bound + 1e-12 * bound
    local = selected.indices.flatten(0, 1).cpu()
    offset = (torch.arange(len(local))[:, None] // call.rows * call.keys).to(torch.int32)
    indices = torch.where(local >= 0, local + offset, -1)
    chosen = check_form(call.operation, indices, selected.length.flatten().cpu(), allowed, call.width)
    check_close(call.operation, chosen, Scores(score, allowed, slack))


def _run_loss(spec: BackendSpec, stage: Stage, call: CallSpec, device: torch.device) -> None:
    inputs = _indexer_inputs(call, device)
    assert inputs.w is not None
    indexer = {"dq": inputs.q, "dk": inputs.k, "dw": inputs.w}
    for tensor in indexer.values():
        tensor.requires_grad_()
    query = _draw(call, device, call.dtype, call.rows, call.batch, call.heads, call.qk_channels, seed=5)
    key = _draw(call, device, call.dtype, call.keys, call.batch, 1, call.qk_channels, seed=6)
    scale = scale_for(call.qk_channels)
    result = dsa.run_fused_qk_topk_with_loss(
        None,
        inputs.q,
        inputs.k,
        inputs.w,
        call.width,
        inputs.starts,
        inputs.ends,
        None,
        query,
        key,
        scale,
        1.0,
        calculate_per_token_loss=True,
        use_relu=call.use_relu,
        sparse_loss=call.sparse_loss,
        **_packing(call),
    )
    gradients = torch.autograd.grad(result.loss, list(indexer.values()))
    allowed = _allowed(call, inputs)
    ids = torch.where(allowed, torch.arange(allowed.shape[1]), -1)
    if call.sparse_loss:
        ids = _global(result.indices, result.length, call.keys)
    plain = {"q": _flat(query), "k": _flat(key)[:, 0]}
    host = {"scale": scale, "use_relu": call.use_relu}
    mass = exact_results("indexer_target", plain, ids, host)["mass"]
    plain = {"q": _flat(inputs.q), "k": _flat(inputs.k), "w": _flat(inputs.w), "mass": mass}
    wanted = exact_results("indexer_loss", plain, ids, host)
    got = {"loss": result.loss, **dict(zip(indexer, map(_flat, gradients), strict=True))}
    expected = {"loss": wanted["kl"].sum(), **{name: wanted[name] for name in indexer}}
    declared = spec.stages[stage].capability.gradient_error
    compare(call.operation, got, expected, _coarsest(call), gradient_error=declared)


def _coarsest(call: CallSpec) -> str:
    """A gradient is rounded to its input's type, and the weights may be coarser than q."""
    order = ("bfloat16", "float16", "float32", "float64")
    return min((call.dtype, call.weights_dtype), key=order.index)


_RUN = {
    "indexer_topk": _run_topk,
    "indexer_target": _run_loss,
    "indexer_loss": _run_loss,
    "attention_forward": _run_attention,
    "attention_backward": _run_attention,
    "gqa_forward": _run_attention,
    "gqa_backward": _run_attention,
}
