"""``IndexShareSchedule``: which layers select keys, and whose selection the others attend with.

The schedule is data about layers and nothing else. The indices themselves are values: a layer returns the int32 tensor
``[b, sq, W]`` it selected, and the host hands it to the layers that share it. Nothing is kept between calls, so
micro-batches in flight at once cannot mix.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsa_dispatch.errors import ConfigError

MtpIndices = Literal["own", "main"]


@dataclass(frozen=True, slots=True)
class IndexShareSchedule:
    """Layers count from 0, whatever the convention they were made from.

    ``sparse`` are the layers with sparse attention, ``computing`` those of them that select keys; every other one
    attends with the selection of the nearest computing layer before it. ``mtp_depths`` logical layers for multi-token
    prediction follow, numbered ``layers``, ``layers + 1``, …: with ``mtp_indices="own"`` the first selects and the
    others reuse its selection, with ``"main"`` all reuse that of the last computing layer.
    Both may be given as any sequence of integers; they are kept as tuples. Raises ``ConfigError`` for anything else,
    and when a layer would have nobody to share with.
    """

    layers: int
    computing: tuple[int, ...]
    sparse: tuple[int, ...]
    mtp_depths: int = 0
    mtp_indices: MtpIndices = "own"

    def __post_init__(self) -> None:
        for name in ("layers", "mtp_depths"):
            object.__setattr__(self, name, _integer(name, getattr(self, name), "an int"))
        for name in ("computing", "sparse"):
            object.__setattr__(self, name, _layer_numbers(name, getattr(self, name)))
        if self.layers < 1 or self.mtp_depths < 0:
            raise ConfigError(
                f"index sharing: got {self.layers} layers and {self.mtp_depths} MTP depths, expected at least 1 and 0"
            )
        if self.mtp_indices not in ("own", "main"):
            raise ConfigError(f"mtp_indices: got {self.mtp_indices!r}, supports 'own' and 'main'")
        _check_list("sparse", self.sparse, range(self.layers))
        _check_list("computing", self.computing, self.sparse)
        if self.computing[0] != self.sparse[0]:
            raise ConfigError(
                f"index sharing: layer {self.sparse[0]} is the first with sparse attention and shares, but no layer "
                f"before it selects keys; computing layers are {_listed(self.computing)}. freq and offset of one "
                f"framework are not another's: see the constructors' conventions, or give the explicit list"
            )

    @classmethod
    def explicit(
        cls,
        layers: int,
        computing: Iterable[int] | Iterable[str],
        *,
        sparse: Iterable[int] | None = None,
        mtp_depths: int = 0,
        mtp_indices: MtpIndices = "own",
    ) -> IndexShareSchedule:
        """From the list that a preset holds: layer numbers, or one of ``full``/``shared`` (``F``/``S``) per layer.

        ``sparse`` defaults to all layers. The list is what to prefer: the rule behind it is read differently by each
        framework.
        """
        layers = _integer("layers", layers, "an int")
        entries = list(_sequence("computing", computing))
        words = [entry for entry in entries if isinstance(entry, str)]
        return cls(
            layers,
            _full_layers(words, layers) if words else tuple(entries),
            tuple(range(layers)) if sparse is None else tuple(sparse),
            mtp_depths,
            mtp_indices,
        )

    @classmethod
    def from_megatron(
        cls,
        layers: int,
        topk_freq: int = 1,
        skip_topk_offset: int = 0,
        *,
        mtp_depths: int = 0,
        mtp_indices: MtpIndices = "own",
    ) -> IndexShareSchedule:
        """``dsa_indexer_topk_freq`` and ``dsa_indexer_skip_topk_offset`` of Megatron-core.

        There layers count from 1 and layer L selects where ``max(L - max(offset, 1), 0) % freq == 0``.
        """
        _check_rule(topk_freq, skip_topk_offset)
        first = max(skip_topk_offset, 1)
        return cls._from_rule(
            layers, lambda layer: max(layer + 1 - first, 0) % topk_freq == 0, mtp_depths, mtp_indices
        )

    @classmethod
    def from_transformers(
        cls,
        layers: int,
        index_topk_freq: int = 1,
        index_skip_topk_offset: int = 2,
        *,
        mtp_depths: int = 0,
        mtp_indices: MtpIndices = "own",
    ) -> IndexShareSchedule:
        """``index_topk_freq`` and ``index_skip_topk_offset`` of Hugging Face's ``GlmMoeDsaConfig``, whose offset
        defaults to 2.

        Layer i, from 0, selects where ``max(i - offset + 1, 0) % freq == 0``.
        """
        _check_rule(index_topk_freq, index_skip_topk_offset)
        return cls._from_rule(
            layers,
            lambda layer: max(layer - index_skip_topk_offset + 1, 0) % index_topk_freq == 0,
            mtp_depths,
            mtp_indices,
        )

    @classmethod
    def from_xtuner(
        cls,
        layers: int,
        index_topk_freq: int = 1,
        index_skip_topk_offset: int = 0,
        *,
        mtp_depths: int = 0,
        mtp_indices: MtpIndices = "own",
    ) -> IndexShareSchedule:
        """``index_topk_freq`` and ``index_skip_topk_offset`` of XTuner's ``DSAMLAConfig``, whose offset defaults to 0.

        The rule is that of ``from_transformers``; the default offset 0 makes layer 0 share with nobody, which is an
        error here unless freq is 1.
        """
        return cls.from_transformers(
            layers, index_topk_freq, index_skip_topk_offset, mtp_depths=mtp_depths, mtp_indices=mtp_indices
        )

    @classmethod
    def _from_rule(
        cls, layers: int, selects: Callable[[int], bool], mtp_depths: int, mtp_indices: MtpIndices
    ) -> IndexShareSchedule:
        everyone = tuple(range(_integer("layers", layers, "an int")))
        return cls(layers, tuple(filter(selects, everyone)), everyone, mtp_depths, mtp_indices)

    @property
    def logical_layers(self) -> tuple[int, ...]:
        """All layers with sparse attention, those of multi-token prediction included."""
        return (*self.sparse, *range(self.layers, self.layers + self.mtp_depths))

    def computes(self, layer: int) -> bool:
        """Whether ``layer`` selects keys of its own."""
        return self.source(layer) == layer

    def source(self, layer: int) -> int:
        """The layer whose selection ``layer`` attends with: itself, or a layer before it."""
        if layer not in self.logical_layers:
            raise ConfigError(
                f"layer {layer} has no sparse attention; layers with it: {_listed(self.logical_layers)}"
            )
        if layer >= self.layers and self.mtp_indices == "own":
            return self.layers
        return max(source for source in self.computing if source <= layer)

    def sharers(self, layer: int) -> tuple[int, ...]:
        """Layers that attend with the selection of ``layer``, itself first; () when it selects nothing."""
        return tuple(other for other in self.logical_layers if self.source(other) == layer)

    def last_use(self, layer: int) -> int:
        """The last layer that needs the selection of computing layer ``layer``: after it, the host may drop it."""
        return self.sharers(self.source(layer))[-1]

    def check_pipeline(self, layers_per_stage: Sequence[int]) -> None:
        """Raise ``ConfigError`` when a selection would have to cross from one pipeline stage to another.

        ``layers_per_stage`` counts the main layers of each stage, in order; with interleaved stages those of each
        model chunk. Multi-token prediction stands on the last stage.
        """
        layers_per_stage = _layer_numbers("layers_per_stage", layers_per_stage)
        if sum(layers_per_stage) != self.layers or any(count < 0 for count in layers_per_stage):
            raise ConfigError(
                f"layers_per_stage: got {list(layers_per_stage)}, in sum {sum(layers_per_stage)} layers; this "
                f"schedule has {self.layers}"
            )
        stages = [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]
        stages += [len(layers_per_stage) - 1] * self.mtp_depths
        for layer in self.logical_layers:
            source = self.source(layer)
            if stages[source] != stages[layer]:
                raise ConfigError(
                    f"pipeline split {list(layers_per_stage)}: layer {layer} on stage {stages[layer]} attends with the "
                    f"selection of layer {source} on stage {stages[source]}, and indices do not travel between stages. "
                    f"A stage may begin at layer {_listed(self.cuts())}"
                )

    def cuts(self) -> tuple[int, ...]:
        """Layers at which a pipeline stage may begin: no selection made before is needed from there on."""
        return tuple(
            layer
            for layer in range(1, self.layers)
            if all(self.source(other) >= layer for other in self.logical_layers if other >= layer)
        )


def _check_rule(freq: int, offset: int) -> None:
    freq, offset = _integer("freq", freq, "an int"), _integer("offset", offset, "an int")
    if freq < 1 or offset < 0:
        raise ConfigError(
            f"index sharing: got freq {freq} and offset {offset}, expected at least 1 and at least 0"
        )


def _check_list(name: str, layers: tuple[int, ...], allowed: Sequence[int]) -> None:
    if not layers or list(layers) != sorted(set(layers)):
        raise ConfigError(
            f"{name}: got {_listed(layers)}, expected at least one layer, ascending without repeats"
        )
    outside = sorted(set(layers) - set(allowed))
    if outside:
        raise ConfigError(f"{name}: names {_listed(outside)}, expected some of {_listed(allowed)}")


def _full_layers(types: Sequence[str], layers: int) -> tuple[int, ...]:
    words = {"full": True, "f": True, "shared": False, "s": False}
    if len(types) != layers or any(word.lower() not in words for word in types):
        raise ConfigError(
            f"computing: got {len(types)} entries {sorted(set(types))} for {layers} layers, expected 'full' or "
            f"'shared' (F or S) for each"
        )
    return tuple(layer for layer, word in enumerate(types) if words[word.lower()])


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in numbers) or "none"


def _sequence(name: str, entries: Any) -> Iterable[Any]:
    if not isinstance(entries, Iterable):
        raise ConfigError(f"{name}: got {entries!r} ({type(entries).__name__}), expected layer numbers")
    return entries


def _layer_numbers(name: str, entries: Any) -> tuple[int, ...]:
    wanted = "layer numbers, or in explicit() one of 'full' and 'shared' per layer"
    return tuple(_integer(name, entry, wanted) for entry in _sequence(name, entries))


def _integer(name: str, value: Any, wanted: str) -> int:
    """An int of any integer type; what is none would otherwise be a layer that silently does not select."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name}: got {value!r} ({type(value).__name__}), expected {wanted}") from None
