"""Bad input is found here, before any backend is asked, and whatever the backend."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsa_dispatch.errors import InvalidInputError

INT_TYPES: Final = (torch.int32, torch.int64)
FLOAT_TYPES: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_KEYS: Final = 2**31 - 1
MAX_SCALE: Final = torch.finfo(torch.float32).max
"""Scales are applied in fp32 where the inputs are not fp64."""


@dataclass(frozen=True, slots=True)
class IndexerNames:
    """What the operation calls the indexer's arguments: a message names what the caller wrote."""

    q: str = "q"
    k: str = "k"
    weights: str = "weights"
    topk: str = "index_topk"
    starts: str = "starts"
    ends: str = "ends"


PLAIN_NAMES: Final = IndexerNames()


def shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def check_tensors(tensors: Mapping[str, object], optional: Collection[str] = ()) -> None:
    """Plain strided tensors of one device; None only for the names in ``optional``."""
    device: torch.device | None = None
    first = ""
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidInputError(f"{name}: expected a torch.Tensor, got {_kind(tensor)}")
        if not torch.compiler.is_compiling():
            _check_plain(name, tensor)
        if device is None:
            device, first = tensor.device, name
        elif tensor.device != device:
            raise InvalidInputError(
                f"{name} is on {tensor.device}, but {first} is on {device}: all tensors of a call must be on one device"
            )


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _check_plain(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise InvalidInputError(f"{name}: got a {layout} tensor, supports strided ones (tensor.to_dense())")
    if torch._C._functorch.is_batchedtensor(tensor):
        raise InvalidInputError(
            f"{name} is batched by vmap, which these operations do not support: pass the batch as the second dimension"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise InvalidInputError(
            f"{name} is traced by torch.func (grad, vjp, jvp, jacfwd), which these operations do not support: "
            f"use torch.autograd.grad"
        )
    if _has_tangent(tensor):
        raise InvalidInputError(
            f"{name} carries a forward-mode tangent, and these operations have no forward-mode derivative: use "
            f"torch.autograd.grad, or detach the input"
        )
    if type(tensor).__module__.startswith("torch.distributed.tensor"):
        raise InvalidInputError(
            f"{name} is a DTensor, which these operations do not support: pass local tensors (tensor.to_local())"
        )


def _has_tangent(tensor: Tensor) -> bool:
    # Asking outside a dual level raises; inside one, an op without a formula would silently give a zero derivative.
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # untyped in torch


def check_floating(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOAT_TYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_TYPES)
            raise InvalidInputError(f"{name}: got dtype {tensor.dtype}, supports {known}")


def check_same_dtype(first: str, a: Tensor, second: str, b: Tensor) -> None:
    if a.dtype != b.dtype:
        raise InvalidInputError(
            f"{first} is {a.dtype} and {second} is {b.dtype}: they must have the same dtype; cast one of them"
        )


def check_rank(name: str, tensor: Tensor, dims: str) -> None:
    """``dims`` such as ``"[sq, b, h, d]"``."""
    wanted = dims.count(",") + 1
    if tensor.dim() != wanted:
        hint = ""
        if tensor.dim() == wanted - 1:
            axis = 0 if dims.startswith("[b") else 1
            hint = f". A tensor without a batch dimension gets one with {name}.unsqueeze({axis})"
        raise InvalidInputError(
            f"{name}: expected {wanted} dimensions {dims}, got shape {shape(tensor)}{hint}"
        )


def check_sizes(name: str, tensor: Tensor, dims: str, wanted: Sequence[int | None], why: str) -> None:
    """Sizes that follow from other arguments; None is free."""
    for axis, size in enumerate(wanted):
        if size is not None and tensor.shape[axis] != size:
            raise InvalidInputError(
                f"{name}: expected {dims} with size {size} in dimension {axis} ({why}), got shape {shape(tensor)}"
            )


def check_positive(name: str, tensor: Tensor, axes: Mapping[int, str]) -> None:
    for axis, meaning in axes.items():
        if tensor.shape[axis] < 1:
            raise InvalidInputError(f"{name}: needs at least one of {meaning}, got shape {shape(tensor)}")


def check_key_count(batch: int, keys: int) -> None:
    if batch * keys > MAX_KEYS:
        raise InvalidInputError(
            f"batch × keys is {batch * keys}, supports up to {MAX_KEYS}: key ids are int32"
        )


def check_integer(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in INT_TYPES:
        raise InvalidInputError(f"{name}: got dtype {tensor.dtype}, supports int32 and int64")


def check_scale(value: Any, name: str = "softmax_scale") -> float:
    """A scale is always explicit: derived from a padded or absorbed width it would be wrong."""
    if isinstance(value, Tensor):
        raise InvalidInputError(f"{name}: got a tensor, expected a Python float; use float(scale)")
    if value is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidInputError(
            f"{name}: got {value!r}, expected a positive float such as (qk_nope + qk_rope) ** -0.5; it is never "
            f"derived from the width of the tensors"
        )
    if not 0 < value <= MAX_SCALE:
        raise InvalidInputError(
            f"{name}: got {value!r}, expected a finite positive float, at most {MAX_SCALE:.3g}"
        )
    return float(value)


def check_count(name: str, value: Any, minimum: int = 1) -> int:
    """An int in ``[minimum, 2**31 - 1]``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise InvalidInputError(f"{name}: got {value!r}, expected an int of at least {minimum}")
    if value < minimum:
        raise InvalidInputError(f"{name}: got {value}, expected at least {minimum}")
    if value > MAX_KEYS:
        raise InvalidInputError(f"{name}: got {value}, supports up to {MAX_KEYS}: key ids are int32")
    return value  # type: ignore[return-value]  # a SymInt stands for an int while tracing


def check_coefficient(value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_SCALE:
        raise InvalidInputError(
            f"loss_coeff: got {value!r}, expected a finite float of at least 0, at most {MAX_SCALE:.3g}"
        )
    return float(value)


def check_single_rank(pg_collection: Any) -> None:
    """A tensor-parallel group of several ranks would need a reduction between target and loss: refused, not ignored."""
    group = getattr(pg_collection, "tp", None)
    size = group.size() if group is not None else 1
    if size > 1:
        raise InvalidInputError(
            f"pg_collection.tp: got a tensor-parallel group of {size} ranks; the indexer loss is computed on one rank "
            f"in this version. Pass no group, or compute the loss where all heads are local"
        )


def check_indexer(q: Tensor, k: Tensor, weights: Tensor, names: IndexerNames = PLAIN_NAMES) -> None:
    """``q [sq, b, hi, di]``, ``k [sk, b, di]``, ``weights [sq, b, hi]``."""
    named = {names.q: q, names.k: k, names.weights: weights}
    check_tensors(named)
    check_rank(names.q, q, "[sq, b, hi, di]")
    check_rank(names.k, k, "[sk, b, di]")
    check_rank(names.weights, weights, "[sq, b, hi]")
    check_floating(named)
    check_same_dtype(names.q, q, names.k, k)
    rows, batch, heads, channels = q.shape
    check_positive(names.q, q, {2: "index heads", 3: "index channels"})
    check_sizes(names.k, k, "[sk, b, di]", (None, batch, channels), f"as in {names.q}")
    check_sizes(names.weights, weights, "[sq, b, hi]", (rows, batch, heads), f"as in {names.q}")
    check_key_count(batch, k.shape[0])


def check_bounds(
    q: Tensor, starts: Tensor | None, ends: Tensor | None, names: IndexerNames = PLAIN_NAMES
) -> None:
    if starts is None and ends is None:
        return
    if starts is None or ends is None:
        missing, given = (names.starts, names.ends) if starts is None else (names.ends, names.starts)
        raise InvalidInputError(
            f"{given} is given and {missing} is None: give both, or neither (causal, aligned to the bottom right)"
        )
    rows, batch = q.shape[:2]
    check_tensors({names.q: q, names.starts: starts, names.ends: ends})
    for name, bound in ((names.starts, starts), (names.ends, ends)):
        check_integer(name, bound)
        if bound.dim() not in (1, 2):
            raise InvalidInputError(f"{name}: expected [sq] or [b, sq], got shape {shape(bound)}")
        wanted = (rows,) if bound.dim() == 1 else (batch, rows)
        check_sizes(name, bound, "[sq] or [b, sq]", wanted, f"as in {names.q}")


def check_packing(
    packed_seq_params: object, cp_size: int, starts: Tensor | None, names: IndexerNames = PLAIN_NAMES
) -> None:
    """Only bounds say which keys a packed or context-parallel row may see; without them the call has no meaning."""
    check_count("cp_size", cp_size)
    if starts is None and (packed_seq_params is not None or cp_size > 1):
        cause = "packed_seq_params" if packed_seq_params is not None else f"cp_size={cp_size}"
        raise InvalidInputError(
            f"{cause} needs {names.starts} and {names.ends}: they alone decide which keys a row may choose "
            f"(int32 or int64, [sq] or [b, sq])"
        )


def check_indices(query: Tensor, indices: Tensor, length: Tensor | None, name: str = "topk_indices") -> None:
    """``indices [b, sq, W]`` and ``topk_length [b, sq]``."""
    rows, batch = query.shape[:2]
    check_integer(name, indices)
    check_rank(name, indices, "[b, sq, W]")
    check_sizes(name, indices, "[b, sq, W]", (batch, rows, None), "as in query")
    if length is not None:
        check_integer("topk_length", length)
        check_rank("topk_length", length, "[b, sq]")
        check_sizes("topk_length", length, "[b, sq]", (batch, rows), "as in query")


def check_absorbed(query: Tensor, key: Tensor, v_channels: Any) -> int:
    """``query [sq, b, h, dqk]``, ``key [sk, b, 1, dqk]``; returns ``v_channels``."""
    check_rank("query", query, "[sq, b, h, dqk]")
    check_rank("key", key, "[sk, b, 1, dqk]")
    check_floating({"query": query, "key": key})
    check_same_dtype("query", query, "key", key)
    check_positive("query", query, {2: "heads", 3: "channels"})
    batch, channels = query.shape[1], query.shape[3]
    check_sizes("key", key, "[sk, b, 1, dqk]", (None, batch, 1, channels), "as in query, one shared head")
    check_key_count(batch, key.shape[0])
    width = check_count("v_channels", v_channels)
    if width > channels:
        raise InvalidInputError(
            f"v_channels: got {width}, supports up to the {channels} channels of the key, whose prefix is the value"
        )
    return width


def check_grouped(query: Tensor, key: Tensor, value: Tensor) -> None:
    """``query [sq, b, hq, d]``, ``key [sk, b, hkv, d]``, ``value [sk, b, hkv, dv]``."""
    check_rank("query", query, "[sq, b, hq, d]")
    check_rank("key", key, "[sk, b, hkv, d]")
    check_rank("value", value, "[sk, b, hkv, dv]")
    check_floating({"query": query, "key": key, "value": value})
    check_same_dtype("query", query, "key", key)
    check_same_dtype("query", query, "value", value)
    check_positive("query", query, {2: "heads", 3: "channels"})
    check_positive("key", key, {2: "heads"})
    check_positive("value", value, {3: "channels"})
    keys, batch, kv_heads, _ = key.shape
    check_sizes("key", key, "[sk, b, hkv, d]", (None, query.shape[1], None, query.shape[3]), "as in query")
    check_sizes("value", value, "[sk, b, hkv, dv]", (keys, batch, kv_heads, None), "as in key")
    check_key_count(batch, keys)
    if query.shape[2] % kv_heads:
        raise InvalidInputError(
            f"query has {query.shape[2]} heads and key {kv_heads}: the first must be a multiple of the second"
        )


def check_teacher(
    q: Tensor, k: Tensor, query: Tensor, key: Tensor, names: IndexerNames = PLAIN_NAMES
) -> None:
    """The attention's ``query [sq, b, h, dqk]`` and ``key [sk, b, 1 or h, dqk]`` beside the indexer's q and k."""
    check_tensors({names.q: q, "query": query, "key": key})
    check_rank("query", query, "[sq, b, h, dqk]")
    check_rank("key", key, "[sk, b, 1, dqk]")
    check_floating({"query": query, "key": key})
    check_same_dtype("query", query, "key", key)
    check_positive("query", query, {2: "heads", 3: "channels"})
    rows, batch, keys = q.shape[0], q.shape[1], k.shape[0]
    check_sizes("query", query, "[sq, b, h, dqk]", (rows, batch, None, None), f"as in {names.q}")
    wanted = (keys, batch, None, query.shape[3])
    check_sizes("key", key, "[sk, b, 1, dqk]", wanted, f"as in {names.k} and query")
    if key.shape[2] not in (1, query.shape[2]):
        raise InvalidInputError(
            f"key: expected one shared head or the {query.shape[2]} heads of query, got shape {shape(key)}"
        )


def check_valid_rows(q: Tensor, valid: Tensor | None) -> Tensor | None:
    """``query_valid_rows`` as ``[b, sq]`` bool; given as ``[sq]``, ``[1, sq]`` or ``[b, sq]``."""
    if valid is None:
        return None
    check_tensors({"q": q, "query_valid_rows": valid})
    rows, batch = q.shape[:2]
    if valid.dtype != torch.bool:
        raise InvalidInputError(f"query_valid_rows: got dtype {valid.dtype}, supports bool")
    if (
        valid.dim() not in (1, 2)
        or valid.shape[-1] != rows
        or (valid.dim() == 2 and valid.shape[0] not in (1, batch))
    ):
        raise InvalidInputError(
            f"query_valid_rows: expected [sq], [1, sq] or [b, sq] with sq={rows}, b={batch}, got shape {shape(valid)}"
        )
    return valid.expand(batch, rows)
