"""The text and its vocabulary: nothing fetched, the same on every run, nothing seen twice."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quickstart import small

from dsa_dispatch._quickstart.generate import choose_prompt
from dsa_dispatch._quickstart.text import file_text, load_corpus, standard_library_text
from dsa_dispatch._quickstart.vocabulary import Vocabulary
from dsa_dispatch.errors import ConfigError

WORDS = Vocabulary.of(small.SENTENCE * 20, 300)


def test_the_standard_library_gives_the_same_text_twice_and_about_as_much_as_asked():
    first, second = (standard_library_text(200_000, 0.1) for _ in range(2))
    assert first == second
    # Whole files of at most 120 kB: a part may be one file too long, and has one character a byte at most.
    assert 180_000 <= len(first.training) <= 180_000 + 120_000
    assert 20_000 <= len(first.held_out) <= 20_000 + 120_000


def test_the_choice_of_files_depends_on_their_names_alone(tmp_path, monkeypatch):
    for number in range(40):
        (tmp_path / f"module_{number}.py").write_text(f"value = {number}\n" * 20)
    expected = standard_library_text(3_000, 0.2, tmp_path)
    found = sorted(tmp_path.rglob("*.py"))
    random.Random(0).shuffle(found)
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: iter(found))
    assert standard_library_text(3_000, 0.2, tmp_path) == expected
    training, held_out = (set(part.split("\n")) - {""} for part in (expected.training, expected.held_out))
    assert training
    assert held_out
    assert not training & held_out, "a held-out file is no part of the training text"


def test_foreign_packages_tests_large_tables_and_broken_files_are_left_out(tmp_path):
    for folder in ("site-packages/foreign", "test", "pkg/tests", "encodings"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file.py").write_text("unwanted\n" * 100)
    (tmp_path / "table.py").write_text("unwanted\n" * 20_000)
    (tmp_path / "broken.py").write_bytes(b"\xff unwanted \x81")
    for name in ("a.py", "b.py", "pkg/c.py"):
        (tmp_path / name).write_text("wanted\n" * 30)
    text = standard_library_text(600, 0.1, tmp_path)
    assert set((text.training + text.held_out).split()) == {"wanted"}


def test_no_source_on_the_machine_says_what_to_give_instead(tmp_path):
    with pytest.raises(ConfigError, match=r"no Python source found under .* with --text FILE"):
        standard_library_text(1000, 0.1, tmp_path)


def test_a_file_is_cut_at_a_line_and_nothing_is_lost(tmp_path):
    path = tmp_path / "poem.txt"
    content = "".join(f"line {number} über alles\n" for number in range(50))
    path.write_text(content, encoding="utf-8")
    text = file_text(path, 0.2)
    assert text.training + text.held_out == content
    assert text.training.endswith("\n")
    assert 0.1 * len(content) < len(text.held_out) <= 0.2 * len(content)
    assert text.origin == "poem.txt"


def test_a_text_without_lines_is_cut_all_the_same(tmp_path):
    path = tmp_path / "line.txt"
    path.write_text("word " * 100)
    text = file_text(path, 0.2)
    assert (len(text.training), len(text.held_out)) == (400, 100)


@pytest.mark.parametrize(("content", "part"), [("short", "training"), ("word " * 400, "held-out")])
def test_a_text_too_short_says_how_much_is_needed(tmp_path, content, part):
    path = tmp_path / "short.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"short\.txt: the {part} part has \d+ tokens, needs more than 64"):
        load_corpus(path, corpus_bytes=1, held_out_fraction=0.05, vocabulary=300, sequence=64)


def test_a_missing_text_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.txt' cannot be read: No such file"):
        load_corpus(
            tmp_path / "nothing.txt", corpus_bytes=1, held_out_fraction=0.1, vocabulary=300, sequence=8
        )


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_its_tokens(text):
    assert WORDS.decode(WORDS.encode(text)) == text


def test_frequent_words_become_one_token_with_the_blank_before_them():
    assert WORDS.encode(" the").numel() == 1
    assert WORDS.encode(" the cat sat").numel() == 3
    assert len(WORDS) <= 300


def test_merges_join_what_occurs_most_and_among_equals_the_lower_ids():
    assert Vocabulary.of("ab ab ab cd cd ef ef", 259).tokens[256:] == (b"ab", b" c", b" e")
    assert Vocabulary.of("xy zw", 300).merges == (), "nothing occurs twice"


def test_merges_are_those_of_the_plain_algorithm():
    text = (Path(sysconfig.get_path("stdlib")) / "bisect.py").read_text()
    assert Vocabulary.of(text, 256 + 60).merges == plainly_learned(text, 60)


def test_the_vocabulary_is_learned_from_the_training_part_alone(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("alpha beta\n" * 90 + "omega psi\n" * 10)
    corpus = load_corpus(path, corpus_bytes=1, held_out_fraction=0.1, vocabulary=300, sequence=8)
    assert b"omega" not in corpus.vocabulary.tokens
    assert corpus.vocabulary.decode(corpus.held_out) == corpus.text.held_out


def test_the_prompt_begins_a_line_of_the_held_out_text():
    corpus = small.corpus()
    prompt = choose_prompt(corpus, 6)
    assert prompt.numel() == 6
    text = corpus.vocabulary.decode(prompt)
    assert text.startswith("\nthe cat")
    assert text in corpus.vocabulary.decode(corpus.held_out)


def plainly_learned(text, count):
    """Byte-pair encoding with every count made anew for every merge."""
    from collections import Counter
    from itertools import pairwise

    from dsa_dispatch._quickstart.vocabulary import _PIECE

    words = Counter(tuple(piece.encode()) for piece in _PIECE.findall(text))
    merges = []
    for token in range(256, 256 + count):
        totals = Counter()
        for word, weight in words.items():
            for pair in pairwise(word):
                totals[pair] += weight
        best = min(totals, key=lambda pair: (-totals[pair], pair))
        merges.append(best)
        joined = Counter()
        for word, weight in words.items():
            symbols = []
            for symbol in word:
                if symbols and (symbols[-1], symbol) == best:
                    symbols[-1] = token
                else:
                    symbols.append(symbol)
            joined[tuple(symbols)] += weight
        words = joined
    return tuple(merges)
