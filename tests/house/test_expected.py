"""The table of what is expected of a trainer: each row has a test that exists, or a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from" / "expected.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\|(.+)\|$", PAGE, flags=re.MULTILINE)[2:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split(" | ")[0].strip())
def test_a_row_has_its_test_or_a_reason(row):
    cells = [cell.strip() for cell in row.split(" | ")]
    assert len(cells) == 4, row
    held = cells[3]
    if held.startswith("✗"):
        assert len(held.split()) > 8, "a reason takes a sentence"
        return
    assert held.startswith("✓")
    (path, _, name) = re.fullmatch(r"✓ `(tests/[\w/]+(?:\.py)?)(::(\w+))?`", held).groups()
    assert (ROOT / path).exists(), path
    if name:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), held


def test_the_table_names_each_of_the_four_libraries():
    sources = " ".join(row.split(" | ")[1] for row in ROWS)
    assert all(name in sources for name in ("Lightning", "HF", "Accelerate", "Composer"))
    assert len(ROWS) > 50
