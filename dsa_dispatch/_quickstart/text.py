"""The text a model is trained on. Nothing is fetched."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import Tensor

from dsa_dispatch._quickstart.vocabulary import Vocabulary
from dsa_dispatch.errors import ConfigError

_SKIPPED_FOLDERS: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
"""Foreign packages differ between machines; the other folders are mostly tables of literals."""
_LARGEST_FILE: Final = 120_000
"""Bytes. One of the few larger files would be most of the held-out part."""


@dataclass(frozen=True, slots=True)
class Text:
    """Source text in two parts that share no document. ``digest`` tells whether two runs read the same."""

    origin: str
    training: str
    held_out: str
    digest: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Encoded text. ``held_out`` was not seen when the vocabulary was made."""

    text: Text
    vocabulary: Vocabulary
    training: Tensor
    held_out: Tensor


def load_corpus(
    path: Path | None, *, corpus_bytes: int, held_out_fraction: float, vocabulary: int, sequence: int
) -> Corpus:
    """Text of a file, or of the Python standard library's sources on this machine, encoded.

    Raises ``ConfigError`` when there is no text, or less than one sequence in either part.
    """
    text = (
        standard_library_text(corpus_bytes, held_out_fraction)
        if path is None
        else file_text(path, held_out_fraction)
    )
    words = Vocabulary.of(text.training, vocabulary)
    corpus = Corpus(text, words, words.encode(text.training), words.encode(text.held_out))
    for part, tokens in (("training", corpus.training), ("held-out", corpus.held_out)):
        if tokens.numel() <= sequence:
            raise ConfigError(
                f"{text.origin}: the {part} part has {tokens.numel()} tokens, needs more than {sequence}. "
                f"Give a longer text or set training.sequence lower"
            )
    return corpus


def file_text(path: Path, held_out_fraction: float) -> Text:
    """The text of one file; its end, from a line break on, is held out."""
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"text {str(path)!r} cannot be read: {error.strerror}. Give a text file") from error
    cut = content.find("\n", int(len(content) * (1 - held_out_fraction))) + 1
    cut = cut or int(len(content) * (1 - held_out_fraction))
    return _text(path.name, content[:cut], content[cut:])


def standard_library_text(corpus_bytes: int, held_out_fraction: float, folder: Path | None = None) -> Text:
    """About ``corpus_bytes`` of ``.py`` files, whole files, chosen by the hash of their names.

    The same files for the same Python version on every machine. The files held out are no part of the training text.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    training: list[str] = []
    held_out: list[str] = []
    sizes = [0, 0]
    wanted = (corpus_bytes * (1 - held_out_fraction), corpus_bytes * held_out_fraction)
    for source in _readable(folder):
        part = 1 if sizes[1] < wanted[1] else 0
        (training, held_out)[part].append(source)
        sizes[part] += len(source)
        if sizes[0] >= wanted[0]:
            break
    if not training:
        raise ConfigError(f"no Python source found under {str(folder)!r}; give a text file with --text FILE")
    return _text(
        f"Python standard library ({len(training) + len(held_out)} files)",
        "\n".join(training),
        "\n".join(held_out),
    )


def _readable(folder: Path) -> Iterator[str]:
    names = (path.relative_to(folder) for path in folder.rglob("*.py"))
    kept = [name.as_posix() for name in names if not _SKIPPED_FOLDERS.intersection(name.parts)]
    for name in sorted(kept, key=lambda name: hashlib.sha256(name.encode()).digest()):
        try:
            content = (folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if 0 < len(content) <= _LARGEST_FILE:
            yield content


def _text(origin: str, training: str, held_out: str) -> Text:
    digest = hashlib.sha256(f"{len(training)}\n{training}{held_out}".encode(errors="replace")).hexdigest()[
        :12
    ]
    return Text(origin, training, held_out, digest)
