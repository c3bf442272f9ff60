"""Lines of the settings of a configuration file, used in error messages."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.config.grammar import text_of
from treadle.config.objects import BuildNote
from treadle.config.tree import join_path
from treadle.errors import ConfigError
from treadle.runs.setting_names import setting_of


@dataclass(frozen=True)
class Entry:
    """A key of a configuration file.

    Attributes:
        line: its line, from 1.
        text: its value, if it is a text or a number; else empty.
    """

    line: int
    text: str


@contextlib.contextmanager
def settings_placed(file: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Has errors name a setting by its whole name, and the line of the file if the value is from there.

    Args:
        file: the configuration.
        overrides: the texts ``key=value`` of the command line; a setting among them is not looked up in the file.

    Raises:
        ConfigError: what was raised, with the place behind it.
    """
    try:
        yield
    except Exception as error:
        found = entries(file)
        given = dict(text_of(override) for override in overrides)
        if not isinstance(error, ConfigError):
            _add_place(error, file, found)
            raise
        name = _setting_of(error, found, given)
        line = None if name in given else found[name].line if name in found else _line_of_type(error.value, found)
        if name == error.argument and line is None:
            raise
        whole = error if name is None or name == error.argument else error.renamed(name)
        place = "" if line is None else f" ({file}, line {line})"
        raise whole.extended(place) from error


def _setting_of(error: ConfigError, found: Mapping[str, Entry], given: Mapping[str, str]) -> str | None:
    """Returns the setting that an error is about; of several that end alike, the only one with the value."""
    name = setting_of(error.argument, {**found, **given}, {})
    texts = {**{key: entry.text for key, entry in found.items()}, **given}
    fitting = [key for key, text in texts.items() if key.endswith(f".{name}") and text and text == error.value]
    return fitting[0] if len(fitting) == 1 else name


def _line_of_type(target: Any, found: Mapping[str, Entry]) -> int | None:
    """Returns the line of the only ``type`` that names what was built."""
    lines = [entry.line for key, entry in found.items() if key.endswith("type") and entry.text and entry.text == target]
    return lines[0] if len(lines) == 1 else None


def _add_place(error: Exception, file: Path, found: Mapping[str, Entry]) -> None:
    """Adds to an error of a constructor the line of the section that it was built from."""
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, BuildNote) and (line := _line_of_type(note.target, found)) is not None:
            error.add_note(f"its section: {file}, line {line}")  # type: ignore[attr-defined]  # from Python 3.11 on
            return


def entries(file: Path) -> dict[str, Entry]:
    """Returns the dotted key of everything in a configuration file; nothing if it cannot be read.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.py"
        >>> _ = path.write_text("config = {'model': {'type': 'mlp'}}")
        >>> entries(path)["model.type"]
        Entry(line=1, text='mlp')
    """
    try:
        content = file.read_text(encoding="utf-8-sig")
        return dict(_of_python(ast.parse(content)) if file.suffix.lower() == ".py" else _of_yaml_text(content))
    except (OSError, ValueError, SyntaxError, RecursionError):  # its error is reported when it is loaded
        return {}


def _of_yaml_text(content: str) -> Iterator[tuple[str, Entry]]:
    try:
        import yaml
    except ImportError:
        return
    with contextlib.suppress(yaml.YAMLError):
        yield from _of_yaml(yaml.compose(content, Loader=yaml.SafeLoader), "")


def _of_yaml(node: Any, place: str) -> Iterator[tuple[str, Entry]]:
    children = getattr(node, "value", None)
    if not isinstance(children, list):
        return
    for index, child in enumerate(children):
        key, value = child if isinstance(child, tuple) else (None, child)
        here = join_path(place, index if key is None else key.value)
        mark = (value if key is None else key).start_mark
        yield here, Entry(mark.line + 1, value.value if isinstance(value.value, str) else "")
        yield from _of_yaml(value, here)


def _of_python(tree: ast.Module) -> Iterator[tuple[str, Entry]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "config" for target in node.targets):
            yield from _of_literal(node.value, "")
        elif isinstance(node, ast.FunctionDef) and node.name == "config":
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield from _of_literal(inner.value, "")


def _of_literal(node: ast.expr, place: str) -> Iterator[tuple[str, Entry]]:
    pairs: list[tuple[Any, ast.expr]] = []
    if isinstance(node, ast.Dict):
        both = zip(node.keys, node.values, strict=True)
        pairs = [(key.value, value) for key, value in both if isinstance(key, ast.Constant)]
    elif isinstance(node, (ast.List, ast.Tuple)):
        pairs = list(enumerate(node.elts))
    for key, value in pairs:
        here = join_path(place, key)
        yield here, Entry(value.lineno, str(value.value) if isinstance(value, ast.Constant) else "")
        yield from _of_literal(value, here)
