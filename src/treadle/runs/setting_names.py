"""Errors that name a setting by its dotted name in the configuration rather than by the argument that it becomes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

from treadle.config.sections import as_settings
from treadle.errors import ConfigError

__all__ = ["as_settings", "setting_of", "settings_named"]


@contextlib.contextmanager
def settings_named(known: Collection[str], renamed: Mapping[str, str] | None = None) -> Iterator[None]:
    """Renames the argument of an error of the block to the setting that it belongs to.

    Args:
        known: dotted names of all settings.
        renamed: argument -> dotted name of the setting, where the two end differently.

    Raises:
        ConfigError: what was raised, with the whole name in front.

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
    """Returns the dotted name of the setting that an argument belongs to.

    A name that several settings end with comes back as it is, as does one that belongs to none.

    Args:
        argument: bare or dotted; None for none.
        known: dotted names of all settings.
        renamed: argument -> dotted name of the setting.

    Example:
        >>> setting_of("pe_config.node.dim", ["pe.node.dim", "model.dim"], {})
        'pe.node.dim'
    """
    if argument is None or argument in known:
        return argument
    if argument in renamed:
        return renamed[argument]
    # The first part may be the name of a class or of an argument: TrainerConfig.grad_clip, pe_config.node.dim.
    for end in (argument, argument.partition(".")[2], argument.rpartition(".")[2]):
        fitting = [key for key in known if end and f".{key}".endswith(end if end[0] == "[" else f".{end}")]
        if len(fitting) == 1:
            return fitting[0]
    return argument
