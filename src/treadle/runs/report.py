"""The results of a run as plain data, and their page: one self-contained HTML file with its pictures."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from treadle.checkpoint.files import write_text

if TYPE_CHECKING:
    from rich.console import Console

_LEAST_TEXT = 20  # columns
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
.wide { overflow-x: auto; margin-top: 1.2rem; }
img { display: block; width: 100%; min-width: 36rem; height: auto; background: #fff; border-radius: 4px; }
table { border-collapse: collapse; } .first tbody tr:first-child { font-weight: bold; }
caption { text-align: left; color: var(--muted); } caption span { display: block; max-width: calc(100vw - 2rem); }
pre { white-space: pre-wrap; }
th, td { padding: .3rem 1.2rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } td:not(:first-child) { white-space: nowrap; }
dt { color: var(--muted); } dd { margin: 0 0 .5rem; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$lead</p>
$body
<h2>How it was made</h2>
<dl>
$facts
</dl>
</body>
</html>
""")
_TABLE = Template("""<div class="wide">
<table$kind>$caption
<thead><tr>$head</tr></thead>
<tbody>
$rows
</tbody>
</table>
</div>""")
_PICTURE = Template("""<h2>$title</h2>
<figure>
<div class="wide"><img alt="$title" src="data:image/png;base64,$data"></div>
<figcaption>$caption</figcaption>
</figure>""")


@dataclass(frozen=True)
class Table:
    """Table of strings.

    Attributes:
        columns: the column names; the first column holds the row names.
        rows: the cells of each row.
        title: above it.
        width: minimum width of the first column on a terminal, in characters.
        notes: sentences below it.
        about_first: whether the first row holds the results and the others are baselines.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    width: int = 0
    notes: Sequence[str] = ()
    about_first: bool = True


@dataclass(frozen=True)
class Picture:
    """Picture of a page: a PNG file and its description."""

    path: Path
    title: str
    caption: str


@dataclass(frozen=True)
class Report:
    """Report of a run's results as plain data, for the terminal and the page.

    Attributes:
        title: the heading of the page.
        lead: a sentence or two below it.
        tables: in this order.
        texts: title -> text, such as samples.
        note: a sentence at the end.
        files: lines about the files of the run.
        pictures: of the page only, in this order.
        facts: of the page only, names and descriptions of how the results were produced.
    """

    title: str = ""
    lead: str = ""
    tables: Sequence[Table] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    files: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def write_page(path: Path, report: Report) -> Path:
    """Write a page atomically; every string is escaped.

    Args:
        path: the HTML file.
        report: the report; its pictures are embedded in the page.

    Returns:
        The path.

    Raises:
        OSError: a picture cannot be read.
        CheckpointError: the page cannot be written.

    Example:
        >>> import tempfile
        >>> report = Report("Rings", "1 < 2", [Table(["", "mae"], [["model", "0.1"]])], facts={"seed": "0"})
        >>> page = write_page(Path(tempfile.mkdtemp(), "page.html"), report)
        >>> "<p>1 &lt; 2</p>" in page.read_text(encoding="utf-8")
        True
    """
    note = [f"<p>{escape(report.note)}</p>"] if report.note else []
    body = [
        *map(_table, report.tables),
        *note,
        *map(_embed, report.pictures),
        *(_text(*item) for item in report.texts.items()),
    ]
    text = _PAGE.substitute(
        title=escape(report.title),
        lead=escape(report.lead),
        body="\n".join(body),
        facts="\n".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in report.facts.items()),
    )
    return write_text(text, path)


def _table(table: Table) -> str:
    kind = ' class="first"' if table.about_first else ""
    caption = f"\n<caption><span>{escape(table.title)}</span></caption>" if table.title else ""
    rows = "\n".join(f"<tr>{_cells('td', row)}</tr>" for row in table.rows)
    shown = _TABLE.substitute(kind=kind, caption=caption, head=_cells("th", table.columns), rows=rows)
    return "\n".join([shown, *(f"<p>{escape(note)}</p>" for note in table.notes)])


def _text(title: str, text: str) -> str:
    return f"<h2>{escape(title)}</h2>\n<pre>{escape(text)}</pre>"


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def _embed(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    return _PICTURE.substitute(title=escape(picture.title), caption=escape(picture.caption), data=data)


def wrapped(text: str, console: Console, *, indent: int = 0) -> str:
    """Return a text with its lines broken between words at the width of a terminal; unchanged for a file or a pipe.

    Words longer than a line, such as paths, stay whole.

    Args:
        text: one or several lines.
        console: console on which it is printed.
        indent: columns before the rest of a broken line.
    """
    if not console.is_terminal or console.is_jupyter:
        return text
    wrap = textwrap.TextWrapper(
        width=max(console.width, _LEAST_TEXT), subsequent_indent=" " * indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(part for line in text.split("\n") for part in wrap.wrap(line) or [""])
