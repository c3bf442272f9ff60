"""Documents name tests that exist, and pages that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_and_file_that_a_document_names_exists(document):
    text = document.read_text(encoding="utf-8")
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{document.name}: {name}"
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
