"""Locating, running and merging of configuration files."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.config import yaml_files
from treadle.config.tree import merge_configs, nearest_key
from treadle.errors import ConfigError
from treadle.errors.arguments import checked

_SUFFIXES = (".py", *yaml_files.SUFFIXES)
_numbers = itertools.count()


@dataclass(frozen=True)
class _File:
    """Configuration file that was read, but whose callable, if any, was not called yet."""

    path: Path
    parents: tuple[str, ...]
    config: Mapping[str, Any] | Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    module: types.ModuleType | None
    takes_all: bool = False  # for config(**params)

    @property
    def defaults(self) -> dict[str, Any]:
        """Parameters with their defaults."""
        found = ((name, parameter.default) for name, parameter in self.parameters.items())
        return {name: default for name, default in found if default is not inspect.Parameter.empty}

    def values(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the file's own configuration for the given parameters."""
        if isinstance(self.config, Mapping):
            return self.config
        chosen = dict(given) if self.takes_all else {name: given[name] for name in self.parameters if name in given}
        for name in self.parameters:
            if name not in chosen:
                raise ConfigError(
                    f"{self.path}: the parameter {name!r} of config has no default, here or in another file; "
                    f"give it one, or pass params={{{name!r}: …}}"
                )
        with _visible(self.module):
            values = self.config(**chosen)
        if not isinstance(values, Mapping):
            raise ConfigError(f"{self.path}: config returned a {type(values).__name__}; it must return a dict")
        return values


@checked
def load_config(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Load configuration files and merge them into one plain dict.

    A Python file defines ``config``, a dict or a callable whose arguments with their defaults are the parameters, and
    may define ``parents``, a file name or a list of them, relative to the file, furthest first. A YAML file is the
    configuration itself and may hold the key ``parents``; its ``${...}`` refer to the merged configuration. Files later
    in the list override earlier ones, and a file overrides its parents; a parent that several files share is merged
    once. Dicts are merged key by key, all other values are replaced; see :data:`DELETE` and :class:`REPLACE`.

    Parameters are shared by all callables: the default of the last file that has one is used everywhere, so that a
    file's default overrides its parents', and a parameter without a default takes theirs.

    Python configuration files run as code. Load only files that you trust.

    Args:
        path: a ``.py``, ``.yaml`` or ``.yml`` file, or a sequence of them.
        params: values for parameters of the files' callables; each is passed to every callable that accepts it, also by
            ``**params``.

    Returns:
        A new dict that shares no container with ``params``.

    Raises:
        ConfigError: a file is missing or has no configuration, parents form a cycle, a parameter is unknown, or an
            interpolation refers to nothing. Errors raised by a Python file itself propagate unchanged.
        ImportError: OmegaConf is not installed, for a YAML file.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "train.py"
        >>> _ = file.write_text("def config(lr=0.1): return {'optimizer': {'type': 'torch.optim.SGD', 'lr': lr}}")
        >>> load_config(file, {"lr": 0.5})
        {'optimizer': {'type': 'torch.optim.SGD', 'lr': 0.5}}
    """
    names = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if not names:
        raise ConfigError("the sequence of files is empty; name at least one", argument="load_config")
    files: list[_File] = []
    for name in names:
        files += _with_parents(Path(name), (), {file.path.resolve() for file in files})
    _refuse_unknown_params(params or {}, files)
    given = {name: value for file in files for name, value in file.defaults.items()} | dict(params or {})
    merged: dict[str, Any] = {}
    for file in files:
        merged = merge_configs(merged, file.values(given), where=str(file.path))
    return yaml_files.resolve(merged)


def _refuse_unknown_params(given: Mapping[str, Any], files: Sequence[_File]) -> None:
    known = {name for file in files for name in file.parameters}
    for name in given:
        if name not in known:
            read = ", ".join(str(file.path) for file in files)
            hint = nearest_key(name, known) if known else "none of the files takes parameters"
            raise ConfigError(f"{read}: unknown parameter {name!r}; {hint}")


def _with_parents(path: Path, children: tuple[Path, ...], known: set[Path]) -> list[_File]:
    """Read a file after its parents, skipping those already read."""
    resolved = path.resolve()
    if resolved in children:
        circle = " -> ".join(str(step) for step in (*children[children.index(resolved) :], resolved))
        raise ConfigError(f"{path}: its parents form a cycle: {circle}; remove one of these parents")
    file = _read(path)
    found: list[_File] = []
    for name in file.parents:
        parent = _parent_path(path, name)
        seen = known | {earlier.path.resolve() for earlier in found}
        if parent.resolve() not in seen:
            found += _with_parents(parent, (*children, resolved), seen)
    return [*found, file]


def _parent_path(child: Path, name: str) -> Path:
    path = child.parent / name
    options = [path, *(path.with_name(path.name + suffix) for suffix in _SUFFIXES)]
    return next((option for option in options if option.is_file()), path)


def _read(path: Path) -> _File:
    if path.suffix.lower() not in _SUFFIXES and not path.is_dir():
        raise ConfigError(f"{path}: the name of a configuration file ends in .py, .yaml or .yml")
    if not path.is_file():
        beside = [entry.name for entry in path.parent.glob("*") if entry.suffix.lower() in _SUFFIXES]
        found = nearest_key(path.name, beside) if beside else "its folder has no configuration files"
        raise ConfigError(f"{path}: no such configuration file; {found}")
    if path.suffix.lower() != ".py":
        content = yaml_files.parse(path.read_bytes(), path)
        return _File(path, _parents(path, content.pop("parents", None)), content, {}, None)
    module = _run(path)
    parents = _parents(path, getattr(module, "parents", None))
    if not hasattr(module, "config"):
        if not parents:
            raise ConfigError(f"{path}: it defines neither config nor parents; write config = {{...}}")
        return _File(path, parents, {}, {}, module)
    config = module.config
    if isinstance(config, Mapping):
        return _File(path, parents, config, {}, module)
    if not callable(config):
        raise ConfigError(f"{path}: config must be a dict or a callable that returns one, not {config!r}")
    kinds = {parameter.kind for parameter in inspect.signature(config).parameters.values()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    return _File(path, parents, config, _parameters(path, config), module, takes_all)


def _parents(path: Path, given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, (str, os.PathLike)) else () if given is None else given
    if isinstance(names, (list, tuple)) and all(isinstance(name, (str, os.PathLike)) for name in names):
        return tuple(os.fspath(name) for name in names)
    raise ConfigError(f"{path}: parents must be a file name or a list of them, not {given!r}")


def _parameters(path: Path, config: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = {}
    for name, parameter in inspect.signature(config).parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"{path}: the parameter {name!r} of config is positional-only; parameters are given by name"
            )
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            found[name] = parameter
    return found


def _run(path: Path) -> types.ModuleType:
    # Not through the import system, which would cache files of the same name as one module and write __pycache__.
    module = types.ModuleType(f"_treadle_config_{next(_numbers)}")
    module.__file__ = str(path)
    # dont_inherit: the future imports of this file are not those of the user's.
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    with _visible(module):
        exec(code, module.__dict__)
    return module


@contextmanager
def _visible(module: types.ModuleType | None) -> Iterator[None]:
    """Register a module while its code runs, as ``dataclasses`` requires, and unregister it afterwards."""
    if module is None:
        yield
        return
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        sys.modules.pop(module.__name__, None)
