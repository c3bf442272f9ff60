"""The pictures and text samples of a run, embedded in its page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from treadle.cli.runpage import words
from treadle.cli.runpage.records import RunRecords
from treadle.cli.runpage.tables import folded, section

_MOST_BYTES = 30_000_000
_MOST_LETTERS = 20_000
_TYPES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".svg": "svg+xml"}


def pictures(runs: Sequence[RunRecords]) -> str:
    """Return the pictures of the runs; those that would make the page larger than 30 MB are only named.

    Raises:
        OSError: a file cannot be read.
    """
    parts, left = [], _MOST_BYTES
    for run in runs:
        figures, omitted = [], []
        for path in run.pictures:
            size = path.stat().st_size
            if size > left:
                omitted.append(f"{path.name} ({words.size(size)})")
                continue
            left -= size
            figures.append(_figure(path, run.name if len(runs) > 1 else ""))
        note = f'<p class="note">Too large for this page: {escape(", ".join(omitted))}</p>' if omitted else ""
        inside = f'<div class="gallery">\n{"".join(figures)}</div>' if figures else ""
        parts += [folded(f"{run.name} ({len(figures)})", inside) if len(runs) > 1 else inside, note]
    return section("Pictures", *parts, wide=True)


def samples(runs: Sequence[RunRecords]) -> str:
    """Return the text samples of the runs, cut after 20,000 characters."""
    parts = []
    for run in runs:
        for name, text in run.samples.items():
            rest = len(text) - _MOST_LETTERS
            cut = f"\n… and {rest:,} more characters in {name}" if rest > 0 else ""
            inside = f'<pre class="sample">{escape(text[:_MOST_LETTERS] + cut)}</pre>'
            parts.append(folded(f"{run.name}: {name}", inside) if len(runs) > 1 else inside)
    return section("Samples", *parts, wide=True)


def _figure(path: Path, run: str) -> str:
    title = path.stem.replace("_", " ")
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    caption = escape(f"{run}: {title}" if run else title)
    source = f"data:image/{_TYPES[path.suffix.lower()]};base64,{data}"
    return f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>\n'
