"""Errors that name a setting by its dotted name, and the line of the file that sets it, rather than an argument."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from treadle.config.grammar import text_of
from treadle.config.objects import BuildNote
from treadle.config.tree import join_path
from treadle.errors import ConfigError


class WrittenSetting(NamedTuple):
    """Setting as written: its line in the file, 0 for the command line, and its text, empty for a section."""

    line: int
    text: str


@contextlib.contextmanager
def settings_named(known: Collection[str], renamed: Mapping[str, str] | None = None) -> Iterator[None]:
    """Rename the argument of a ConfigError raised inside the block to a known setting, see :func:`setting_of`.

    Example:
        >>> with settings_named(["model.width", "lr"]):
        ...     raise ConfigError("must be at least 1", argument="width", value=0)
        Traceback (most recent call last):
        treadle.errors.ConfigError: model.width=0: must be at least 1
    """
    try:
        yield
    except ConfigError as error:
        name = setting_of(error.argument, known, renamed or {})
        if name is None or name == error.argument:
            raise
        raise error.renamed(name) from error


def setting_of(argument: str | None, known: Collection[str], renamed: Mapping[str, str]) -> str | None:
    """Return the only known setting that ends with an argument, bare or dotted; if there is none, the argument.

    Args:
        argument: the name; its first part may be a class or an argument: ``TrainerConfig.grad_clip``,
            ``pe_config.node.dim``.
        known: dotted names of all settings.
        renamed: argument -> dotted name of the setting, if the two end differently.
    """
    if argument is None or argument in known:
        return argument
    if argument in renamed:
        return renamed[argument]
    for end in (argument, argument.partition(".")[2], argument.rpartition(".")[2]):
        fitting = [key for key in known if end and f".{key}".endswith(end if end[0] == "[" else f".{end}")]
        if len(fitting) == 1:
            return fitting[0]
    return argument


@contextlib.contextmanager
def settings_placed(file: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Add the line in a configuration to errors raised inside the block, and name settings like :func:`settings_named`.

    Args:
        file: the configuration.
        overrides: the strings ``key=value`` of the command line, which take precedence over the file and have no line.
    """
    try:
        yield
    except Exception as error:
        written = {**settings_in_file(file), **{key: WrittenSetting(0, text) for key, text in map(text_of, overrides)}}
        if isinstance(error, ConfigError) and (whole := _placed(error, file, written)) is not error:
            raise whole from error
        for note in getattr(error, "__notes__", ()):
            section = _only("type", note.target, written) if isinstance(note, BuildNote) else None
            if section and written[section].line:
                error.add_note(f"its section: {file}, line {written[section].line}")  # type: ignore[attr-defined]  # 3.11
                break
        raise


def _placed(error: ConfigError, file: Path, written: Mapping[str, WrittenSetting]) -> ConfigError:
    name = setting_of(error.argument, written, {})
    name = _only(f".{name}", error.value, written) or name
    setting = written.get(name or "") or written.get(_only("type", error.value, written) or "")
    whole = error if name is None or name == error.argument else error.renamed(name)
    return whole.extended(f" ({file}, line {setting.line})") if setting and setting.line else whole


def _only(end: str, text: Any, written: Mapping[str, WrittenSetting]) -> str | None:
    """Return the only setting with a given ending and text; None if there is none or several."""
    names = [name for name, setting in written.items() if name.endswith(end) and text and setting.text == text]
    return names[0] if len(names) == 1 else None


def settings_in_file(file: Path) -> dict[str, WrittenSetting]:
    """Return every setting of a configuration file by its dotted name; empty if the file cannot be read."""
    try:
        content = file.read_text(encoding="utf-8-sig")
        roots = _roots_of_python(ast.parse(content)) if file.suffix.lower() == ".py" else _roots_of_yaml(content)
        return {name: setting for root in roots for name, setting in _settings(root, "")}
    except (OSError, ValueError, SyntaxError, RecursionError):  # reported when the file is loaded
        return {}


def _roots_of_yaml(content: str) -> list[Any]:
    with contextlib.suppress(ImportError):
        import yaml

        with contextlib.suppress(yaml.YAMLError):
            return [yaml.compose(content, Loader=yaml.SafeLoader)]
    return []


def _roots_of_python(tree: ast.Module) -> list[Any]:
    """Return the values that ``config = ...`` assigns and ``def config()`` returns."""
    roots: list[Any] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "config" for target in node.targets):
            roots.append(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name == "config":
            roots += [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return)]
    return roots


def _settings(node: Any, place: str) -> Iterator[tuple[str, WrittenSetting]]:
    for key, child, line in _children(node):
        here, value = join_path(place, key), getattr(child, "value", "")
        plain = isinstance(child, ast.Constant) or isinstance(value, str)
        yield here, WrittenSetting(line, str(value) if plain else "")
        yield from _settings(child, here)


def _children(node: Any) -> Iterator[tuple[Any, Any, int]]:
    """Yield key, value and line of each entry of a mapping or list, in a syntax tree or in YAML."""
    if isinstance(node, ast.Dict):
        keyed = zip(node.keys, node.values, strict=True)
        yield from ((key.value, child, child.lineno) for key, child in keyed if isinstance(key, ast.Constant))
    elif isinstance(node, (ast.List, ast.Tuple)):
        yield from ((index, child, child.lineno) for index, child in enumerate(node.elts))
    elif isinstance(getattr(node, "value", None), list):
        for index, child in enumerate(node.value):
            key, value = child if isinstance(child, tuple) else (None, child)
            mark = (value if key is None else key).start_mark
            yield index if key is None else key.value, value, mark.line + 1
