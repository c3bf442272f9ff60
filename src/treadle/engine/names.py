"""Detection of methods that nothing calls: misspelt names, names of other libraries, overrides on an instance."""

from __future__ import annotations

import difflib
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from treadle.checkpoint.introspection import names_used_by
from treadle.errors import ConfigError

FOREIGN = {
    "_train_step": "train_step", "_build_model": "build_model", "_build_optimizer": "build_optimizer",
    "training_step": "forward", "train_batch": "forward", "run_step": "train_step", "compute_loss": "forward",
    "configure_optimizers": "build_optimizer and build_lr_scheduler", "train_dataloader": "build_data_loader",
    "get_train_dataloader": "build_data_loader", "create_optimizer": "build_optimizer",
    "create_scheduler": "build_lr_scheduler", "configure_callbacks": "build_hooks",
    "validation_step": "forward, or give eval_step to a ValidationHook",
    "val_dataloader": "build_hooks, with a ValidationHook over the loader",
    "build_scheduler": "build_lr_scheduler", "build_val_data_loader": "build_eval_data_loader",
    "get_eval_dataloader": "build_eval_data_loader", "log_scalars": "log",
    **{f"_{event}": f"pass a hook with on_{event} in hooks=[...]" for event in
       ("before_train", "after_train", "before_step", "after_step", "before_optimizer_step")},
}  # fmt: skip
"""Methods of other libraries, and their counterparts here."""
_LIKE_AN_EVENT = re.compile(
    "on_(after|before|train|val|test|fit|epoch|step|batch|save|load|log|eval|predict|optimizer|exception)"
)


