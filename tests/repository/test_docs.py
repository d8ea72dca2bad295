"""Pages that people can read in a terminal."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
MOST_COLUMNS = 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_text_are_not_too_long(page):
    """Tables and code may be as wide as they need."""
    is_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and not line.lstrip().startswith("|"):
            assert len(line) <= MOST_COLUMNS, f"{page.name}:{number}"
