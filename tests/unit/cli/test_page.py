"""A page is one well-formed file that shows what it was given and loads nothing."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from treadle.runs.report import Picture, Report, Table, write_page

VOID = {"meta", "img", "br", "hr", "link", "input"}
NASTY = '<script>alert("1")</script> & a $title'


class Parsed(HTMLParser):
    """The elements of a page; a tag that is closed out of order, or not at all, is an error."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def loads(text: str) -> list[str]:
    """Return the addresses that a browser would fetch for a page, embedded pictures left out."""
    sources = [str(attrs[name]) for _, attrs in Parsed(text).tags for name in ("src", "href") if name in attrs]
    return [*(at for at in sources if not at.startswith("data:")), *re.findall(r"url\(|@import|https?:", text)]


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "dot.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n and the rest")
    return path


def page(tmp_path: Path, text: str, *pictures: Picture) -> str:
    table = Table(["", text], [[text, text], ["b", "2"]])
    report = Report(text, text, [table], pictures=pictures, facts={text: text})
    path = write_page(tmp_path / "new" / "page.html", report)
    return path.read_text(encoding="utf-8")


def test_a_page_is_well_formed_and_loads_nothing(tmp_path: Path, png: Path) -> None:
    text = page(tmp_path, "Rings", Picture(png, "One", "first"), Picture(png, "Two", "second"))
    assert text.startswith("<!doctype html>")
    assert loads(text) == []
    tags = [tag for tag, _ in Parsed(text).tags]
    assert [tags.count(tag) for tag in ("h1", "figure", "figcaption", "img", "tr", "dt")] == [1, 2, 2, 2, 3, 1]


def test_every_picture_is_inside_and_has_words(tmp_path: Path, png: Path) -> None:
    text = page(tmp_path, "Rings", Picture(png, "One", "what is seen"))
    (image,) = [attrs for tag, attrs in Parsed(text).tags if tag == "img"]
    kind, data = str(image["src"]).split(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == png.read_bytes()
    assert image["alt"] == "One"
    assert "<figcaption>what is seen</figcaption>" in text


def test_text_is_shown_as_it_is(tmp_path: Path, png: Path) -> None:
    text = page(tmp_path, NASTY, Picture(png, NASTY, NASTY))
    parsed = Parsed(text)
    assert [tag for tag, _ in parsed.tags if tag == "script"] == []
    # title, h1, lead, a column, two cells, name and text of a fact; heading and caption of the picture
    assert parsed.text.count(NASTY) == 10
    assert [attrs["alt"] for tag, attrs in parsed.tags if tag == "img"] == [NASTY]


def test_it_follows_the_reader(tmp_path: Path) -> None:
    text = page(tmp_path, "Rings")
    assert "prefers-color-scheme: dark" in text
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in Parsed(text).tags
