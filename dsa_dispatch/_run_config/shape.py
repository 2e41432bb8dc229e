"""``ModelShape``: the sizes of a model that decide what its attention asks of the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dsa_dispatch._call import CallSpec
from dsa_dispatch._policy.values import nearest
from dsa_dispatch.errors import ConfigError
from dsa_dispatch.index_sharing import IndexShareSchedule

Rope = Literal["interleaved", "half_split", "none"]
Positive = Annotated[int, Field(gt=0, strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]

TOPK: Final = "run_fused_qk_topk"
TOPK_WITH_LOSS: Final = "run_fused_qk_topk_with_loss"
ATTENTION: Final = "run_fused_absorbed_sparse_attention"
DTYPES: Final = ("bfloat16", "float16", "float32", "float64")
_GRADIENTS: Final = {
    TOPK: frozenset[str](),
    TOPK_WITH_LOSS: frozenset({"q", "k", "weights"}),
    ATTENTION: frozenset({"query", "key"}),
}


class ModelShape(BaseModel):
    """Sizes of a model with DeepSeek Sparse Attention over absorbed multi-head latent attention (MLA).

    Head widths (``qk_nope``, ``qk_rope``, ``v_head``, ``index_dim``) are channels per head. Layers count from 0.
    ``dsa_layers`` are the layers with sparse attention; ``computing_layers`` those of them with an indexer of their
    own, every other one reuses the indices of the nearest computing layer before it. Both may be written ``all``.
    ``index_topk`` counts keys. With ``index_kpool`` above 1 the indexer scores pools of that many neighbouring keys,
    chooses ``index_topk // index_kpool`` of them, and up to ``index_tail`` keys of the query's own, still incomplete
    pool are added: ``index_width = index_topk + index_tail`` is what the attention sees.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Positive
    hidden: Positive
    heads: Positive
    q_lora_rank: Positive
    kv_lora_rank: Positive
    qk_nope: Positive
    qk_rope: NotNegative
    v_head: Positive
    softmax_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    rope: Rope
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    index_heads: Positive
    index_dim: Positive
    index_topk: Positive
    index_kpool: Positive = 1
    index_tail: NotNegative = 0
    index_width: Positive
    index_rope: Rope
    index_relu: bool = True
    dsa_layers: tuple[NotNegative, ...]
    computing_layers: tuple[NotNegative, ...]
    mtp_layers: NotNegative = 0
    context: Positive
    ffn: Positive | None = None
    """Channels inside the dense feed-forward block; model presets leave it out, as no kernel here depends on it."""

    @model_validator(mode="before")
    @classmethod
    def _spell_out_layers(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        layers = data.get("layers")
        if data.get("dsa_layers") == "all" and isinstance(layers, int):
            data["dsa_layers"] = tuple(range(layers))
        if data.get("computing_layers") == "all":
            data["computing_layers"] = data.get("dsa_layers")
        return data

    @model_validator(mode="after")
    def _agree(self) -> ModelShape:
        _check_layers("dsa_layers", self.dsa_layers, range(self.layers), f"layers 0 to {self.layers - 1}")
        _check_layers("computing_layers", self.computing_layers, self.dsa_layers, "dsa_layers")
        if self.computing_layers[0] != self.dsa_layers[0]:
            raise ValueError(
                f"computing_layers begin at layer {self.computing_layers[0]}, but layer {self.dsa_layers[0]} is the "
                f"first with sparse attention and has nobody before it whose indices it could reuse"
            )
        if (self.rope == "none") != (self.qk_rope == 0):
            raise ValueError(
                f"rope {self.rope!r} does not fit qk_rope {self.qk_rope}: 'none' goes with 0, and only with 0"
            )
        if self.qk_rope == 0 and self.index_rope != "none":
            raise ValueError(
                f"index_rope {self.index_rope!r} needs qk_rope above 0; a model without RoPE has index_rope 'none'"
            )
        if self.qk_rope % 2:
            raise ValueError(f"qk_rope {self.qk_rope} is odd; RoPE rotates pairs of channels")
        if self.index_rope != "none" and self.index_dim < self.qk_rope:
            raise ValueError(
                f"index_dim {self.index_dim} cannot hold the {self.qk_rope} rotated channels of qk_rope"
            )
        if self.index_topk % self.index_kpool:
            raise ValueError(
                f"index_topk {self.index_topk} is not a multiple of index_kpool {self.index_kpool}"
            )
        if self.index_tail >= self.index_kpool:
            raise ValueError(
                f"index_tail {self.index_tail} must be below index_kpool {self.index_kpool}: "
                f"an incomplete pool has fewer keys"
            )
        if self.index_width != self.index_topk + self.index_tail:
            raise ValueError(
                f"index_width {self.index_width} is not index_topk {self.index_topk} + index_tail {self.index_tail}"
            )
        return self

    @property
    def qk_width(self) -> int:
        """Channels of the absorbed query and key: the latent and the rotated part."""
        return self.kv_lora_rank + self.qk_rope

    @property
    def v_width(self) -> int:
        """Channels of the absorbed value, the first ones of the key."""
        return self.kv_lora_rank

    @property
    def plain_softmax_scale(self) -> float:
        """``(qk_nope + qk_rope) ** -0.5``, what ``softmax_scale`` is unless a long-context factor was applied."""
        return 1.0 / math.sqrt(self.qk_nope + self.qk_rope)

    @property
    def sharing_layers(self) -> tuple[int, ...]:
        """Layers that reuse the indices of a layer before them."""
        computing = frozenset(self.computing_layers)
        return tuple(layer for layer in self.dsa_layers if layer not in computing)

    @property
    def index_sharing(self) -> IndexShareSchedule:
        """The same layers as a schedule, without those of multi-token prediction."""
        return IndexShareSchedule.explicit(self.layers, self.computing_layers, sparse=self.dsa_layers)

    def index_source(self, layer: int) -> int:
        """The layer whose indices ``layer`` attends with: itself, or the nearest computing layer before it."""
        return self.index_sharing.source(layer)

    def heads_per_rank(self, tensor_parallel: int) -> int:
        """Attention heads of one tensor-parallel rank. The indexer's heads are never split."""
        if tensor_parallel < 1 or self.heads % tensor_parallel:
            possible = [size for size in range(1, self.heads + 1) if self.heads % size == 0]
            raise ConfigError(
                f"tensor parallel {tensor_parallel} does not divide {self.heads} heads; "
                f"sizes that do: {_listed(possible)}"
            )
        return self.heads // tensor_parallel

    @property
    def operations(self) -> tuple[str, ...]:
        """Operations that a layer of this model calls.

        Without ``run_fused_qk_topk_with_loss`` where keys are pooled: its teacher weighs keys, this indexer pools.
        """
        return (TOPK, ATTENTION) if self.index_kpool > 1 else (TOPK, TOPK_WITH_LOSS, ATTENTION)

    def call(
        self,
        operation: str,
        *,
        rows: int,
        keys: int | None = None,
        batch: int = 1,
        tensor_parallel: int = 1,
        training: bool = True,
        dtype: str = "bfloat16",
        device: str = "cuda",
    ) -> CallSpec:
        """What one layer asks of ``operation``, for ``explain``.

        ``rows`` and ``keys`` (default ``rows``) are per batch item. With ``training`` the inputs that an optimiser
        reaches need gradients. Raises ``ConfigError`` for an operation that this model does not call, an unknown
        dtype, and ranks that do not divide the heads.
        """
        if operation not in self.operations:
            raise ConfigError(
                f"operation {operation!r}: a layer of this model calls {', '.join(self.operations)}"
                + (
                    " (its indexer chooses pools of keys, so no loss over keys fits)"
                    if self.index_kpool > 1
                    else ""
                )
            )
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: got {dtype!r}, supports {', '.join(DTYPES)}.{nearest(dtype, DTYPES)}")
        keys = rows if keys is None else keys
        pooled = self.index_kpool > 1 and operation == TOPK
        return CallSpec(
            operation=operation,
            device=device,
            dtype=dtype,
            batch=batch,
            rows=rows,
            keys=keys // self.index_kpool if pooled else keys,
            width=self.index_width if operation == ATTENTION else self.index_topk // self.index_kpool,
            heads=self.heads_per_rank(tensor_parallel),
            qk_channels=self.qk_width,
            v_channels=self.v_width,
            index_heads=self.index_heads,
            index_channels=self.index_dim,
            weights_dtype=dtype,
            use_relu=self.index_relu,
            bounds="ranges" if pooled else "causal",
            needs_grad=_GRADIENTS[operation] if training else frozenset(),
        )


def _check_layers(name: str, layers: tuple[int, ...], allowed: Iterable[int], meaning: str) -> None:
    if not layers:
        raise ValueError(f"{name} is empty; name at least one layer, or write 'all'")
    if list(layers) != sorted(set(layers)):
        raise ValueError(f"{name} must ascend without repeats, got {_listed(layers)}")
    outside = sorted(set(layers) - set(allowed))
    if outside:
        raise ValueError(f"{name} names {_listed(outside)}, outside {meaning}")


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in numbers)
