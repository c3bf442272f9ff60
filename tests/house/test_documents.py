"""Documents name what exists, and their blocks run.

A block of a page in `docs` is executed by its language and its title:

- ``python``: run, with the names of the blocks before it; ``sh``: each line is a command, of treadle or of python;
- with a title that is a file name, such as ``title="train.py"``: written to that file, not run;
- ``sh`` with a title, which says how long it takes: the settings of each ``treadle train`` are checked;
- ``py`` with the path of a function as its title: a part of its source, compared with it line by line;
- with a title that says "not run", or in any other language: only shown.

What a shell block shows is parsed in any case, and the README is run: see ``test_shown_commands.py``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pydoc
import re
import runpy
import shlex
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

from treadle.builder import REGISTRY
from treadle.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(DOCS / name for name in PAGES)]
BLOCK = re.compile(r"^( *)```(\w+)(?: title=\"([^\"]*)\")?\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)
# Its blocks are the files of one project, see tests/examples/test_configuration_page.py.
RUN_ELSEWHERE = {"configuration.md"}
TOGETHER = [
    ["graphs.md", "start/graphs.md", "coming-from/mspe.md"],
    ["hugging-face.md", "start/language.md", "coming-from/hf-trainer.md", "coming-from/accelerate.md"],
    ["astro.md", "start/astronomy.md", "coming-from/astromodal.md"],
]
# What the packages on a page warn of when they are used as their own documents say.
IGNORED = {
    # peft 0.21 asks a model of transformers 5.24 by the old name.
    "hugging-face.md": ["ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"],
    # lightning 2.6 asks torch's trees by an old name, and advises more workers and a logger.
    "coming-from/lightning.md": ["ignore:.*LeafSpec:FutureWarning", "ignore:.*(num_workers|logging interval)"],
    # ignite 0.5 loads all of torch.distributed.optim, which uses torch.jit.
    "coming-from/ignite.md": ["ignore:.*torch.jit.interface:DeprecationWarning"],
    # torch_geometric compiles functions with torch.jit.script when it is imported.
    "": ["ignore:.*torch.jit.script:DeprecationWarning"],
}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_table_begins_with_its_header(path):
    lines = BLOCK.sub("", path.read_text(encoding="utf-8")).splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("|")]
    first = [number for number in rows if number - 1 not in rows]
    assert [lines[number] for number in first if not re.match(r"\|[ :]*-", lines[number + 1])] == []


def blocks(page):
    """Yield language, title and text of each block of a page."""
    for indent, language, title, body in BLOCK.findall(PAGES[page]):
        yield language, title, textwrap.dedent(body) if indent else body


def is_run(language, title):
    return language in ("python", "sh") and "not run" not in title and not is_file(title)


def is_file(title):
    return re.fullmatch(r"[\w/]+\.\w+", title) is not None


def pages_that_run():
    """Yield groups of pages; one process loads a heavy package for all of its group."""
    found = [
        page
        for page in PAGES
        if page not in RUN_ELSEWHERE and any(is_run(language, title) for language, title, _ in blocks(page))
    ]
    for group in [*TOGETHER, *([page] for page in found if not any(page in group for group in TOGETHER))]:
        filters = [*IGNORED[""], *(text for page in group for text in IGNORED.get(page, []))]
        marks = [pytest.mark.filterwarnings(text) for text in filters]
        yield pytest.param(group, marks=marks, id=" ".join(group))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_test_and_file_that_a_document_names_exists(document):
    text = document.read_text(encoding="utf-8")
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{document.name}: {name}"
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", BLOCK.sub("", text)):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def messages():
    """Return the texts in the source, with a mark for each value in them."""
    for path in (ROOT / "src" / "treadle").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_that_are_explained_exist():
    section = PAGES["guide/faq.md"].split("## What does this message mean?")[1]
    explained = re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)
    assert len(explained) >= 10
    source = "\n".join(messages())
    assert [text for text in explained if text not in source] == []


def test_every_page_has_a_place_in_the_site():
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page for page in PAGES if not re.search(rf"[ :]{re.escape(page)}$", site, flags=re.MULTILINE)] == []


@pytest.fixture
def give(monkeypatch):
    """Run a command in this process as in a new one that has imported nothing of its folder."""

    def give(command):
        words = shlex.split(command, comments=True)
        with monkeypatch.context() as patch:
            patch.setattr(REGISTRY, "_objects", dict(REGISTRY._objects))
            patch.setattr(sys, "path", [".", *sys.path])
            patch.setattr(sys, "argv", words[1:] if words[0] == "python" else words)
            before = set(sys.modules)
            if words[0] == "python":
                runpy.run_path(words[1], run_name="__main__")
            else:
                assert words[0] == "treadle", command
                with pytest.raises(SystemExit) as left:
                    main(words[1:])
                assert left.value.code == 0, command
            for name in set(sys.modules) - before:
                if (Path.cwd() / f"{name}.py").exists():
                    del sys.modules[name]

    return give


@pytest.mark.parametrize("pages", list(pages_that_run()))
def test_the_blocks_of_a_page_run_one_after_another(pages, tmp_path, monkeypatch, capsys, give):
    for number, page in enumerate(pages):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        names: dict[str, object] = {"__name__": "__main__"}
        for language, title, block in blocks(page):
            if is_file(title):
                Path(title).write_text(block, encoding="utf-8")
            elif is_run(language, title) and language == "python":
                exec(compile(block, page, "exec"), names)
            elif is_run(language, title):
                for command in block.splitlines():
                    give(f"{command} --show-settings" if title else command)


def quoted():
    """The functions that pages quote, with all that is quoted of each."""
    found = {}
    for page in PAGES:
        for language, title, text in blocks(page):
            if language == "py":
                found.setdefault((page, title), []).append(text)
    return found


@pytest.mark.parametrize(("page", "path"), list(quoted()))
def test_a_function_is_quoted_as_it_stands(page, path):
    code = "\n".join(quoted()[page, path]).splitlines()
    assert [line for line in code if line] == body_of(path), f"{path} has changed: bring {page} up to date"


def body_of(path):
    """The lines of a function below its docstring, without empty ones."""
    source = textwrap.dedent(inspect.getsource(pydoc.locate(path)))
    (function,) = ast.parse(source).body
    first = function.body[1 if ast.get_docstring(function) else 0]
    return [line for line in textwrap.dedent("\n".join(source.splitlines()[first.lineno - 1 :])).splitlines() if line]


def test_the_tours_of_the_source_name_its_files_and_their_lengths():
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", PAGES["guide/reading.md"], flags=re.MULTILINE)
    assert len(rows) == 21
    stated = {name: int(lines) for name, lines in rows}
    counted = {name: lines_of_code(ROOT / "src" / "treadle" / name) for name in stated}
    wrong = {name: (stated[name], lines) for name, lines in counted.items() if abs(stated[name] - lines) > 10}
    assert not wrong, f"docs/guide/reading.md states other lengths: {wrong}"
    assert sum(counted.values()) <= 3500  # an afternoon


def lines_of_code(file):
    """Count the lines of a file that are no docstring, comment or empty line."""
    source = file.read_text(encoding="utf-8")
    left_out = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            left_out.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(bool(line.strip()) and line.lstrip()[0] != "#" and number not in left_out for number, line in lines)


def test_a_block_that_is_not_run_is_python_all_the_same():
    shown = [(page, text) for page in PAGES for language, _, text in blocks(page) if language == "python"]
    for page, text in shown:
        compile(text, page, "exec")


def test_a_block_of_python_is_left_out_only_where_it_shows_a_package_that_cannot_be_installed():
    """Such a block is titled "NAME (not run)", has nothing of ours, and is followed by one of ours, which runs."""
    left_out = 0
    for page in PAGES:
        found = [(title, text) for language, title, text in blocks(page) if language == "python"]
        for index, (title, text) in enumerate(found):
            if "not run" in title:
                left_out += 1
                imported = re.findall(r"^(?:from|import) (\w+)", text, flags=re.MULTILINE)
                assert imported, page
                assert all(importlib.util.find_spec(name) is None or name == "src" for name in imported), page
                assert found[index + 1][0] == "treadle", page
                assert is_run("python", "treadle")
    assert left_out == 6


# -- the tables of names --------------------------------------------------------------------------------------------

PLACES = [
    "treadle",
    *(f"treadle.{name}" for name in ("spectra", "graphs", "astro", "text", "config", "builder", "data")),
]


@cache
def public():
    """Every public name and what it is."""
    found = {}
    for place in reversed(PLACES):
        module = importlib.import_module(place)
        found |= {name: getattr(module, name) for name in module.__all__}
    return found


def missing(code):
    """Return the missing part of ``Class``, ``Class.method(argument=)`` or ``treadle.pack.name``; None if none is."""
    path, called, argument = re.fullmatch(r"([\w.]+)(\((?:(\w+)=)?.*\))?", code).groups()
    if path.startswith("treadle"):
        owner, _, name = path.rpartition(".")
        return None if not owner or pydoc.locate(path) is not None else f"{owner} has no {name}"
    value = public().get(path.split(".")[0])
    if value is None:
        return f"{path.split('.')[0]} is no public name"
    for part in path.split(".")[1:]:
        if not hasattr(value, part):
            return f"{path}: no {part}"
        value = getattr(value, part)
    if argument and argument not in inspect.signature(value).parameters:
        return f"{path} takes no {argument}"
    return None if value is None or not called or callable(value) else f"{path} cannot be called"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.startswith("coming-from/") and "| treadle |" in PAGES[page]]
)
def test_the_names_in_a_table_of_names_are_ours(page):
    checked = 0
    for row in re.findall(r"^\|(.+)\|$", PAGES[page], flags=re.MULTILINE):
        for code in re.findall(r"`([^`]+)`", row.split(" | ")[-1]):
            if re.match(r"treadle[.\w]*$|[A-Z]\w+(\.\w+)*(\(.*\))?$|[a-z]\w*\(.*\)$", code):
                assert missing(code) is None, f"{page}: `{code}`: {missing(code)}"
                checked += 1
    assert checked > 4


def test_a_name_that_is_not_ours_is_seen():
    assert missing("Trainer(modle=)") == "Trainer takes no modle"
    assert missing("Trainer.fitt()") == "Trainer.fitt: no fitt"
    assert missing("treadle.spectra.ChemoMEA") == "treadle.spectra has no ChemoMEA"
    assert missing("CheckpointingHook(keep_previous=)") is None
