"""Targets of a command: a script, a configuration of the user's own trainer, or a run of a pack."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.config import apply_overrides, load_config
from treadle.config.grammar import read_value
from treadle.errors import ConfigError, nearest
from treadle.runs.packs import find_pack, pack_names
from treadle.runs.setting_names import settings_placed
from treadle.runs.settings import flat

SUFFIXES = (".py", ".yaml", ".yml")
_OPTIONS = ("face", "out", "device", "resume", "trackers")
_HIDDEN = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip


@dataclass(frozen=True)
class PackRun:
    """Run of a pack, as its own command would start it.

    Attributes:
        face: the pack.
        settings: strings ``key=value``; the later of two wins.
        out: the run folder.
        device: None takes CUDA, then MPS, then the CPU.
        resume: load the folder's checkpoint and continue.
        trackers: comma-separated names of trackers.
    """

    face: str
    settings: list[str]
    out: Path
    device: str | None = None
    resume: bool = True
    trackers: str | None = None


def is_named_like_config(target: str) -> bool:
    """Return whether a command's argument may be a configuration file.

    Example:
        >>> is_named_like_config("digits.yaml"), is_named_like_config("spectra")
        (True, False)
    """
    return Path(target).suffix.lower() in SUFFIXES


def is_config_file(path: Path) -> bool:
    """Return whether a file is a configuration rather than a script that trains, without running it.

    A Python file is a configuration if it defines ``config`` or ``parents`` and starts nothing: it does not use
    ``__name__``, and calls no method ``train`` or ``fit`` and no function as a statement, such as ``main()``.
    """
    if path.suffix.lower() != ".py":
        return is_named_like_config(str(path))
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False  # its error is reported when it runs
    return _defines_config(tree) and not _has_effects(tree)


def _defines_config(tree: ast.Module) -> bool:
    defined: set[str] = set()
    for node in _outside_functions(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            defined.update(alias.asname or alias.name for alias in node.names)
    return bool(defined & {"config", "parents"})


def _has_effects(tree: ast.Module) -> bool:
    for node in _outside_functions(tree):
        if isinstance(node, ast.Name) and node.id == "__name__":
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("train", "fit"):
            return True
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Name) and not hasattr(builtins, called.id):
                return True
    return False


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _HIDDEN):
            yield from _outside_functions(child)


def resolve(target: str, arguments: Sequence[str]) -> dict[str, Any] | PackRun | None:
    """Return the pack of a command's target, given by name or configuration; None for a script.

    Raises:
        ConfigError: the configuration is missing or invalid, or an argument is not one of its settings.

    Example:
        >>> resolve("spectra", ["epochs=3"]).settings, resolve("train.py", [])
        (['epochs=3'], None)
    """
    if target in pack_names():
        return PackRun(target, list(arguments), Path("runs", target))
    return read_target(Path(target), arguments) if is_config_file(Path(target)) else None


def checked_target(target: str, arguments: Sequence[str]) -> dict[str, Any] | PackRun | None:
    """Return the pack like :func:`resolve`, and reject invalid targets before anything is started.

    Raises:
        ConfigError: there is no such script or configuration, or a setting is invalid.

    Example:
        >>> checked_target("text", ["epochs=3"]).face
        'text'
    """
    with settings_placed(Path(target), arguments):
        found = resolve(target, arguments)
        if isinstance(found, PackRun):
            find_pack(found.face).read_settings(found.settings, found.device)
    if found is None and not (is_named_like_config(target) and Path(target).is_file()):
        near = nearest(target, pack_names())
        meant = f"; {near}" if near.startswith("did you mean") else ""
        raise ConfigError(
            f"={target}: must be a script that exists, such as train.py, a configuration, or a pack: "
            f"{' or '.join(pack_names())}{meant}",
            argument="TARGET",
        )
    return found


def read_target(path: Path, overrides: Sequence[str]) -> dict[str, Any] | PackRun:
    """Load a configuration and apply the settings of the command line.

    Returns:
        The configuration of a trainer for :func:`train_from`, or the run of a pack if it names a ``face``.

    Raises:
        ConfigError: the file is a script, is missing or defines no configuration, or an override names an unknown key.
    """
    if path.is_file() and path.suffix.lower() == ".py" and not is_config_file(path):
        raise ConfigError(f"{path}: is not a configuration: {_describe_script(path)}")
    config = load_config(path)
    if "face" not in config:
        return apply_overrides(config, overrides)
    return _pack_run(path, config, overrides)


def _describe_script(path: Path) -> str:
    """Describe a Python file without a configuration, and how to train with it."""
    try:
        tree = ast.parse(path.read_bytes(), filename=path.name)
    except (OSError, ValueError, SyntaxError) as error:
        return f"it cannot be read: {error}"
    if _has_effects(tree):
        return f"it is a training script; run it with `python {path}`"
    kinds = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if kinds:
        return (
            f"it defines {' and '.join(kinds)} and trains nothing; name the trainer in a configuration, as "
            f"`type: {path.stem}.{kinds[-1]}` in its part trainer (`treadle new config` writes an example), or call "
            f"its train() in the file and run `python {path}`"
        )
    return "it trains nothing and defines no config; `treadle new mini` writes a script to start from"


def _pack_run(path: Path, config: dict[str, Any], overrides: Sequence[str]) -> PackRun:
    find_pack(config["face"])
    options: dict[str, Any] = {"out": str(Path("runs", path.stem)), "device": None, "resume": True, "trackers": None}
    options |= {key: config.pop(key) for key in _OPTIONS if key in config}
    settings = [f"{key}={value!r}" for key, value in flat(config).items()]
    for text in overrides:
        key, equals, value = (part.strip() for part in text.lstrip("+").partition("="))
        if equals and key in _OPTIONS[1:]:
            options[key] = read_value(value)
        else:
            settings.append(text)
    if not isinstance(options["resume"], bool):
        raise ConfigError("must be true or false", argument="resume", value=options["resume"])
    device = None if options["device"] is None else str(options["device"])
    return PackRun(
        options["face"], settings, Path(str(options["out"])), device, options["resume"], _names(options["trackers"])
    )


def _names(trackers: Any) -> str | None:
    """Return trackers, possibly a list, in the form of the command's option."""
    names = list(trackers) if isinstance(trackers, (list, tuple)) else [trackers]
    if trackers is not None and not all(isinstance(name, str) for name in names):
        raise ConfigError("must be names, such as [tensorboard]", argument="trackers", value=trackers)
    return None if trackers is None else ",".join(names)
