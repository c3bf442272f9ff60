"""Errors that name a setting as the user writes it: by its whole dotted name, and with the line of its file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping

from treadle.errors import ConfigError

_NAMED = re.compile(r"(?P<name>[A-Za-z_\[][\w.\[\]]*?)(?P<rest>: (?!\S+=)|=| must | is unknown)")


@contextlib.contextmanager
def settings_named(known: Collection[str], renamed: Mapping[str, str] | None = None) -> Iterator[None]:
    """Has the errors of the block name the setting where they name the argument that its value becomes.

    Args:
        known: dotted names of all settings.
        renamed: argument -> dotted name of the setting, where the two end differently.

    Raises:
        ConfigError: what was raised, with the whole name in front.

    Example:
        >>> with settings_named(["model.width", "lr"]):
        ...     raise ConfigError("width=0: must be at least 1")
        Traceback (most recent call last):
        treadle.errors.ConfigError: model.width=0: must be at least 1
    """
    try:
        yield
    except ConfigError as error:
        text = whole_name(str(error), known, renamed or {})
        if text == str(error):
            raise
        raise ConfigError(text) from error


def whole_name(text: str, known: Collection[str], renamed: Mapping[str, str]) -> str:
    """Returns a message whose first word, an argument, is the dotted name of the setting that it belongs to.

    A name that several settings end with is left alone, as is one that belongs to none.

    Args:
        text: the message.
        known: dotted names of all settings.
        renamed: argument -> dotted name of the setting.

    Example:
        >>> whole_name("pe_config.node.dim=0: must be", ["pe.node.dim", "model.dim"], {})
        'pe.node.dim=0: must be'
    """
    found = _NAMED.match(text)
    if found is None or found["name"] in known:
        return text
    name, rest = found["name"], text[found.end("name") :]
    if name in renamed:
        return renamed[name] + rest
    # The first part may be the name of a class or of an argument: TrainerConfig.grad_clip, pe_config.node.dim.
    for end in (name, name.partition(".")[2], name.rpartition(".")[2]):
        fitting = [key for key in known if end and f".{key}".endswith(end if end[0] == "[" else f".{end}")]
        if len(fitting) == 1:
            return fitting[0] + rest
    return text


def first_name(text: str) -> str:
    """Returns the setting or argument that a message begins with; empty if it begins with none.

    Example:
        >>> first_name("model.width=0: must be at least 1"), first_name("no such file")
        ('model.width', '')
    """
    found = _NAMED.match(text)
    return found["name"] if found else ""


def in_section(text: str, section: str, fields: Collection[str], *, only: str | None = None) -> str:
    """Returns the message of a constructor with the section in front of the argument that it names.

    Args:
        text: the message.
        section: its dotted name, empty for the root.
        fields: what the section has.
        only: the field that was set, if it was one alone: a message that names none of the fields is about it.

    Example:
        >>> in_section("Config.lr=-1: must be positive", "optimizer", ["lr"])
        'optimizer.lr=-1: must be positive'
        >>> in_section("Invalid value: -1", "optimizer", ["lr", "eps"], only="eps")
        'optimizer.eps: Invalid value: -1'
    """
    place = f"{section}." if section else ""
    if found := _NAMED.match(text):
        if place and found["name"].startswith(place):
            return text
        name, rest = found["name"].rpartition(".")[2], text[found.end("name") :]
        if name in fields:
            return f"{place}{name}{rest}"
        if only is not None and found["rest"] == "=":  # the argument that the field becomes has another name
            return f"{place}{only}{rest}"
    if only is not None:
        return f"{place}{only}: {text}"
    return f"{section}: {text}" if section else text


@contextlib.contextmanager
def as_settings(section: str, fields: Collection[str]) -> Iterator[None]:
    """Turns what a constructor refuses into a ConfigError that names the setting.

    Args:
        section: where the settings of the constructor stand.
        fields: their names in it.

    Raises:
        ConfigError: the constructor raised ValueError.

    Example:
        >>> with as_settings("model", ["width"]):
        ...     raise ValueError("width=0 must be 1 or more")
        Traceback (most recent call last):
        treadle.errors.ConfigError: model.width=0 must be 1 or more
    """
    try:
        yield
    except ValueError as error:
        raise ConfigError(in_section(str(error), section, fields)) from error
