"""Composition of the config groups in ``treadle/graphs/conf``, equal to Hydra's for ``scripts/train.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import as_file, files
from typing import Any

from treadle.config import load_config, merge_configs
from treadle.errors import ConfigError, nearest

CONF = "treadle.graphs.conf"
GROUPS = ("dataset", "model", "pe", "train")

_SECTIONS = {"train": "training"}  # for groups whose section has a different name
_SELF = "_self_"


def compose(choices: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of the chosen files as nested plain values.

    Args:
        choices: group -> file; a missing group uses the choice of ``quick.yaml``.

    Raises:
        ConfigError: there is no such choice; the message names the closest match.
        ImportError: OmegaConf is not installed; the message names the extra.

    Example:
        >>> compose({"model": "gps"})["model"]["num_layers"]
        10
    """
    for group, choice in choices.items():
        options = list(_options(files(CONF).joinpath(group)))
        if choice not in options:
            raise ConfigError(f"={choice}: {nearest(choice, options)}", argument=group)
    return _merged("", "quick", {**_defaults("quick"), **choices})


def _options(folder: Any, prefix: str = "") -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _options(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml") and not entry.name.startswith("_"):
            yield f"{prefix}{entry.name.removesuffix('.yaml')}"


def _read(path: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the ``defaults`` list of a file, with the file itself last unless listed, and its settings."""
    with as_file(files(CONF).joinpath(*f"{path}.yaml".split("/"))) as file:
        values = load_config(file)
    defaults = values.pop("defaults", [])
    return defaults if _SELF in defaults else [*defaults, _SELF], values


def _defaults(root: str) -> dict[str, str]:
    """Return the choice of every group that a file makes or inherits."""
    found: dict[str, str] = {}
    for entry in _read(root)[0]:
        if isinstance(entry, dict):
            found |= {group.removeprefix("override ").strip(): choice for group, choice in entry.items()}
        elif entry != _SELF:
            found |= _defaults(entry)
    return found


def _merged(group: str, name: str, choices: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a file merged over those of its ``defaults``, in order."""
    defaults, own = _read(f"{group}/{name}" if group else name)
    merged: dict[str, Any] = {}
    for entry in defaults:
        if entry == _SELF:
            merged = merge_configs(merged, own)
        elif isinstance(entry, str):  # another file, by its path within the group or among all groups
            at, _, file = entry.removeprefix("/").partition("/") if entry.startswith("/") else (group, "", entry)
            merged = merge_configs(merged, _merged(at, file, choices))
        else:
            for chosen in entry:
                if not chosen.startswith("override "):
                    section = {_SECTIONS.get(chosen, chosen): _merged(chosen, choices[chosen], choices)}
                    merged = merge_configs(merged, section)
    return merged
