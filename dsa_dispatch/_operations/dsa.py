"""``run_fused_dsa_attention``: selection, optional loss, attention and value up-projection in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsa_dispatch._contract import accumulation_dtype
from dsa_dispatch._execution.memory import MemoryPlan
from dsa_dispatch._operations import library
from dsa_dispatch._operations import validate as check
from dsa_dispatch._operations.attention import decide_attention
from dsa_dispatch._operations.budget import memories_of_attention, naming_what_does
from dsa_dispatch._operations.indexer import check_selection, decide_selection, decide_with_loss
from dsa_dispatch.errors import InvalidInputError

OPERATION = "run_fused_dsa_attention"
NAMES = check.IndexerNames(
    "q_indexer", "k_indexer", "indexer_weights", "indexer_topk", "varlen_starts", "varlen_ends"
)


def run_fused_dsa_attention(
    *,
    config: object,
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    up_v_weight: Tensor | None,
    q_indexer: Tensor,
    k_indexer: Tensor,
    indexer_weights: Tensor,
    indexer_topk: int,
    softmax_scale: float,
    loss_coeff: float = 0.0,
    sparse_loss: bool = True,
    calculate_per_token_loss: bool = False,
    absorbed_mla: bool = True,
    cp_size: int = 1,
    attn_mask_type: Any = "causal",
    packed_seq_params: object = None,
    varlen_starts: Tensor | None = None,
    varlen_ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    query_valid_rows: Tensor | None = None,
    varlen_is_plain_causal: bool = False,
    use_relu: bool = True,
    use_local_indexer_varlen: bool = False,
    single_packed_thd_sequence: bool = False,
    local_packed_cp_rank: int = 0,
    local_packed_cp_query_start: int = 0,
    local_packed_cp_query_len: int | None = None,
    pg_collection: Any = None,
) -> tuple[Tensor, Tensor]:
    """Select keys, attend to them, project the values up, and (``loss_coeff > 0``) train the indexer.

    ``query [sq, b, h, dqk]``, ``key [sk, b, 1, dqk]`` absorbed; ``up_v_weight [h, vh, dv]`` maps the latent value of
    ``dv`` channels to ``vh`` per head. ``q_indexer``, ``k_indexer``, ``indexer_weights``, ``varlen_starts`` and
    ``varlen_ends`` as ``q``, ``k``, ``weights``, ``starts`` and ``ends`` of ``run_fused_qk_topk``.
    ``attn_mask_type=None`` says that an additive mask exists; like explicit ``value`` and ``key_positions`` it is a
    legal call that no backend serves yet, hence ``NoBackendError``: never computed without it.

    Returns ``out [sq, b, h * vh]`` and the loss (0-d; 0 when ``loss_coeff`` is 0). ``out`` is differentiable with
    respect
    to query, key and up_v_weight, the loss with respect to the indexer's inputs. Errors as in ``run_fused_qk_topk``.
    """
    # Everything is checked before anything is decided, or a bad argument would read as a missing backend.
    check.check_tensors(
        {
            "query": query,
            "key": key,
            "value": value,
            "up_v_weight": up_v_weight,
            NAMES.q: q_indexer,
            "key_positions": key_positions,
        },
        optional=("value", "up_v_weight", "key_positions"),
    )
    topk = check_selection(
        q_indexer,
        k_indexer,
        indexer_weights,
        indexer_topk,
        varlen_starts,
        varlen_ends,
        None,
        packed_seq_params,
        cp_size,
        NAMES,
    )
    check.check_teacher(q_indexer, k_indexer, query, key, NAMES)
    extras = _extras(value, key_positions, attn_mask_type, absorbed_mla)
    if not extras:
        _check_up_projection(query, key, up_v_weight)
    coefficient = check.check_coefficient(loss_coeff)
    if coefficient > 0:
        check.check_single_rank(pg_collection)
    scale = check.check_scale(softmax_scale)
    valid = check.check_valid_rows(q_indexer, query_valid_rows)
    if varlen_is_plain_causal and query.shape[0] == key.shape[0]:
        # Said by construction, so the bounds need not be compared on the device; backends get their causal form.
        varlen_starts = varlen_ends = None
    # All decisions before anything runs: a missing backend is reported without side effects.
    attend = _decide_attention(config, query, key, up_v_weight, topk, extras)
    assert up_v_weight is not None
    v_channels = up_v_weight.shape[2]

    def attention() -> tuple[MemoryPlan, ...]:
        return memories_of_attention(attend, query, key, topk, v_channels)

    if coefficient > 0:
        both = decide_with_loss(
            OPERATION,
            config,
            q_indexer,
            k_indexer,
            indexer_weights,
            topk,
            varlen_starts,
            varlen_ends,
            None,
            query,
            key,
            scale,
            coefficient,
            valid=valid,
            per_token=calculate_per_token_loss,
            use_relu=use_relu,
            packed_seq_params=packed_seq_params,
            cp_size=cp_size,
            sparse_loss=sparse_loss,
            extras=extras,
        )

        def with_loss() -> tuple[Tensor, Tensor]:
            indices, length = both.select()
            # Before the loss, whose teacher is this attention: its lse saves the target a pass over the keys.
            out, lse = library.attention_forward(query, key, indices, length, scale, v_channels, attend)
            return out, both.loss(indices, length, lse)

        out, loss = naming_what_does(with_loss, lambda: (*both.memories(), *attention()))
    else:
        selection = decide_selection(
            OPERATION,
            config,
            q_indexer,
            k_indexer,
            indexer_weights,
            topk,
            varlen_starts,
            varlen_ends,
            None,
            use_relu=use_relu,
            packed_seq_params=packed_seq_params,
            cp_size=cp_size,
            extras=extras,
        )

        def without_loss() -> tuple[Tensor, Tensor]:
            indices, length = selection.run()
            loss = query.new_zeros((), dtype=accumulation_dtype(query.dtype))
            out, _ = library.attention_forward(query, key, indices, length, scale, v_channels, attend)
            return out, loss

        out, loss = naming_what_does(without_loss, lambda: (selection.memory(), *attention()))
    return _project_up(out, up_v_weight), loss


def _extras(
    value: Tensor | None, key_positions: Tensor | None, attn_mask_type: Any, absorbed_mla: bool
) -> str:
    name = getattr(attn_mask_type, "name", attn_mask_type)
    present = (
        ("explicit_values", value is not None or not absorbed_mla),
        ("key_positions", key_positions is not None),
        ("mask", name not in ("causal", "padding_causal")),
    )
    return ",".join(extra for extra, asked in present if asked)


def _check_up_projection(query: Tensor, key: Tensor, up_v_weight: Tensor | None) -> None:
    if up_v_weight is None:
        raise InvalidInputError(
            "up_v_weight: got None; the absorbed layout needs the value up-projection [h, vh, dv]. For the latent "
            "output call run_fused_qk_topk and run_fused_absorbed_sparse_attention"
        )
    check.check_rank("up_v_weight", up_v_weight, "[h, vh, dv]")
    check.check_floating({"up_v_weight": up_v_weight})
    check.check_sizes("up_v_weight", up_v_weight, "[h, vh, dv]", (query.shape[2], None, None), "as in query")
    check.check_positive("up_v_weight", up_v_weight, {1: "value channels", 2: "latent channels"})
    check.check_absorbed(query, key, up_v_weight.shape[2])


def _decide_attention(
    config: object, query: Tensor, key: Tensor, up_v_weight: Tensor | None, topk: int, extras: str
) -> Tensor:
    """Decided before the ids exist: a tensor of their shape and dtype without their memory stands for them."""
    rows, batch = query.shape[:2]
    ids = query.new_empty((1, 1, 1), dtype=torch.int32).expand(batch, rows, topk)
    v_channels = query.shape[3] if up_v_weight is None else up_v_weight.shape[2]
    return decide_attention(OPERATION, config, query, key, ids, v_channels, extras)


def _project_up(out: Tensor, up_v_weight: Tensor) -> Tensor:
    """``[sq, b, h, dv] x [h, vh, dv] -> [sq, b, h * vh]`` in query's dtype, whatever autocast says."""
    projected: Tensor = library.project_up(out, up_v_weight.to(out.dtype))
    return projected
