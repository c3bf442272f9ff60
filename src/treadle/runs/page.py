"""A page of results: one HTML file that holds its pictures, loads nothing, and is read on a screen or a phone."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from treadle.checkpoint.store import write_text

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #222; --muted: #666; --line: #ddd; --ground: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --muted: #999; --line: #444; --ground: #181818; } }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; font: 1rem/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--ground); }
h1 { font-size: 1.5rem; line-height: 1.2; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
figure { margin: 0; } figcaption { color: var(--muted); max-width: 42rem; }
.wide { overflow-x: auto; }
img { display: block; width: 100%; min-width: 36rem; height: auto; background: #fff; border-radius: 4px; }
table { border-collapse: collapse; } tbody tr:first-child { font-weight: bold; }
th, td { padding: .3rem 1.2rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
dt { color: var(--muted); } dd { margin: 0 0 .5rem; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$lead</p>
<div class="wide">
<table>
<thead><tr>$head</tr></thead>
<tbody>
$rows
</tbody>
</table>
</div>
$pictures
<h2>How it was made</h2>
<dl>
$facts
</dl>
</body>
</html>
""")
_PICTURE = Template("""<h2>$title</h2>
<figure>
<div class="wide"><img alt="$title" src="data:image/png;base64,$data"></div>
<figcaption>$caption</figcaption>
</figure>""")


@dataclass(frozen=True)
class Picture:
    """A picture of a page: a PNG file, and words that say what is seen."""

    path: Path
    title: str
    caption: str


def write_page(
    path: Path,
    *,
    title: str,
    lead: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    pictures: Sequence[Picture],
    facts: Mapping[str, str],
) -> Path:
    """Writes a page, the whole old one or the whole new one; every text is shown as it is, never read as HTML.

    Args:
        path: the HTML file.
        title: its heading.
        lead: a sentence or two below it.
        columns: names of the table's columns; the first one is of the rows' names.
        rows: of the table; the first one is what the page is about.
        pictures: below the table, in this order; the files are copied into the page.
        facts: names and texts at the end, such as the settings.

    Returns:
        The path.

    Raises:
        OSError: a picture cannot be read.
        CheckpointError: the page cannot be written.

    Example:
        >>> import tempfile
        >>> page = write_page(
        ...     Path(tempfile.mkdtemp(), "page.html"), title="Rings", lead="1 < 2", columns=["", "mae"],
        ...     rows=[["model", "0.1"]], pictures=[], facts={"seed": "0"},
        ... )
        >>> "<p>1 &lt; 2</p>" in page.read_text(encoding="utf-8")
        True
    """
    body = "\n".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    text = _PAGE.substitute(
        title=escape(title),
        lead=escape(lead),
        head=_cells("th", columns),
        rows=body,
        pictures="\n".join(map(_embed, pictures)),
        facts="\n".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items()),
    )
    return write_text(text, path)


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def _embed(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    return _PICTURE.substitute(title=escape(picture.title), caption=escape(picture.caption), data=data)
