"""Single changes to a configuration, as they are typed on a command line: ``optimizer.lr=3e-4``."""

from __future__ import annotations

import ast
import logging
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from treadle.config.tree import copied, join_path, same_tuple
from treadle.errors import ConfigError, nearest

_log = logging.getLogger("treadle.config")

_FORM = re.compile(r"(?P<new>\+?)(?P<path>[^=]*?)(?P<sign>!=|\+=|-=|=)(?P<value>.*)", re.DOTALL)
_PART = re.compile(r"(?:^|(?!^)\.)(?P<name>[^.\[\]]+)|\[(?P<index>[^\[\]]+)\]")
_FORMS = "'a.b=1' sets, 'l[0]=x' sets an entry, 'l+=x' appends, 'l-=x' removes, 'a.b!=' deletes, '+a.b=1' adds a key"
_FOREIGN_WORDS = {"true": "True", "false": "False", "null": "None", "none": "None"}


@dataclass(frozen=True)
class _Override:
    """One parsed override; ``depth`` indices into ``keys`` while the configuration is walked."""

    text: str
    new: bool
    keys: tuple[Any, ...]
    sign: str
    value: Any

    def place(self, depth: int) -> str:
        """Names the place that the first ``depth`` keys lead to."""
        place = ""
        for key in self.keys[:depth]:
            place = join_path(place, key)
        return place or "the configuration"

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"override {self.text!r}: {message}")


