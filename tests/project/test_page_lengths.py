"""No page of the documentation is longer than 1,500 words.

A word has a letter. Code, comments and the targets of links do not count; the text of tables does,
figures in tables do not.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 1500
LONGER = {"privacy.md": 3100, "trusted_core.md": 2000}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def count_words(text: str) -> int:
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ {4,}(?![-*|] )\S.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return sum(any(letter.isalpha() for letter in word) for word in text.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short(page: Path) -> None:
    found = count_words(page.read_text())
    assert found <= LONGER.get(page.name, LIMIT), f"{page.name} has {found} words: split it"


def test_what_counts_as_a_word() -> None:
    text = "# Two words\n\n```py\nno code\n```\n\n    no command\n\n| text | 1.5 ± 0.2 |\n"
    assert count_words(text) == 3
    assert count_words("a [link](some/page.md#part) <!-- none --> 3 %") == 2
    assert count_words("word " * (LIMIT + 1)) > LIMIT
