"""Command-line overrides of a configuration, such as ``optimizer.lr=3e-4``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from treadle.config.grammar import Assignment, fitted, parse
from treadle.config.tree import copied, same_tuple
from treadle.errors import ConfigError, nearest
from treadle.errors.arguments import checked

Fit = Callable[[Assignment, Any], Any]
"""Returns the value of an assignment for a place, by its present value."""


@checked
def apply_overrides(config: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply overrides to a configuration in place, in order.

    ======== ===================================================================================== form effect ========
    ===================================================================================== a.b=1 sets an existing key;
    ``l[0]=x`` an entry of a list +a.b=1 sets a key that may be new, creating dicts and lists on the path +l[3]=x sets
    an entry that may be new; missing entries before it become None l+=x appends to a list, or creates one if no key has
    a similar name l-=x removes the first equal entry a.b!= deletes a key, or with ``l[0]!=`` an entry ========
    =====================================================================================

    Values are parsed by :func:`treadle.config.grammar.read_value`: true, yes, on, false, no, off, none and null in any
    case, Python literals, lists and dicts; anything else is a string, as is everything in quotes. A value keeps its
    kind: a bool takes only a bool, a number only a number, a string only a string. ``none`` is always allowed, None can
    be replaced by anything, and the form ``+a.b=1`` may change the kind. A key with dots is written ``a["x.y"]=1``.

    Args:
        config: the dict to change.
        overrides: the overrides; all are parsed before the first is applied.

    Returns:
        The same dict.

    Raises:
        ConfigError: the form is unknown, the path does not exist, the value has another kind, or ``-=`` removes an
            absent value. The message suggests the closest key.

    Example:
        >>> apply_overrides({"optimizer": {"lr": 0.1}, "tags": ["a"]}, ["optimizer.lr=3e-4", "tags+=b", "+seed=1"])
        {'optimizer': {'lr': 0.0003}, 'tags': ['a', 'b'], 'seed': 1}
    """
    if not isinstance(config, dict):
        raise ConfigError(f"config must be a dict, not {type(config).__name__}", argument="apply_overrides")
    return apply(config, [parse(text) for text in ([overrides] if isinstance(overrides, str) else overrides)])


def apply(config: dict[str, Any], assignments: Iterable[Assignment], *, fit: Fit = fitted) -> dict[str, Any]:
    """Apply parsed overrides to a configuration in place; see :func:`apply_overrides`.

    Args:
        config: the dict to change.
        assignments: the changes, in order.
        fit: returns the value that an assignment sets, or raises.
    """
    for assignment in assignments:
        _apply(config, assignment, 0, fit)
    return config


def _apply(node: Any, override: Assignment, depth: int, fit: Fit) -> Any:
    """Apply an override below ``node``; return ``node``, or its replacement if it is a tuple."""
    if isinstance(node, tuple):
        return same_tuple(node, _apply(list(node), override, depth, fit))
    key = override.keys[depth]
    last = depth + 1 == len(override.keys)
    if override.new or _begins_list(node, override, depth):
        _make_room(node, override, depth)
    else:
        _require(node, override, depth)
    if last:
        _change(node, key, override, fit)
    else:
        node[key] = _apply(node[key], override, depth + 1, fit)
    return node


def _begins_list(node: Any, override: Assignment, depth: int) -> bool:
    """Return whether ``l+=x`` creates a new list: there is no sibling key of a similar name."""
    key = override.keys[depth]
    if override.sign != "+=" or not isinstance(node, dict) or key in node:
        return False
    return not difflib.get_close_matches(str(key), map(str, node), n=1)


def _make_room(node: Any, override: Assignment, depth: int) -> None:
    """Create a key or index that may be new, with a dict or list if the path continues."""
    key, last = override.keys[depth], depth + 1 == len(override.keys)
    made: Any = None if last else [] if isinstance(override.keys[depth + 1], int) else {}
    if isinstance(node, dict):
        if not last and node.get(key) is None:
            node[key] = made
        elif last and override.sign == "+=":
            node.setdefault(key, [])
    elif isinstance(node, list) and isinstance(key, int):
        node += [None] * (key + 1 - len(node))
        if key < -len(node):
            _require(node, override, depth)
        if not last and node[key] is None:
            node[key] = made
    else:
        _require(node, override, depth)


def _require(node: Any, override: Assignment, depth: int) -> None:
    """Raise for a key or index that ``node`` does not have."""
    key, place = override.keys[depth], override.place(depth)
    if isinstance(node, dict):
        if key not in node:
            hint = f"; a new key needs the form {'+' + override.text!r}" if override.sign == "=" else ""
            if override.sign == "+=":
                hint = f"; a new list needs the form '+{override.key}=[{override.raw}]'"
            raise override.error(f"no key {override.place(depth + 1)!r}; {_nearest_path(node, override, depth)}{hint}")
    elif isinstance(node, list):
        if not isinstance(key, int):
            raise override.error(f"{place} is a list and takes an index such as [0], not {key!r}")
        if not -len(node) <= key < len(node):
            raise override.error(
                f"{place} has {len(node)} entries and no [{key}]; append with '{place}+=…', or let it grow with "
                f"{'+' + override.text!r}"
            )
    else:
        raise override.error(f"{place} is {node!r}, which has no keys")


def _nearest_path(node: dict[Any, Any], override: Assignment, depth: int) -> str:
    """Return a suggestion: a path with the same end, else the closest sibling key."""
    last = override.keys[-1]
    alike = _path_to(node, last) if depth == len(override.keys) - 1 else None
    place = "" if depth == 0 else override.place(depth)
    prefix = f"{place}." if place else ""
    if alike is not None:
        return f"did you mean {prefix + alike!r}?"
    return nearest(str(override.keys[depth]), map(str, node), prefix=prefix) if node else "there are no keys"


def _path_to(node: Any, key: Any) -> str | None:
    for name, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, dict):
            found = key if key in value else _path_to(value, key)
            if found is not None:
                return f"{name}.{found}"
    return None


def _change(node: Any, key: Any, override: Assignment, fit: Fit) -> None:
    if override.sign == "!=":
        del node[key]
    elif override.sign == "=":
        # An entry of a list has no kind: a list may mix them.
        node[key] = copied(fit(override, node.get(key) if isinstance(node, dict) else None))
    else:
        _change_entries(node, key, override)


def _change_entries(node: Any, key: Any, override: Assignment) -> None:
    target, place = node[key], override.place(len(override.keys))
    if not isinstance(target, (list, tuple)):
        raise override.error(f"{place} is {target!r}, not a list; '+=' and '-=' change lists")
    entries = target if isinstance(target, list) else list(target)
    if override.sign == "+=":
        entries.append(copied(override.value))
    else:
        # True == 1 in Python, but removing a bool must not remove a number.
        equal = [entry == override.value and type(entry) is type(override.value) for entry in entries]
        if True not in equal:
            known = nearest(str(override.value), map(str, entries)) if entries else "it is empty"
            raise override.error(f"{place} has no entry {override.value!r}; {known}")
        del entries[equal.index(True)]
    if isinstance(target, tuple):
        node[key] = tuple(entries)
