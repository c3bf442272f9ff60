"""Construction of a whole trainer from one configuration: its own section, and the parts of its constructor."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.config.objects import REGISTRY, Registry, build_at, find_target
from treadle.config.tree import copied, nearest_key
from treadle.errors import ConfigError, nearest
from treadle.errors.arguments import is_whole_number
from treadle.seed import set_seed

_SUFFIX = "_cfg"
_OWN_KEYS = ("trainer", "imports", "seed")


def build_trainer(
    cfg: Mapping[str, Any], registry: Registry = REGISTRY, *, folder: str | os.PathLike[str] | None = None
) -> Any:
    """Build a trainer with its parts from a configuration.

    =========== ================================================================================================== key
    meaning ===========
    ================================================================================================== trainer ``type``,
    a registered name or a dotted path, and arguments of its constructor imports modules, or files relative to
    ``folder``, that are imported first: they register classes seed passed to :func:`treadle.set_seed` before anything
    is built; without it nothing is seeded other keys the parts: ``model`` is passed unchanged as the argument
    ``model_cfg``, and so on ===========
    ==================================================================================================

    Args:
        cfg: the configuration, for example from :func:`treadle.config.load_config`; not changed.
        registry: registry searched before ``type`` is taken as a dotted path.
        folder: prepended to ``sys.path``, so that modules in it can be imported, as Python does with the folder of a
            script; None adds nothing, and files in ``imports`` are relative to the working directory.

    Returns:
        The trainer, not trained yet.

    Raises:
        ConfigError: there is no section ``trainer``, an import is missing, or the constructor does not accept a part or
            argument, or lacks one. Errors raised inside the constructor or an import propagate unchanged.

    Example:
        >>> registry = Registry()
        >>> @registry.register()
        ... class Fit:
        ...     def __init__(self, max_steps, model_cfg):
        ...         self.max_steps, self.model_cfg = max_steps, model_cfg
        >>> trainer = build_trainer({"trainer": {"type": "Fit", "max_steps": 9}, "model": {"width": 8}}, registry)
        >>> trainer.max_steps, trainer.model_cfg
        (9, {'width': 8})
    """
    section = _trainer_section(cfg)
    _import_all(cfg.get("imports", ()), None if folder is None else Path(folder))
    target = find_target(section["type"], "trainer.type", registry)
    parts = {key: value for key, value in cfg.items() if key not in _OWN_KEYS}
    given = _as_arguments(parts, section, _Arguments.of(target))
    if cfg.get("seed") is not None:
        set_seed(_seed(cfg["seed"]))
    try:
        return build_at("trainer", section, registry, False, given)
    except TypeError as error:
        # A constructor passes **kwargs on to its base class, which names unexpected or missing arguments.
        owners = [base.__qualname__ for base in getattr(target, "__mro__", ())]
        if not str(error).startswith(tuple(f"{owner}.__init__() " for owner in owners)):
            raise
        raise ConfigError(f"{section['type']!r} refuses its arguments: {error}", argument="trainer") from error


def _trainer_section(cfg: Any) -> Mapping[str, Any]:
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"cfg must be a dict, not a {type(cfg).__name__}", argument="build_trainer")
    if "trainer" not in cfg:
        raise ConfigError(f"there is no section 'trainer', which names the trainer; {nearest_key('trainer', cfg)}")
    section = cfg["trainer"]
    if not isinstance(section, Mapping) or "type" not in section:
        raise ConfigError(
            f"must be a dict with the key 'type', a registered name or a dotted path, not {section!r}",
            argument="trainer",
        )
    return section


def _seed(value: Any) -> int:
    if not is_whole_number(value, 0):
        raise ConfigError("must be a whole number >= 0, or None to seed nothing", argument="seed", value=value)
    return value


# -- imports ------------------------------------------------------------------------------------------------------


def _import_all(names: Any, folder: Path | None) -> None:
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigError("must be a list of modules and files, such as ['train.py']", argument="imports", value=names)
    if folder is not None:
        _make_importable(folder)
    for name in names:
        if name.endswith(".py"):
            _import_file((folder or Path()) / name)
        else:
            _import_module(name)


def _make_importable(folder: Path) -> None:
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.insert(0, path)
        importlib.invalidate_caches()


def _import_file(path: Path) -> None:
    """Import a file under its own name, like ``import``, so that data workers find its classes."""
    path = path.resolve()
    if not path.is_file():
        beside = [entry.name for entry in path.parent.glob("*.py")]
        raise ConfigError(f"{path}: no such file; {nearest_key(path.name, beside)}", argument="imports")
    if _is_file_of(sys.modules.get("__main__"), path):
        return  # the running script has already registered its classes
    _make_importable(path.parent)
    known = sys.modules.get(path.stem)
    found = importlib.util.find_spec(path.stem) if known is None else known.__spec__
    origin = getattr(found, "origin", None)
    if origin is None or not os.path.exists(origin) or not os.path.samefile(origin, path):
        raise ConfigError(
            f"{path}: the name {path.stem!r} belongs to another module ({origin}); rename the file", argument="imports"
        )
    importlib.import_module(path.stem)


def _is_file_of(module: Any, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.exists(file) and os.path.samefile(file, path)


def _import_module(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"there is no module {error.name!r}; give a module that can be imported, or a file such as "
            f"'{error.name}.py', relative to the configuration",
            argument="imports",
        ) from error


# -- the arguments of a constructor -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Arguments:
    """Named arguments of a constructor.

    Attributes:
        names: names of all arguments, including those of base classes if ``**kwargs`` are passed on to them.
        required: its own arguments without a default.
        open: whether other names may be accepted as well.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    open: bool

    @classmethod
    def of(cls, target: Callable[..., Any]) -> _Arguments:
        chain: list[Any] = [target]
        if isinstance(target, type):
            chain = [vars(base)["__init__"] for base in target.__mro__[:-1] if "__init__" in vars(base)]
        names: dict[str, inspect.Parameter] = {}
        required: tuple[str, ...] = ()
        for function in chain:
            parameters = _parameters(function, method=isinstance(target, type))
            by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            named = {item.name: item for item in parameters if item.kind in by_name}
            if function is chain[0]:
                required = tuple(name for name, item in named.items() if item.default is item.empty)
            names |= named
            if not any(item.kind is item.VAR_KEYWORD for item in parameters):
                return cls(tuple(names), required, open=False)
        return cls(tuple(names), required, open=True)

    @property
    def parts(self) -> list[str]:
        """Parts that the constructor takes."""
        return [name.removesuffix(_SUFFIX) for name in self.names if name.endswith(_SUFFIX) and name != _SUFFIX]