def apply_overrides(config: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Changes a configuration in place, one override after the other.

    ======== =====================================================================================
    form     what it does
    ======== =====================================================================================
    a.b=1    sets a key that exists; ``l[0]=x`` an entry of a list
    +a.b=1   sets a key that may be new, and makes the dicts on the way to it
    l+=x     appends to a list
    l-=x     removes the first entry that is equal
    a.b!=    deletes a key, or with ``l[0]!=`` an entry
    ======== =====================================================================================

    Values are Python literals; what is none is a string. A key with dots is written ``a["x.y"]=1``.

    Args:
        config: the dict to change.
        overrides: the changes; all are read before the first is applied.

    Returns:
        The same dict.

    Raises:
        ConfigError: a form that is none of these, a path that does not exist, or ``-=`` of an absent value. The
            message names the nearest key.

    Example:
        >>> apply_overrides({"optimizer": {"lr": 0.1}, "tags": ["a"]}, ["optimizer.lr=3e-4", "tags+=b", "+seed=1"])
        {'optimizer': {'lr': 0.0003}, 'tags': ['a', 'b'], 'seed': 1}
    """
    if not isinstance(config, dict):
        raise ConfigError(f"apply_overrides: config must be a dict, not {type(config).__name__}")
    parsed = [_parse(text) for text in ([overrides] if isinstance(overrides, str) else overrides)]
    for override in parsed:
        _apply(config, override, 0)
    return config


def _parse(text: str) -> _Override:
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"override {text!r} has no '='; the forms are: {_FORMS}")
    sign, raw = match["sign"], match["value"]
    new = bool(match["new"])
    override = _Override(text, new, _keys(match["path"].strip(), text), sign, _literal(raw))
    if new and sign != "=":
        raise override.error(f"'+' before a path goes with '=' only; the forms are: {_FORMS}")
    if sign == "!=" and raw.strip():
        raise override.error(f"'!=' deletes and takes no value; the forms are: {_FORMS}")
    return override


def _keys(path: str, text: str) -> tuple[Any, ...]:
    keys: list[Any] = []
    at = 0
    while at < len(path):
        part = _PART.match(path, at)
        if part is None:
            raise ConfigError(f"override {text!r}: {path[at:]!r} is no path; write it like 'model.layers[2].type'")
        index = _literal(part["index"] or "")
        if type(index) not in (int, str):
            raise ConfigError(f"override {text!r}: [{part['index']}] is neither an index nor a key")
        keys.append(index if part["name"] is None else part["name"])
        at = part.end()
    if not keys:
        raise ConfigError(f"override {text!r} names no key; the forms are: {_FORMS}")
    return tuple(keys)


def _literal(text: str) -> Any:
    try:
        with warnings.catch_warnings():  # an odd escape in a string is not the user's code
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _apply(node: Any, override: _Override, depth: int) -> Any:
    """Applies an override below ``node``; returns ``node``, or its successor where it is a tuple."""
    if isinstance(node, tuple):
        return same_tuple(node, _apply(list(node), override, depth))
    key = override.keys[depth]
    last = depth + 1 == len(override.keys)
    if override.new and isinstance(node, dict):
        if key not in node and any(isinstance(later, int) for later in override.keys[depth + 1 :]):
            raise override.error(
                f"there is no list {override.place(depth + 1)!r} to take an entry of; add a list first"
            )
        if not last:
            node.setdefault(key, {})
    else:
        _require(node, override, depth)
    if last:
        _change(node, key, override)
    else:
        node[key] = _apply(node[key], override, depth + 1)
    return node


def _require(node: Any, override: _Override, depth: int) -> None:
    """Refuses a key or index that ``node`` does not have."""
    key, place = override.keys[depth], override.place(depth)
    if isinstance(node, dict):
        if key not in node:
            hint = f"; a new key needs the form {'+' + override.text!r}" if override.sign == "=" else ""
            raise override.error(f"no key {override.place(depth + 1)!r}; {_nearest_path(node, override, depth)}{hint}")
    elif isinstance(node, list):
        if not isinstance(key, int):
            raise override.error(f"{place} is a list and takes an index such as [0], not {key!r}")
        if not -len(node) <= key < len(node):
            raise override.error(f"{place} has {len(node)} entries and no [{key}]; append with '{place}+=…'")
    else:
        raise override.error(f"{place} is {node!r}, which has no keys")


def _nearest_path(node: dict[Any, Any], override: _Override, depth: int) -> str:
    """Says which path was meant: one that ends alike, else the nearest key at this place."""
    last = override.keys[-1]
    alike = _path_to(node, last) if depth == len(override.keys) - 1 else None
    place = "" if depth == 0 else override.place(depth)
    prefix = f"{place}." if place else ""
    if alike is not None:
        return f"did you mean {prefix + alike!r}?"
    return nearest(str(override.keys[depth]), map(str, node), prefix=prefix) if node else "there is no key at all"


def _path_to(node: Any, key: Any) -> str | None:
    for name, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, dict):
            found = key if key in value else _path_to(value, key)
            if found is not None:
                return f"{name}.{found}"
    return None


def _change(node: Any, key: Any, override: _Override) -> None:
    if override.sign == "!=":
        del node[key]
    elif override.sign == "=":
        _warn_of_foreign_word(override)
        node[key] = copied(override.value)
    else:
        _change_entries(node, key, override)


def _change_entries(node: Any, key: Any, override: _Override) -> None:
    target, place = node[key], override.place(len(override.keys))
    if not isinstance(target, (list, tuple)):
        raise override.error(f"{place} is {target!r} and no list; '+=' and '-=' change lists")
    entries = target if isinstance(target, list) else list(target)
    if override.sign == "+=":
        _warn_of_foreign_word(override)
        entries.append(copied(override.value))
    else:
        # True == 1 in Python, but removing a flag must not remove a number.
        equal = [entry == override.value and type(entry) is type(override.value) for entry in entries]
        if True not in equal:
            known = nearest(str(override.value), map(str, entries)) if entries else "it is empty"
            raise override.error(f"{place} has no entry {override.value!r}; {known}")
        del entries[equal.index(True)]
    if isinstance(target, tuple):
        node[key] = tuple(entries)


def _warn_of_foreign_word(override: _Override) -> None:
    word = override.value.lower() if isinstance(override.value, str) else ""
    if word in _FOREIGN_WORDS:
        _log.warning(
            "override %r sets the string %r; write %s for the value",
            override.text,
            override.value,
            _FOREIGN_WORDS[word],
        )
