"""Grammar of command-line settings ``key=value``: forms, and interpretation of values."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.config.tree import join_path, same_tuple
from treadle.errors import ConfigError

FORMS = "'a.b=1' sets, 'l[0]=x' sets an entry, 'l+=x' appends, 'l-=x' removes, 'a.b!=' deletes, '+a.b=1' adds a key"
WORDS: Mapping[str, bool | None] = {
    "true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None, "null": None,
}  # fmt: skip
"""Words with one meaning everywhere, in any case; in quotes they are strings."""

_FORM = re.compile(r"(?P<new>\+*)(?P<path>[^=]*?)(?P<sign>!=|\+=|-=|=)(?P<value>.*)", re.DOTALL)
_PART = re.compile(r"(?:^|(?!^)\.)(?P<name>[^.\[\]]+)|\[(?P<index>[^\[\]]+)\]")


@dataclass(frozen=True)
class Assignment:
    """Setting on a command line.

    Attributes:
        text: the setting as written.
        new: whether it may add a key or change the kind of a value.
        keys: path to the value as names and indices.
        sign: ``=``, ``+=``, ``-=`` or ``!=``.
        raw: the value as written, stripped.
    """

    text: str
    new: bool
    keys: tuple[Any, ...]
    sign: str
    raw: str

    @property
    def value(self) -> Any:
        """Interpreted value."""
        return read_value(self.raw)

    @property
    def key(self) -> str:
        """Dotted key."""
        return self.place(len(self.keys))

    def place(self, depth: int) -> str:
        """Return the dotted path of the first ``depth`` keys."""
        place = ""
        for key in self.keys[:depth]:
            place = join_path(place, key)
        return place or "the configuration"

    def error(self, message: str) -> ConfigError:
        """Return an error about this setting."""
        return ConfigError(f"override {self.text!r}: {message}").about(self.key)


class Written(str):
    """Value of a setting as written: interpreted by :func:`read_value`, or a string where one is expected."""


def parse(text: str) -> Assignment:
    """Parse one setting.

    Raises:
        ConfigError: it does not match any form.

    Example:
        >>> parse("+model.layers[2].width=64").keys
        ('model', 'layers', 2, 'width')
    """
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"override {text!r} has no '='; the forms are: {FORMS}")
    found = Assignment(text, bool(match["new"]), _keys(match["path"].strip(), text), match["sign"], match["value"])
    if found.new and found.sign != "=":
        raise found.error(f"'+' before a path goes with '=' only; the forms are: {FORMS}")
    if found.sign == "!=" and found.raw.strip():
        raise found.error(f"'!=' deletes and takes no value; the forms are: {FORMS}")
    return found


def text_of(text: str) -> tuple[str, str]:
    """Return the dotted key and the value of a setting as strings; both empty if it is not a setting.

    Example:
        >>> text_of("+optimizer.lr='1e-3'")
        ('optimizer.lr', '1e-3')
    """
    try:
        found = parse(text)
    except ConfigError:
        return "", ""
    return found.key, found.raw.strip().strip("'\"")


def repeated(settings: Iterable[str]) -> list[str]:
    """Return a sentence for each key that is set twice to different values, of which the last one counts.

    Args:
        settings: strings ``key=value``; other strings are ignored.

    Example:
        >>> repeated(["epochs=1", "lr=0.1", "epochs=2", "lr=1e-1"])
        ['epochs is set twice, to 1 and to 2; 2 counts']
    """
    values: dict[str, list[str]] = {}
    for text in settings:
        try:
            found = parse(text)
        except ConfigError:
            continue
        if found.sign == "=":
            values.setdefault(found.key, []).append(found.raw.strip())
    return [
        f"{key} is set {'twice' if len(given) == 2 else f'{len(given)} times'}, to {' and to '.join(given)}; "
        f"{given[-1]} counts"
        for key, given in values.items()
        if any(read_value(one) != read_value(given[-1]) for one in given)
    ]


def _keys(path: str, text: str) -> tuple[Any, ...]:
    keys: list[Any] = []
    at = 0
    while at < len(path):
        part = _PART.match(path, at)
        if part is None:
            raise ConfigError(f"override {text!r}: {path[at:]!r} is not a path; write it like 'model.layers[2].type'")
        index = _literal(part["index"] or "")
        if type(index) not in (int, str):
            raise ConfigError(f"override {text!r}: [{part['index']}] is neither an index nor a key")
        keys.append(index if part["name"] is None else part["name"])
        at = part.end()
    if not keys:
        raise ConfigError(f"override {text!r} has no key; the forms are: {FORMS}")
    return tuple(keys)


def alternatives(raw: str) -> list[str]:
    """Split a value at commas, except those in quotes and brackets.

    Example:
        >>> alternatives("1e-3, 3e-3"), alternatives("[1, 2]"), alternatives("'a,b'")
        (['1e-3', '3e-3'], ['[1, 2]'], ["'a,b'"])
    """
    parts, depth, quote = [""], 0, ""
    for character in raw:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "[{(") - (character in "]})")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    found = [part.strip() for part in parts]
    return found if all(found) else [raw.strip()]


# -- kinds ---------------------------------------------------------------------------------------------------------


def kind_of(value: Any) -> str | None:
    """Return the kind of a configuration value; None for None and for objects.

    Example:
        >>> kind_of(3), kind_of(True), kind_of((1, 2))
        ('number', 'bool', 'list')
    """
    kinds: list[tuple[Any, str]] = [
        (bool, "bool"), ((int, float), "number"), (str, "string"), (Mapping, "section"), ((list, tuple), "list"),
    ]  # fmt: skip
    return next((kind for types, kind in kinds if isinstance(value, types)), None)


def fitted(assignment: Assignment, current: Any) -> Any:
    """Return the value that an assignment sets in place of another of the same kind.

    A number is accepted for a string, and a list for a tuple.

    Args:
        assignment: the assignment; the form ``+key=value`` may change the kind.
        current: the current value; None has no kind.

    Raises:
        ConfigError: the kinds differ.

    Example:
        >>> fitted(parse("flag=off"), True), fitted(parse("folder=2024"), "runs")
        (False, '2024')
    """
    value, kind = assignment.value, kind_of(current)
    if assignment.new or value is None or kind in (None, kind_of(value)):
        return same_tuple(current, value) if isinstance(current, tuple) and isinstance(value, list) else value
    if kind == "string" and kind_of(value) == "number":
        return assignment.raw.strip()
    key, raw = assignment.key, assignment.raw.strip()
    ways = {
        "bool": f"write {key}=true or {key}=false",
        "number": f"write a number, such as {key}={current!r}",
        "string": f"write {key}={raw!r} for the string",
        "section": "set its keys one by one",
        "list": f"write a list, such as {key}=[1,2], or append with {key}+=…",
    }
    raise assignment.error(
        f"{key} is {current!r}, a {kind}, and {value!r} is a {kind_of(value) or type(value).__name__}; "
        f"{ways[kind or '']}; +{key}={raw} would change the kind"
    )


# -- values -------------------------------------------------------------------------------------------------------


def read_value(text: str) -> Any:
    """Interpret a string as a value.

    This is one of :data:`WORDS`, a Python literal, a list or dict with words and unquoted strings, else the string.

    Example:
        >>> read_value("1e-3"), read_value("none"), read_value("cuda:0"), read_value("'on'")
        (0.001, None, 'cuda:0', 'on')
        >>> read_value("[min, max]"), read_value("{pairs: 3, exact: yes}")
        (['min', 'max'], {'pairs': 3, 'exact': True})
    """
    if (word := text.strip().lower()) in WORDS:
        return WORDS[word]
    value = _literal(text)
    if isinstance(value, str) and value == text and word[:1] in ("[", "{"):
        reader = _Flow(text.strip())
        found = reader.item("")
        return found if reader.whole else text
    return value


def _literal(text: str) -> Any:
    try:
        with warnings.catch_warnings():  # an invalid escape in the string is not the user's code
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


class _Flow:
    """Parser of lists and dicts such as ``[min, 2]`` and ``{a: [on], b: x}`` with unquoted strings."""

    def __init__(self, text: str):
        self._text = text
        self._at = 0
        self._broken = False

    @property
    def whole(self) -> bool:
        """Whether the string was parsed to its end without errors."""
        return not self._broken and self._at == len(self._text)

    def item(self, ends: str) -> Any:
        """Parse one value, up to one of the characters ``ends``."""
        self._skip_spaces()
        opening = self._text[self._at : self._at + 1]
        if opening == "[":
            return self._items("]")
        if opening == "{":
            return dict(self._items("}"))
        start = self._at
        if opening and opening in "'\"":
            end = self._text.find(opening, self._at + 1)
            self._at = len(self._text) if end < 0 else end + 1
            self._skip_spaces()
        else:
            while self._at < len(self._text) and self._text[self._at] not in f"{ends}[]{{}}":
                self._at += 1
        text = self._text[start : self._at].strip()
        self._broken |= not text
        return read_value(text) if text[:1] not in ("[", "{") else text

    def _items(self, closing: str) -> list[Any]:
        found: list[Any] = []
        self._at += 1
        self._skip_spaces()
        while not self._broken and not self._take(closing):
            value = self.item(f",{closing}" if closing == "]" else ":")
            if closing == "}":
                self._broken |= not isinstance(value, (str, int, float)) or not self._take(":")
                value = (None, None) if self._broken else (value, self.item(f",{closing}"))
            found.append(value)
            self._skip_spaces()
            if not self._take(",") and self._text[self._at : self._at + 1] != closing:
                self._broken = True
            self._skip_spaces()
        return found

    def _take(self, character: str) -> bool:
        taken = self._text[self._at : self._at + 1] == character
        self._at += taken
        return taken

    def _skip_spaces(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