def uncalled_methods(kind: type, base: type, *, known: Collection[str], foreign: Mapping[str, str]) -> Iterator[str]:
    """Yield warnings about methods whose names are misspelt or belong to another library.

    A method that another method of the class calls is taken as the user's own. A call of ``super()`` does not count.

    Args:
        kind: the user's class.
        base: the class that it extends.
        known: names of methods that may be overridden.
        foreign: names of other libraries, with their counterparts here.

    Example:
        >>> class Base: ...
        >>> class Mine(Base):
        ...     def build_optimiser(self): ...
        >>> list(uncalled_methods(Mine, Base, known=["build_optimizer"], foreign={}))
        ["Mine.build_optimiser: nothing calls it; did you mean 'build_optimizer'?"]
    """
    own = {
        name: value
        for owner in kind.__mro__[: kind.__mro__.index(base)]
        for name, value in vars(owner).items()
        if isinstance(value, types.FunctionType) and not hasattr(base, name)
    }
    called = {name for owner in kind.__mro__[: kind.__mro__.index(base)] for name in names_used_in(owner)}
    for name in own.keys() - called:
        if name in known:  # called by a command
            continue
        if name in foreign:
            hint = foreign[name] if foreign[name].startswith("pass ") else f"override {foreign[name]}"
            yield f"{kind.__name__}.{name}: nothing calls it; {hint}"
        elif _LIKE_AN_EVENT.match(name):
            yield f"{kind.__name__}.{name}: nothing calls it; events are methods of hooks: pass a hook in hooks=[...]"
        elif meant := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            yield f"{kind.__name__}.{name}: nothing calls it; did you mean {meant[0]!r}?"


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with a number of arguments; True if its signature is unknown.

    Example:
        >>> takes(lambda batches, epoch: {}, 3)
        False
    """
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def refuse_signatures(owner: Any, counts: Mapping[str, tuple[int, ...]]) -> None:
    """Raise early for an override that does not accept the trainer's arguments.

    Args:
        owner: the user's trainer.
        counts: for each method, the numbers of arguments that it may be called with.

    Raises:
        ConfigError: one takes other arguments.
    """
    for name, allowed in counts.items():
        method = getattr(owner, name)
        if not callable(method) or any(takes(method, count) for count in allowed):
            continue
        raise ConfigError(
            f"{type(owner).__name__}.{name}{inspect.signature(method)}: is called with "
            f"{' or '.join(map(str, allowed))} argument{'s' if allowed != (1,) else ''}; take as many as the method "
            "that it overrides"
        )


def names_used_in(owner: type) -> Iterator[str]:
    """Yield the names that the methods of a class use, without those that only the method of this name uses."""
    for own_name, value in vars(owner).items():
        if isinstance(value, types.FunctionType):
            yield from (name for name in names_used_by(value) if name != own_name)


def replaces(kind: type, base: type, method: str) -> bool:
    """Return whether a subclass replaces a method of its base: no override of it calls the base's.

    Args:
        kind: the user's class.
        base: the class that it extends.
        method: the name of the method.

    Example:
        >>> class Base:
        ...     def step(self): ...
        >>> class Adds(Base):
        ...     def step(self): return super().step()
        >>> class Replaces(Base):
        ...     def step(self): return 1
        >>> replaces(Adds, Base, "step"), replaces(Replaces, Base, "step"), replaces(Base, Base, "step")
        (False, True, False)
    """
    owners = kind.__mro__[: kind.__mro__.index(base)]
    own = {name: value for owner in owners for name, value in vars(owner).items()}
    overrides = [vars(owner)[method] for owner in owners if isinstance(vars(owner).get(method), types.FunctionType)]
    return any(method not in _names_reached(override, own) for override in overrides)


def _names_reached(function: types.FunctionType, own: Mapping[str, Any]) -> set[str]:
    """Return the names that a method uses, itself or through other methods of its class."""
    found: set[str] = set()
    waiting = list(names_used_by(function))
    while waiting:
        name = waiting.pop()
        helper = own.get(name)
        if name not in found and isinstance(helper, types.FunctionType) and helper is not function:
            waiting += names_used_by(helper)
        found.add(name)
    return found


def is_own_helper(kind: type, base: type, name: str) -> bool:
    """Return whether other methods of a user's class call a method of this name, which makes it the user's own.

    Example:
        >>> class Base: ...
        >>> class Mine(Base):
        ...     def _build(self): ...
        ...     def build_model(self): return self._build()
        >>> is_own_helper(Mine, Base, "_build")
        True
    """
    owners = kind.__mro__[: kind.__mro__.index(base)]
    methods = [item for owner in owners for item in vars(owner).items() if isinstance(item[1], types.FunctionType)]
    defined = any(method == name for method, _ in methods)
    return defined and any(name in names_used_by(function) for method, function in methods if method != name)


def overridden_on_instance(owner: Any, methods: Collection[str]) -> Iterator[str]:
    """Yield warnings about methods set on an object although they are looked up on its class.

    Example:
        >>> class Mine:
        ...     def evaluate(self): ...
        >>> mine = Mine(); mine.evaluate = print
        >>> list(overridden_on_instance(mine, ["evaluate"]))
        ['evaluate: set on this object of Mine, which nothing calls; override it in a subclass']
    """
    for name in methods:
        if name in vars(owner):
            kind = type(owner).__name__
            yield f"{name}: set on this object of {kind}, which nothing calls; override it in a subclass"


_BUILT = {
    "data_loader": "build_data_loader", "model": "build_model", "optimizer": "build_optimizer",
    "lr_scheduler": "build_lr_scheduler", "hooks": "build_hooks",
}  # fmt: skip


def idle_attributes(trainer: Any, base: type) -> Iterator[str]:
    """Yield warnings about parts that were assigned before they are built, and about arguments in a class body.

    Args:
        trainer: of a subclass.
        base: class whose constructor takes the arguments.
    """
    kind = type(trainer)
    for name, method in _BUILT.items():
        if getattr(trainer, name) is not None and name in vars(trainer):
            yield (
                f"{kind.__name__}.{name}: assigned before training, but {method}() replaces it; return it from there"
            )
    arguments = inspect.signature(base.__init__).parameters  # type: ignore[misc]
    for owner in kind.__mro__[: kind.__mro__.index(base)]:
        for name in sorted((arguments.keys() | _BUILT.keys()) & vars(owner).keys()):
            if not callable(vars(owner)[name]) and not hasattr(vars(owner)[name], "__get__"):
                fix = f"return it from {_BUILT[name]}()" if name in _BUILT else f"pass {name}= to the constructor"
                yield f"{owner.__name__}.{name}: an attribute of the class is not read; {fix}"
