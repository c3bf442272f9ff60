"""Construction of single objects from configurations, by registered name or dotted path."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from treadle.config.tree import copied, join_path, same_tuple
from treadle.errors import ConfigError
from treadle.errors.arguments import checked

T = TypeVar("T")

_PARTIAL = "partial:"


class Registry:
    """Registry of classes and functions for configurations.

    Example:
        >>> registry = Registry()
        >>> @registry.register()
        ... class Net:
        ...     def __init__(self, width):
        ...         self.width = width
        >>> build_from_cfg({"type": "Net", "width": 8}, registry).width
        8
    """

    def __init__(self) -> None:
        self._objects: dict[str, Callable[..., Any]] = {}

    def register(self, name: str | None = None) -> Callable[[T], T]:
        """Return a decorator that registers a class or function and returns it unchanged.

        Args:
            name: the name in configurations; None takes the ``__name__`` of the object.

        Returns:
            The decorator. Registering the same object again under its name is a no-op.

        Raises:
            ConfigError: the name is taken by another object or invalid, or the object is not callable.

        Example:
            >>> registry = Registry()
            >>> registry.register("mlp")(dict) is registry.get("mlp")
            True
        """
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"register takes a name, not {name!r}; write @registry.register() with parentheses")

        def decorate(target: T) -> T:
            self._add(name if name is not None else getattr(target, "__name__", ""), target)
            return target

        return decorate

    def _add(self, name: str, target: Any) -> None:
        if not callable(target):
            raise ConfigError(f"{target!r} cannot be registered: only classes and functions can be built")
        if not name or name.startswith(_PARTIAL):
            raise ConfigError(f"{target!r} cannot be registered as {name!r}; give register() a plain name")
        known = self._objects.setdefault(name, target)
        if known is not target:
            raise ConfigError(f"{name!r} is registered already, for {known!r}; register {target!r} by another name")

    def get(self, name: str) -> object | None:
        """Return the class or function registered under a name, or None.

        Example:
            >>> Registry().get("nothing") is None
            True
        """
        return self._objects.get(name)

    def names(self) -> list[str]:
        """Return all registered names, sorted.

        Example:
            >>> Registry().names()
            []
        """
        return sorted(self._objects)

    def __repr__(self) -> str:
        return f"Registry({', '.join(self.names())})"


REGISTRY = Registry()
"""The shared registry, the default of ``build_from_cfg``."""


@checked
def build_from_cfg(cfg: Any, registry: Registry | None = REGISTRY, recursive: bool = False, **kwargs: Any) -> Any:
    """Call the object named by ``cfg["type"]`` with the other entries of ``cfg`` as arguments.

    ``type`` is a registered name or a dotted path such as ``torch.nn.Linear``; with the prefix ``partial:`` a
    ``functools.partial`` is returned instead of the result. The entry ``"*"`` holds a list of positional arguments.

    Args:
        cfg: the configuration, which is not changed; built objects get copies of its dicts, lists and tuples.
        registry: registry searched before a name is taken as a dotted path; None allows dotted paths only.
        recursive: also build every nested dict that has a ``type``, in dicts, lists and tuples.
        **kwargs: further arguments, passed unchanged and never built; they override those of ``cfg``.

    Returns:
        The result of the call. With ``recursive``, a dict without ``type``, a list or a tuple with its contents built.

    Raises:
        ConfigError: a name is unknown, a path cannot be imported, or the constructor does not accept an argument, named
            by its path in ``cfg``; or a failing constructor got a string in place of a number. Other errors raised
            inside the constructor propagate unchanged.

    Example:
        >>> build_from_cfg({"type": "torch.nn.Linear", "*": [3], "out_features": 2}, bias=False)
        Linear(in_features=3, out_features=2, bias=False)
    """
    registry = Registry() if registry is None else registry
    if isinstance(cfg, Mapping) and "type" in cfg:
        return build_at("", cfg, registry, recursive, kwargs)
    if not recursive or not isinstance(cfg, (Mapping, list, tuple)):
        keys = (
            f"a dict with the keys {sorted(map(str, cfg))}" if isinstance(cfg, Mapping) else f"a {type(cfg).__name__}"
        )
        raise ConfigError(
            f"cfg must be a dict with the key 'type', but it is {keys}; add the type", argument="build_from_cfg"
        )
    if kwargs:
        raise ConfigError(
            f"cfg has no 'type', so nothing takes the arguments {sorted(kwargs)}", argument="build_from_cfg"
        )
    return _build_nested(cfg, "", registry)


def _build_nested(value: Any, place: str, registry: Registry) -> Any:
    if isinstance(value, Mapping):
        if "type" in value:
            return build_at(place, value, registry, True, {})
        return {key: _build_nested(item, join_path(place, key), registry) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_build_nested(item, join_path(place, index), registry) for index, item in enumerate(value)]
        return items if isinstance(value, list) else same_tuple(value, items)
    return value


def build_at(place: str, cfg: Mapping[str, Any], registry: Registry, recursive: bool, given: dict[str, Any]) -> Any:
    """Build the section with a ``type`` at ``place`` in a configuration; see :func:`build_from_cfg`."""
    name = cfg["type"]
    target = find_target(name, join_path(place, "type"), registry)
    named: dict[str, Any] = {}
    for key, value in cfg.items():
        here = join_path(place, key)
        if not isinstance(key, str):
            raise ConfigError(
                f"the key {key!r} is not an argument of {name!r}; argument names are strings", argument=here
            )
        # An argument overridden by kwargs is not built: it may be a placeholder.
        if key == "type" or key in given:
            continue
        if key == "*" and not isinstance(value, (list, tuple)):
            raise ConfigError(f"positional arguments must be a list, not {value!r}; write [{value!r}]", argument=here)
        named[key] = _build_nested(value, here, registry) if recursive else copied(value)
    positional = named.pop("*", [])
    named.update(given)
    if name.startswith(_PARTIAL):
        _check_partial(target, positional, named, name, place)
        return functools.partial(target, *positional, **named)
    try:
        return target(*positional, **named)
    except (TypeError, ValueError) as error:
        if isinstance(error, TypeError) and _refused_by_call(target, positional, named, error):
            raise _refusal(target, named, name, place, error) from error
        if (wrong := _text_for_number(target, cfg, name, place)) is not None:
            raise wrong from error
        _note_values(error, place, name, cfg)
        raise


def _note_values(error: Exception, place: str, name: str, cfg: Mapping[str, Any]) -> None:
    """Add a note with the configuration's values to an error from inside a constructor, a possible cause."""
    if hasattr(error, "add_note") and not isinstance(error, ConfigError):  # since Python 3.11
        given = ", ".join(f"{key}={value!r}" for key, value in cfg.items() if key not in ("type", "*"))
        error.add_note(BuildNote(f"while building {place + ': ' if place else ''}{name}({given})", target=name))


