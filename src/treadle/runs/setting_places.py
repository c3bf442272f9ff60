"""Where the settings of a configuration file stand, for messages about them."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.config.tree import join_path
from treadle.errors import ConfigError
from treadle.runs.setting_names import first_name, whole_name


@dataclass(frozen=True)
class Entry:
    """A key of a configuration file.

    Attributes:
        line: where it stands, from 1.
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
        changed = dict(_override(text) for text in overrides)
        given = set(changed)
        known = [*found, *(key for key in given if key not in found)]
        if not isinstance(error, ConfigError):
            _add_place(error, file, found)
            raise
        values = {key: entry.text for key, entry in found.items()} | changed
        text = _told_by_value(whole_name(str(error), known, {}), values)
        text += _place(text, file, found, given)
        if text == str(error):
            raise
        raise ConfigError(text) from error


def _override(text: str) -> tuple[str, str]:
    """Returns the key of ``key=value`` and the text that it sets."""
    key, _, value = text.removeprefix("+").partition("=")
    return key.rstrip("!+- "), value.strip().strip("'\"")


def _told_by_value(text: str, values: Mapping[str, str]) -> str:
    """Returns a message about an argument of many settings with the one in front whose value it names."""
    name = first_name(text)
    fitting = [key for key, value in values.items() if key.endswith(f".{name}") and value and f"'{value}'" in text]
    return fitting[0] + text[len(name) :] if len(fitting) == 1 else text


def _place(text: str, file: Path, found: dict[str, Entry], given: set[str]) -> str:
    name = first_name(text)
    if name in given or file.name in text:
        return ""
    unknown = re.match(r"unknown setting '([^']+)'", text)
    line = found[name].line if name in found else found[unknown[1]].line if unknown and unknown[1] in found else None
    if line is None:
        line = _line_of_type(text, found)
    return "" if line is None else f" ({file}, line {line})"


def _line_of_type(text: str, found: dict[str, Entry]) -> int | None:
    """Returns the line of the only ``type`` whose value the text names."""
    types = [item for key, item in found.items() if key.endswith("type") and item.text]
    lines = [item.line for item in types if f"'{item.text}'" in text or f" {item.text}(" in text]
    return lines[0] if len(lines) == 1 else None


def _add_place(error: Exception, file: Path, found: dict[str, Entry]) -> None:
    """Adds to an error of a constructor the line of the section that it was built from."""
    for note in getattr(error, "__notes__", ()):
        if note.startswith("while building ") and (line := _line_of_type(note, found)) is not None:
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
    except (OSError, ValueError, SyntaxError, RecursionError):  # whoever loads it says what is wrong with it
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
