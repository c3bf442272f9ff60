"""What users bring is exact after every stop or refused before step 1 by a message that names it: no third outcome."""

from __future__ import annotations

import pytest

from strangers.bench import Row, inexact, refusal
from strangers.document import DOCUMENT, with_table
from strangers.table import TABLE


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.kind}-{row.name}")
def test_it_is_exact_or_refused(row: Row) -> None:
    for package in row.needs:
        pytest.importorskip(package, reason=f"{package} is not installed")
    if row.words:
        message = refusal(row)
        assert message, "it was not refused"
        assert [word for word in row.words if word not in message] == [], message
    else:
        assert inexact(row) == []


def test_the_document_has_the_table() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_table(text), "refresh it: python tests/strangers/document.py"


def test_the_table_is_large_and_has_no_row_twice() -> None:
    names = [(row.kind, row.name) for row in TABLE]
    assert len(names) == len(set(names)) >= 60
