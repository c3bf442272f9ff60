"""Names that a hook or a callback reads from the trainer, or sets on it, in vain."""

from __future__ import annotations

import difflib
import dis
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

_COUNTERPARTS = {
    "global_step": "step", "current_epoch": "epoch", "scheduler": "lr_scheduler", "max_steps": "total_steps",
    "stop_training": "should_stop", "should_training_stop": "should_stop", "terminate": "should_stop",
}  # fmt: skip
"""Attributes of trainers of other libraries."""
_GUARDS = frozenset((
    "hasattr", "getattr", "suppress", "AttributeError", "KeyError", "LookupError", "Exception", "BaseException",
))  # fmt: skip
"""Names in the code of functions that expect a name to be missing."""


def names_in_vain(function: Any, trainer: Any, *, may_set: Callable[[str], bool], place: str) -> Iterator[str]:
    """Yield warnings about attributes that a function reads from its first argument, or sets on it, in vain.

    Args:
        function: function or method that is called with a trainer.
        trainer: the trainer, as it is when training begins.
        may_set: whether the user's code may set an attribute of a name later.
        place: name of the function, for messages.

    Example:
        >>> import types
        >>> trainer = types.SimpleNamespace(step=1)
        >>> list(names_in_vain(lambda it: it.global_step, trainer, may_set=lambda name: False, place="mine"))
        ["mine reads trainer.global_step, which SimpleNamespace does not have; did you mean 'step'?"]
    """
    kind = type(trainer).__name__
    for does, name in dict.fromkeys(_uses_of(function, 0)):
        if does == "keys" or hasattr(trainer, name) or (does == "reads" and may_set(name)):
            continue
        known = [one for one in dir(trainer) if not one.startswith("_")]
        meant = [_COUNTERPARTS[name]] if name in _COUNTERPARTS else difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {meant[0]!r}?" if meant else ""
        if does == "reads":
            yield f"{place} reads trainer.{name}, which {kind} does not have{hint}"
        elif name in _COUNTERPARTS:
            yield f"{place} sets trainer.{name}, which nothing reads{hint}"


def keys_in_vain(function: Any, number: int, *, known: Collection[str], place: str) -> Iterator[str]:
    """Yield warnings about keys that a function reads from a dict among its arguments, which will not be there.

    Args:
        function: function or method.
        number: position of the dict among the arguments.
        known: keys that there will be.
        place: name of the function, for messages.

    Example:
        >>> list(keys_in_vain(lambda trainer, record: record["val_loss"], 1, known=["eval_loss"], place="mine"))
        ["mine reads 'val_loss', which will not be there; did you mean 'eval_loss'?"]
    """
    for does, name in dict.fromkeys(_uses_of(function, number)):
        if does == "keys" and name not in known:
            meant = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {meant[0]!r}?" if meant else f"there will be {', '.join(known)}"
            yield f"{place} reads {name!r}, which will not be there; {hint}"


def _uses_of(function: Any, number: int) -> Iterator[tuple[str, str]]:
    """Yield "reads", "sets" or "keys" with each name of an attribute or key of an argument that a function uses."""
    number += isinstance(function, types.MethodType)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or code.co_argcount <= number or not _GUARDS.isdisjoint(code.co_names):
        return
    argument, found = code.co_varnames[number], list(dis.get_instructions(code))
    looks_keys_up = "get" in code.co_names or any(each.opname == "CONTAINS_OP" for each in found)
    for before, now, after in zip(found, found[1:], [*found[2:], None], strict=False):
        loaded = before.argval[-1] if isinstance(before.argval, tuple) and before.argval else before.argval
        if not before.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) or loaded != argument:
            continue
        if now.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield "reads", now.argval
        elif now.opname == "STORE_ATTR":
            yield "sets", now.argval
        elif looks_keys_up or after is None or not isinstance(now.argval, str):
            continue
        elif after.opname == "BINARY_SUBSCR":
            yield "keys", now.argval
