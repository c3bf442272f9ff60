"""Masks of graph data in a batch that the user's code does not read."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from treadle.checkpoint.introspection import is_user_class, names_used_by

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

_EVALUATED = ("val_mask", "test_mask")


def warn_of_masks(engine: Engine, batch: Any, *, training: bool) -> None:
    """Warn about ``train_mask``, or ``val_mask`` and ``test_mask``, in a batch if the user's code never names them.

    Args:
        engine: engine of the run; a task with ``reads_masks = True`` is not warned about.
        batch: first batch of training or of an evaluation.
        training: whether the batch is of training, which decides the masks to look for.
    """
    wanted = ("train_mask",) if training else _EVALUATED
    found = [name for part in _parts(batch) for name in wanted if _has(part, name)]
    if not found or getattr(engine.task, "reads_masks", False):
        return
    if set(wanted).isdisjoint(_names_in_user_code(engine)):
        engine.logger.warning(
            "the batch has %s, which tells the rows that count in %s, and nothing reads it, so all rows count; select "
            "them in the step, as in loss(outputs[batch.%s], batch.y[batch.%s]), or delete it from the data",
            " and ".join(dict.fromkeys(found)), "training" if training else "an evaluation", found[0], found[0],
        )  # fmt: skip


def _parts(batch: Any) -> tuple[Any, ...]:
    return (batch, *batch) if isinstance(batch, (list, tuple)) else (batch,)


def _has(part: Any, name: str) -> bool:
    if isinstance(part, Mapping):
        return isinstance(part.get(name), Tensor)
    return not isinstance(part, Tensor) and isinstance(getattr(part, name, None), Tensor)


def _names_in_user_code(engine: Engine) -> set[str]:
    """Return the names and strings in the code of the user's trainer, task, modules and loss."""
    task = engine.task
    owners = [engine, task, getattr(task, "trainer", None), *engine.model.modules()]
    waiting = [value for owner in owners for value in _methods(type(owner)) if isinstance(value, types.FunctionType)]
    waiting += _functions(getattr(task, name, None) for name in ("loss_fn", "step"))
    seen: set[types.FunctionType] = set()
    found: set[str] = set()
    while waiting:
        function = waiting.pop()
        if function in seen or not is_user_class(function):
            continue
        seen.add(function)
        names = set(names_used_by(function))
        found |= names | set(_texts(function.__code__))
        waiting += _functions(map(function.__globals__.get, names))
    return found


def _methods(kind: type) -> Iterable[Any]:
    """Return the methods that the user's classes define, without overridden ones."""
    found: dict[str, Any] = {}
    for owner in reversed(kind.__mro__):
        found |= dict(vars(owner)) if is_user_class(owner) else {}
    return found.values()


def _functions(values: Iterable[Any]) -> Iterator[types.FunctionType]:
    return (value for value in values if isinstance(value, types.FunctionType))


def _texts(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _texts(constant)
