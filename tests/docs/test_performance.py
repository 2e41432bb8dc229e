"""The figures in docs/performance.md are those of the record that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
(RECORD,) = re.findall(r"\]\((\.\./benchmarks/[^)]+)\)", PAGE)
STAGES = {
    "Attention forward": ("attention_forward", False),
    "Attention backward": ("attention_backward", False),
    "Attention backward, deterministic": ("attention_backward", True),
    "Selection, 64 index heads × 128, causal": ("indexer_topk", False),
}


def rows(text):
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    return lines[0][1:], lines[2:]


def measured():
    document = json.loads((ROOT / "docs" / RECORD).read_text(encoding="utf-8"))
    found = {}
    for result in document["results"]:
        case = result["case"]
        if result["state"] == "measured" and case["pattern"] == "random":
            size = (
                f"{case['rows']} × {case['keys']}" if case["stage"] == "indexer_topk" else str(case["heads"])
            )
            place = (case["stage"], case["deterministic"], size, result["peer"])
            found[place] = f"{result['median']:.4g}"
    return found


@pytest.mark.parametrize("title", STAGES)
def test_every_figure_is_in_the_record(title):
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    peers, table = rows(section)
    figures, checked = measured(), 0
    for size, *cells in table:
        for peer, cell in zip(peers, cells, strict=True):
            assert cell == figures.get((*STAGES[title], size, peer), "")
            checked += cell != ""
    assert checked >= 5


def test_every_section_with_a_table_is_checked():
    titles = re.findall(r"^## (.*)$\n\n\|", PAGE, flags=re.M)
    assert set(titles) == set(STAGES)
