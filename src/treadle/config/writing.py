"""Formatting of configurations, and writing to files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.checkpoint.store import write_text
from treadle.config import yaml_files
from treadle.config.tree import join_path
from treadle.errors import ConfigError
from treadle.errors.arguments import checked

_WIDTH = 88
_HEADER = "# fmt: off\n# Auto-generated config snapshot\n"


@checked
def format_config(config: Mapping[str, Any]) -> str:
    """Format a configuration as a Python expression, one key per line if long.

    Args:
        config: any nesting of dicts, lists and tuples; values that are not plain appear as their ``repr``.

    Returns:
        The formatted string, without a trailing newline.

    Example:
        >>> print(format_config({"lr": 0.1, "betas": (0.9,), "limit": float("inf")}))
        {"lr": 0.1, "betas": (0.9,), "limit": float("inf")}
    """
    return _expression(config, 0, 0)


@checked
def save_config(config: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a configuration atomically to a file that :func:`load_config` reads back equal.

    Args:
        config: any nesting of dicts, lists, tuples, numbers, strings, bytes, bools and None.
        path: a ``.py`` file, or a ``.yaml`` or ``.yml`` file (these need OmegaConf); its folder is created.

    Raises:
        ConfigError: such a file cannot hold a value, named by its key path, or the file type is unknown.
        CheckpointError: the file cannot be written; the previous content is intact.
        ImportError: a YAML file, and OmegaConf is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.py"
        >>> save_config({"lr": 0.1, "betas": (0.9, 0.999)}, file)
        >>> print(file.read_text().splitlines()[-1])
        config = {"lr": 0.1, "betas": (0.9, 0.999)}
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix == ".py":
        _refuse_objects(config, "", str(target))
        write_text(f"{_HEADER}config = {format_config(config)}\n", target)
    elif suffix in yaml_files.SUFFIXES:
        _refuse_objects(config, "", str(target), yaml=True)
        text = yaml_files.dump(config)
        again = yaml_files.parse(text.encode(), target)
        if format_config(yaml_files.resolve(again)) != format_config(config):
            raise ConfigError(f"{target}: YAML cannot hold this configuration unchanged; save it as a .py file")
        write_text(text, target)
    else:
        raise ConfigError(f"{target}: the name of a configuration file ends in .py, .yaml or .yml")


def _refuse_objects(value: Any, place: str, file: str, *, yaml: bool = False) -> None:
    """Raise for values that would not be read back equal."""
    if isinstance(value, Mapping):
        if yaml and not place and "parents" in value:
            raise ConfigError(f"{file}: parents: this key names parent files in YAML; rename it or save a .py file")
        for key, item in value.items():
            here = join_path(place, key)
            if not isinstance(key, (str, int, float) if yaml else (str, int, float, bytes, tuple, type(None))):
                raise ConfigError(f"{file}: {here}: a key of type {type(key).__name__} cannot be saved; use a string")
            if isinstance(key, tuple):
                _refuse_objects(key, here, file)
            _refuse_objects(item, here, file, yaml=yaml)
    elif isinstance(value, list) or (isinstance(value, tuple) and not yaml):
        for index, item in enumerate(value):
            _refuse_objects(item, join_path(place, index), file, yaml=yaml)
    elif isinstance(value, tuple) or (yaml and isinstance(value, bytes)):
        raise ConfigError(f"{file}: {place}: YAML has no {type(value).__name__}; use a list or string, or a .py file")
    elif yaml and value == "???":
        raise ConfigError(f"{file}: {place}: '???' means a missing value in YAML; give a value or save a .py file")
    elif value is not None and not isinstance(value, (bool, int, float, str, bytes)):
        raise ConfigError(
            f"{file}: {place}: a value of type {type(value).__name__} cannot be saved; save what it is made from "
            "(dicts, lists, tuples, numbers, strings, bools, None), for a path or a type its name as a string"
        )


def _expression(value: Any, indent: int, used: int) -> str:
    """Format a value on one line if it fits after ``used`` characters, else one entry per line."""
    line = _line(value)
    if not isinstance(value, (Mapping, list, tuple)) or not value or used + len(line) <= _WIDTH:
        return line
    inner = indent + 4
    margin = " " * inner
    if isinstance(value, Mapping):
        heads = [f"{_line(key)}: " for key in value]
        items = list(value.values())
    else:
        heads = [""] * len(value)
        items = list(value)
    rows = [
        f"{margin}{head}{_expression(item, inner, inner + len(head) + 1)},\n"
        for head, item in zip(heads, items, strict=True)
    ]
    opening, closing = _brackets(value)
    return f"{opening}\n{''.join(rows)}{' ' * indent}{closing}"


def _line(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_line(key)}: {_line(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        opening, closing = _brackets(value)
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        return f"{opening}{', '.join(_line(item) for item in value)}{comma}{closing}"
    if isinstance(value, float):
        text = float.__repr__(value)
        return text if math.isfinite(value) else f'float("{text}")'
    # The repr of a subclass, such as an enum or a NumPy number, is not a literal; that of its base is.
    for plain in (bool, int, str, bytes):
        if isinstance(value, plain):
            return _double_quoted(plain.__repr__(value))
    return repr(value)


def _double_quoted(literal: str) -> str:
    """Return the ``repr`` of a string in double quotes, unless that needs escapes."""
    body = literal.lstrip("b")
    if body[:1] != "'" or '"' in body:
        return literal
    return literal[: len(literal) - len(body)] + '"' + body[1:-1] + '"'


def _brackets(value: Any) -> tuple[str, str]:
    if isinstance(value, Mapping):
        return "{", "}"
    return ("[", "]") if isinstance(value, list) else ("(", ")")