class BuildNote(str):
    """Note on an error from inside a constructor.

    Attributes:
        target: the ``type`` that was being built.
    """

    target: str

    def __new__(cls, text: str, *, target: str) -> BuildNote:
        note = super().__new__(cls, text)
        note.target = target
        return note

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def _text_for_number(target: Callable[..., Any], cfg: Mapping[str, Any], name: str, place: str) -> ConfigError | None:
    """Return the error for a string passed to a failed constructor in place of a number."""
    signature = _signature(target)
    for key, item in signature.parameters.items() if signature else ():
        is_number = type(item.default) in (int, float) or item.annotation in (int, float, "int", "float")
        if is_number and isinstance(cfg.get(key), str):
            default = "" if item.default is item.empty else f", such as its default, {item.default!r}"
            rule = f"{name!r} takes a number here{default}, but this is a string"
            return ConfigError(rule, argument=join_path(place, key), value=cfg[key])
    return None


def find_target(name: Any, place: str, registry: Registry) -> Callable[..., Any]:
    """Return the registered or imported object called ``name``."""
    if not isinstance(name, str):
        raise _wrong_type("is not a name; write a registered name or a dotted path as a string", place, name)
    name = name.removeprefix(_PARTIAL)
    target: Any = registry.get(name)
    if target is None:
        if "." not in name:
            raise _wrong_type(f"is not registered; {_nearest_names(name, registry)}", place, name)
        target = _import(name, place)
    if not callable(target):
        raise _wrong_type(f"is a {type(target).__name__} and cannot be called; name a class or function", place, name)
    return target  # type: ignore[no-any-return]


