"""Writes the table of strangers into docs/what-resume-guarantees.md: ``python tests/strangers/document.py``."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / "docs" / "what-resume-guarantees.md"
BEGIN, END = "<!-- strangers: written by tests/strangers/document.py -->", "<!-- end of strangers -->"


def as_markdown() -> str:
    """Return the table, one row for each outcome of each kind."""
    from strangers.table import TABLE

    kinds = list(dict.fromkeys(row.kind for row in TABLE))
    lines = ["| Kind | Exact | Refused before step 1, by name |", "|---|---|---|"]
    for kind in kinds:
        exact, refused = (
            "; ".join(row.name for row in TABLE if row.kind == kind and row.outcome == outcome) or "—"
            for outcome in ("exact", "refused")
        )
        lines.append(f"| {kind} | {exact} | {refused} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """Return the document with the table of now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{as_markdown()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
