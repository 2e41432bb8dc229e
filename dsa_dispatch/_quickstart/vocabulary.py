"""Byte-pair encoding (arXiv 1508.07909), learned from the text itself."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

import torch
from torch import Tensor

_PIECE: Final = re.compile(r"\n[ \t]*| ?[^\W\d_]+|_+| ?\d{1,3}| ?[^\w\s]{1,3}|[ \t]+|\s")
"""A line break with its indent, a word with the space before it, underscores, digits, punctuation, other blanks.
Every character belongs to one of them, and no token reaches across two."""
_BYTES: Final = 256
_LEARNED_FROM: Final = 8000
"""Distinct pieces the merges are learned from; rarer ones change no merge and cost most of the time."""

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids 0 to 255 are bytes; id ``256 + n`` is made of the two tokens of ``merges[n]``."""

    merges: tuple[Pair, ...]
    tokens: tuple[bytes, ...]
    ranks: dict[Pair, int] = field(repr=False)

    @classmethod
    def of(cls, text: str, size: int) -> Vocabulary:
        """Learn ``size - 256`` merges, or as many as still join something that occurs twice."""
        merges = tuple(_learn(Counter(_PIECE.findall(text)), size - _BYTES))
        tokens = [bytes([value]) for value in range(_BYTES)]
        for first, second in merges:
            tokens.append(tokens[first] + tokens[second])
        return cls(merges, tuple(tokens), {pair: rank for rank, pair in enumerate(merges)})

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> Tensor:
        """Token ids, int64, one dimension."""
        known: dict[str, list[int]] = {}
        ids: list[int] = []
        for piece in _PIECE.findall(text):
            if piece not in known:
                known[piece] = self._merged(piece)
            ids.extend(known[piece])
        return torch.tensor(ids, dtype=torch.int64)

    def decode(self, ids: Tensor) -> str:
        """The text of token ids; bytes that are no UTF-8 become the replacement character."""
        return b"".join(self.tokens[number] for number in ids.tolist()).decode(errors="replace")

    def _merged(self, piece: str) -> list[int]:
        symbols = list(piece.encode(errors="replace"))
        while len(symbols) > 1:
            pairs = itertools.pairwise(symbols)
            rank, pair = min((self.ranks.get(pair, len(self.merges)), pair) for pair in pairs)
            if rank == len(self.merges):
                break
            symbols = _joined(symbols, pair, _BYTES + rank)
        return symbols


def _learn(pieces: Counter[str], count: int) -> Iterator[Pair]:
    """The pair that occurs most, joined, again and again; among equals the pair with the lower ids.

    A heap may hold counts that have changed since; one is believed only if it still is the pair's count.
    """
    frequent = sorted(pieces.items(), key=lambda entry: (-entry[1], entry[0]))[:_LEARNED_FROM]
    words = [list(piece.encode(errors="replace")) for piece, _ in frequent]
    weights = [weight for _, weight in frequent]
    totals: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for number, word in enumerate(words):
        for pair in itertools.pairwise(word):
            totals[pair] += weights[number]
            places[pair].add(number)
    heap = [(-total, pair) for pair, total in totals.items()]
    heapify(heap)
    for token in range(_BYTES, _BYTES + count):
        while heap and -heap[0][0] != totals[heap[0][1]]:
            heappop(heap)
        if not heap or -heap[0][0] < 2:
            return
        pair = heappop(heap)[1]
        yield pair
        changed: set[Pair] = set()
        for number in places.pop(pair):
            before = words[number]
            after = words[number] = _joined(before, pair, token)
            for old in itertools.pairwise(before):
                totals[old] -= weights[number]
                changed.add(old)
            for new in itertools.pairwise(after):
                totals[new] += weights[number]
                places[new].add(number)
                changed.add(new)
        for entry in changed:
            if totals[entry] > 0:
                heappush(heap, (-totals[entry], entry))


def _joined(symbols: list[int], pair: Pair, token: int) -> list[int]:
    """``symbols`` with every occurrence of ``pair``, from the left, replaced by ``token``."""
    joined: list[int] = []
    place = 0
    while place < len(symbols):
        if place + 1 < len(symbols) and (symbols[place], symbols[place + 1]) == pair:
            joined.append(token)
            place += 2
        else:
            joined.append(symbols[place])
            place += 1
    return joined