def _parameters(function: Any, *, method: bool) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())[method:]  # without self
    except (ValueError, TypeError):  # written in C without a signature: it may take anything
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def _as_arguments(parts: Mapping[str, Any], section: Mapping[str, Any], taken: _Arguments) -> dict[str, Any]:
    """Return ``part_cfg -> section`` for the parts, after checking for unexpected and missing arguments."""
    kind = section["type"]
    for key in () if taken.open else section:
        if key not in (*taken.names, "type", "*"):
            raise ConfigError(
                f"{kind!r} takes no such argument; {nearest(str(key), taken.names)}", argument=f"trainer.{key}"
            )
    known = f"its parts are {', '.join(taken.parts)}" if taken.parts else "it takes no parts"
    for part in parts:
        argument = f"{part}{_SUFFIX}"
        if argument in section:
            raise ConfigError(f"given twice, here and as trainer.{argument}; remove one of them", argument=part)
        if not taken.open and argument not in taken.names:
            hint = f"; write it as trainer.{part}" if part in taken.names else ""
            raise ConfigError(
                f"the constructor of {kind!r} takes no {argument}, so nothing would use this part; {known}"
                f"{hint or _near(part, taken.parts)}",
                argument=part,
            )
    given = {f"{part}{_SUFFIX}": copied(value) for part, value in parts.items()}
    for name in taken.required if "*" not in section else ():
        if name.endswith(_SUFFIX) and name not in given and name not in section:
            part = name.removesuffix(_SUFFIX)
            raise ConfigError(f"the configuration has no part {part!r}, which {kind!r} takes as {name}; {known}")
    return given


def _near(part: str, parts: list[str]) -> str:
    near = nearest(str(part), parts)
    return f"; {near}" if near.startswith("did you mean") else ""