def _wrong_type(rule: str, place: str, name: Any) -> ConfigError:
    return ConfigError(f"{name!r} {rule}", argument=place).about(place, name)


def _nearest_names(name: str, registry: Registry) -> str:
    names = registry.names()
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    listed = ", ".join(repr(option) for option in close or names)
    return f"{'nearest' if close else 'known'}: {listed or 'none'}; or use a dotted path such as 'torch.nn.Linear'"


def _import(name: str, place: str) -> Any:
    """Follow a dotted path step by step, importing modules if an attribute does not exist yet."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise _wrong_type("is not a dotted path; write it like 'torch.nn.Linear'", place, name)
    found: Any = None
    for count, part in enumerate(parts, 1):
        if count > 1 and hasattr(found, part):
            found = getattr(found, part)
            continue
        path = ".".join(parts[:count])
        module = _module(path) if count == 1 or isinstance(found, types.ModuleType) else None
        if module is None:
            missing = _missing_part(parts[: count - 1], part, found)
            raise _wrong_type(f"is not registered and cannot be imported: {missing}", place, name)
        found = module
    return found


def _module(path: str) -> types.ModuleType | None:
    """Import a module; None if there is none. Errors inside the module propagate unchanged."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        # Also raised for "x.y" if x is a module but not a package; its name is then the path.
        if error.name is None or error.name != path:
            raise
        return None


def _missing_part(before: list[str], part: str, found: Any) -> str:
    if not before:
        return f"there is no module {part!r}; install it or correct the name"
    close = difflib.get_close_matches(part, dir(found), n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    return f"{'.'.join(before)!r} has no {part!r}{hint}"


def _signature(target: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature | None:
    try:
        return inspect.signature(target, follow_wrapped=follow_wrapped)
    except (ValueError, TypeError):  # written in C without a signature
        return None


def _check_partial(target: Callable[..., Any], args: Any, named: dict[str, Any], name: str, place: str) -> None:
    """Refuse arguments that the call would refuse later, far from the configuration."""
    signature = _signature(target, follow_wrapped=False)  # a wrapper may add arguments
    if signature is None:
        return
    try:
        signature.bind_partial(*args, **named)
    except TypeError as error:
        raise _refusal(target, named, name, place, error) from error


def _refused_by_call(target: Callable[..., Any], args: Any, named: dict[str, Any], error: TypeError) -> bool:
    """Return whether the arguments did not fit, rather than an error inside the constructor."""
    inside = error.__traceback__.tb_next if error.__traceback__ else None
    if inside is None:
        return True
    # Raised further down: by a wrapper that passed the arguments on, or by the constructor itself.
    own = inspect.unwrap(target)
    codes = {getattr(function, "__code__", None) for function in (own, getattr(own, "__init__", None))}
    while inside is not None:
        if inside.tb_frame.f_code in codes:
            return False
        inside = inside.tb_next
    signature = _signature(target)
    if signature is None:
        return False
    try:
        signature.bind(*args, **named)
    except TypeError:
        return True
    return False


def _refusal(
    target: Callable[..., Any], named: dict[str, Any], name: str, place: str, reason: TypeError
) -> ConfigError:
    """Return the error that names the argument that a constructor does not accept, and those that it accepts."""
    signature = _signature(target)
    where = join_path(place, "type")
    if signature is None:
        return _wrong_type(f"refuses its arguments: {reason}", where, name)
    parameters = signature.parameters.values()
    names = [item.name for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    unknown = [key for key in named if key not in names]
    hint = ""
    if unknown and not any(item.kind is item.VAR_KEYWORD for item in parameters):
        close = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.5)
        near = f", did you mean {close[0]!r}?" if close else ""
        hint = f"; it has no argument for {join_path(place, unknown[0])}{near}"
    # Without types, which are long: the names are the problem.
    bare = [item.replace(annotation=item.empty) for item in parameters]
    short = signature.replace(parameters=bare, return_annotation=signature.empty)
    called = getattr(target, "__name__", type(target).__name__)
    return _wrong_type(f"refuses its arguments: {reason}{hint}; its signature is {called}{short}", where, name)
