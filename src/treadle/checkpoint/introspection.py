"""Attributes of any object by name (instances, slots, closures), and whether the object is the user's."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

LIBRARIES = frozenset({
    "treadle", "torch", "torchvision", "torchaudio", "torchdata", "torchmetrics", "torch_geometric", "numpy", "scipy",
    "pandas", "pyarrow", "sklearn", "datasets", "transformers", "tokenizers", "webdataset", "litdata", "h5py", "zarr",
    "lmdb", "PIL", "cv2", "tqdm", "rich", "tensorboard", "wandb", "mlflow", "_pytest", "pluggy",
})  # fmt: skip
"""Packages whose objects keep their state themselves, or have none that a step moves."""


class Named:
    """Named values that are read and set like the attributes of an object."""

    def values(self) -> dict[str, Any]:
        """Return the current values."""
        raise NotImplementedError

    def set(self, name: str, value: Any) -> None:
        """Set a value."""
        raise NotImplementedError


def offered(owner: Any, name: str) -> Any:
    """Return an attribute or None, also for a dict with attribute access that raises KeyError.

    Example:
        >>> class Settings(dict): __getattr__ = dict.__getitem__
        >>> offered(Settings(rate=1), "rate"), offered(Settings(), "rate")
        (1, None)
    """
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001  (the class of a user may raise anything)
        return None


def has_state(owner: Any) -> bool:
    """Return whether an object has ``state_dict()`` without arguments and ``load_state_dict()``; not for classes.

    Example:
        >>> from torch import nn
        >>> has_state(nn.Linear(1, 1)), has_state(nn.Linear)
        (True, False)
    """
    if isinstance(owner, type) or not callable(offered(owner, "load_state_dict")):
        return False
    method = offered(owner, "state_dict")
    function = getattr(method, "__func__", None)
    return callable(method) and _wants_nothing(method if function is None else function, function is not None)


@functools.lru_cache(maxsize=1024)
def _wants_nothing(function: Any, is_bound: bool) -> bool:
    """Return whether a callable needs no arguments; the ``state_dict`` of litdata's data sets needs three."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[int(is_bound) :]
    except (TypeError, ValueError):
        return True
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(one.default is not one.empty or one.kind in kinds for one in parameters)


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, including ``__slots__``; for a function, its closure variables.

    Example:
        >>> def made(count): return lambda: count
        >>> attributes_of(made(3))
        {'count': 3}
    """
    if isinstance(owner, Named):
        return owner.values()
    if isinstance(owner, types.FunctionType):
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        return {name: cell.cell_contents for name, cell in cells if not is_empty(cell)}
    if isinstance(owner, partial):
        held = {f"args[{number}]": item for number, item in enumerate(owner.args)}
        return {**held, **owner.keywords, **vars(owner)}
    listed = [(kind, vars(kind).get("__slots__", ())) for kind in type(owner).__mro__]
    slots = [_mangled(name, kind) for kind, names in listed for name in ([names] if isinstance(names, str) else names)]
    found = {
        name: getattr(owner, name) for name in slots if name not in ("__dict__", "__weakref__") and hasattr(owner, name)
    }
    return {**found, **(offered(owner, "__dict__") or {})}


def is_empty(cell: Any) -> bool:
    """Return whether a closure cell is unbound."""
    try:
        cell.cell_contents  # noqa: B018  (raises where the variable is not bound yet)
    except ValueError:
        return True
    return False


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of an object, or a closure variable of a function.

    Example:
        >>> def made(count): return lambda: count
        >>> function = made(3); set_attribute(function, "count", 4); function()
        4
    """
    if isinstance(owner, Named):
        owner.set(name, value)
    elif isinstance(owner, partial):
        _set_in_partial(owner, name, value)
    elif not isinstance(owner, types.FunctionType):
        _set_on_object(owner, name, value)
    elif name in owner.__code__.co_freevars:
        cells = owner.__closure__ or ()
        cells[owner.__code__.co_freevars.index(name)].cell_contents = value


def delete_attribute(owner: Any, name: str) -> bool:
    """Delete an attribute of an object, which may have been looked for with ``hasattr``; return whether it could be."""
    if isinstance(owner, (Named, partial, types.FunctionType)) or name not in attributes_of(owner):
        return False
    try:
        object.__delattr__(owner, name)
    except AttributeError:  # as of a class that stores them elsewhere
        return False
    return True


def _set_on_object(owner: Any, name: str, value: Any) -> None:
    own = type(owner).__setattr__
    if isinstance(own, types.FunctionType) and is_user_class(own):  # frozen, or stored elsewhere
        object.__setattr__(owner, name, value)
    else:
        setattr(owner, name, value)


def _set_in_partial(owner: partial[Any], name: str, value: Any) -> None:
    """Set an argument or an attribute of a partial."""
    if name in owner.keywords:
        owner.keywords[name] = value
    elif name in vars(owner):
        setattr(owner, name, value)
    else:
        args = [value if name == f"args[{number}]" else item for number, item in enumerate(owner.args)]
        owner.__setstate__((owner.func, tuple(args), owner.keywords, vars(owner)))  # type: ignore[attr-defined]


def _mangled(name: str, kind: type) -> str:
    """Return the name under which a class stores a private slot."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if is_private else name


def behind(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects behind a callable, with their paths: of methods, partials, weak references.

    Example:
        >>> [name for name, _ in behind(partial(print, [1], end=[2]))]
        ['func', 'args[0]', 'end']
    """
    if isinstance(value, types.MethodType):
        yield "__self__", value.__self__
    elif isinstance(value, weakref.ref):
        yield "()", value()
    elif isinstance(value, partial):
        yield "func", value.func
        yield from ((f"args[{number}]", item) for number, item in enumerate(value.args))
        yield from value.keywords.items()


def is_engine_or_trainer(value: Any) -> bool:
    """Return whether a value is any engine or trainer, whose state is a separate checkpoint.

    Example:
        >>> is_engine_or_trainer(3)
        False
    """
    return any(offered(owner, "eval_cursor") is not None for owner in (value, offered(value, "_engine")))


def is_user_object(owner: Any) -> bool:
    """Return whether an object's class, or a function, may be the user's: not from a well-known library.

    Example:
        >>> is_user_object(3), is_user_object(print)
        (False, False)
    """
    return is_user_class(owner if isinstance(owner, types.FunctionType) else type(owner))


def is_user_class(kind: Any) -> bool:
    """Return whether a class or a function is defined in a module that may be the user's.

    Example:
        >>> is_user_class(int)
        False
    """
    return is_users_root(str(kind.__module__).partition(".")[0])


def is_users_root(root: str) -> bool:
    """Return whether a top-level module may be the user's.

    Example:
        >>> is_users_root("torch"), is_users_root("__main__")
        (False, True)
    """
    return root == "__main__" or not (root in LIBRARIES or root in sys.stdlib_module_names)


def names_used_by(function: types.FunctionType) -> Iterator[str]:
    """Yield the names that a function uses, including nested functions."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        yield from code.co_names
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
