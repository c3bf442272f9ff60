"""YAML files via OmegaConf: read as plain dicts, with interpolations resolved after all files are merged."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.config.tree import join_path
from treadle.errors import ConfigError, MissingExtraError

SUFFIXES = (".yaml", ".yml")
_MISSING = "???"


class Pending(str):
    """String in a YAML file that is an interpolation or a missing value."""

    file: str


class _Box:
    """Opaque container for objects in OmegaConf."""

    def __init__(self, content: Any):
        self.content = content


def parse(raw: bytes, file: Path) -> dict[str, Any]:
    """Parse the content of a YAML file.

    Args:
        raw: the content.
        file: path of the file, for messages.

    Returns:
        Plain dicts and lists; strings that :func:`resolve` must process are :class:`Pending`.

    Raises:
        ConfigError: it is not UTF-8 YAML, or not a mapping.
        ImportError: OmegaConf is not installed.
    """
    omegaconf, yaml = _packages(file)
    try:
        text = raw.decode("utf-8-sig")
        loaded = omegaconf.OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, omegaconf.errors.OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split()).replace(' in "<file>", line', ", line")
        raise ConfigError(f"{file}: not a YAML configuration: {reason}") from error
    content = omegaconf.OmegaConf.to_container(loaded, resolve=False)
    blank = all(line.strip() == "" or line.lstrip().startswith("#") for line in text.splitlines())
    if blank or not isinstance(content, dict):
        found = "is empty" if blank else f"holds a {type(content).__name__}"
        raise ConfigError(f"{file}: {found}; a YAML configuration is a mapping of keys to values")
    marked: dict[str, Any] = _marked(content, str(file))
    return marked


def _marked(value: Any, file: str) -> Any:
    if isinstance(value, dict):
        return {key: _marked(item, file) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(item, file) for item in value]
    if isinstance(value, str) and ("${" in value or value == _MISSING):
        pending = Pending(value)
        pending.file = file
        return pending
    return value


def resolve(config: dict[str, Any]) -> dict[str, Any]:
    """Resolve interpolations in a configuration merged from all files.

    Args:
        config: configuration, changed in place; without :class:`Pending` strings it is returned unchanged.

    Returns:
        The same dict.

    Raises:
        ConfigError: an interpolation refers to nothing, or a mandatory value is missing.
    """
    places = list(_pending(config, ()))
    if not places:
        return config
    omegaconf, _ = _packages(Path(places[0][1].file))
    root = omegaconf.OmegaConf.create(_guarded(config), flags={"allow_objects": True})
    for keys, text in places:
        try:
            value = _at(root, keys)
            if omegaconf.OmegaConf.is_config(value):
                value = omegaconf.OmegaConf.to_container(value, resolve=True)
        except omegaconf.errors.OmegaConfBaseException as error:
            raise ConfigError(_unresolved(keys, text, error)) from error
        _at(config, keys[:-1])[keys[-1]] = _unboxed(value)
    return config


def _unresolved(keys: tuple[Any, ...], text: Pending, error: Exception) -> str:
    place = ""
    for key in keys:
        place = join_path(place, key)
    if text == _MISSING:
        return f"{text.file}: {place}: '???' marks a mandatory value, but no later file sets it; set it there"
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{text.file}: {place}: {str(text)!r} cannot be resolved: {reason}; name a key of the merged configuration"


def _pending(value: Any, keys: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Pending]]:
    if isinstance(value, Pending):
        return [(keys, value)]
    # Never in a tuple: YAML has none, and tuples of Python files contain no strings from YAML files.
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in _pending(item, (*keys, key))]


def _at(node: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        node = node[key]
    return node


def _guarded(value: Any) -> Any:
    """Return a copy for OmegaConf: strings of Python files are escaped, since only YAML files interpolate."""
    if isinstance(value, dict):
        return {key: _guarded(item) for key, item in value.items() if isinstance(key, (str, int, float))}
    if isinstance(value, (list, tuple)):
        return [_guarded(item) for item in value]
    if isinstance(value, Pending):
        return str(value)
    if isinstance(value, str):
        return _escaped(value)
    return value if value is None or isinstance(value, (bool, int, float)) else _Box(value)


def _escaped(text: str) -> str:
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


def _unboxed(value: Any) -> Any:
    if isinstance(value, _Box):
        return value.content
    if isinstance(value, dict):
        return {key: _unboxed(item) for key, item in value.items()}
    return [_unboxed(item) for item in value] if isinstance(value, list) else value


def dump(config: Mapping[str, Any]) -> str:
    """Format a configuration of plain values as YAML."""
    omegaconf, _ = _packages(Path("a YAML file"))
    text: str = omegaconf.OmegaConf.to_yaml(omegaconf.OmegaConf.create(_guarded(config)))
    return text


def _packages(file: Path) -> tuple[Any, Any]:
    try:
        import omegaconf
        import yaml
    except ImportError as error:
        raise MissingExtraError(
            f"{file}: YAML files need OmegaConf ({error}): pip install 'treadle[config]'"
        ) from error
    return omegaconf, yaml
