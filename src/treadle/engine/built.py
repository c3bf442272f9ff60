"""The parts with which a run was prepared: a resumed run builds these, so others are refused or named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from treadle.distributed import unwrap
from treadle.distributed.state_names import clean_name
from treadle.errors import CheckpointError

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


class Built:
    """Model, optimizer, schedule, loss and loader of an engine as it was prepared.

    Args:
        engine: that was prepared.
    """

    def __init__(self, engine: Engine):
        self._names = set(_saved_names(engine.model))
        self._parameters = {id(parameter) for parameter in engine.model.parameters()}
        self._held = {id(one) for group in engine.optimizer.param_groups for one in group["params"]}
        self.begin(engine)

    def begin(self, engine: Engine) -> None:
        """Take the parts with which a run begins: between two runs of one object they may be replaced."""
        self._optimizer, self._scheduler = engine.optimizer, engine.lr_scheduler
        self._model, self._task = engine.model, engine.task
        self._owner = getattr(engine.task, "trainer", None)
        self._loss = getattr(self._owner, "loss_fn", None)

    def refuse_others(self, engine: Engine) -> None:
        """Raise where a checkpoint would not fit the run that builds the first parts again.

        Raises:
            CheckpointError: the model has other parameters, or the optimizer, the model or the schedule is another.
        """
        for name, before, now in (
            ("model", self._model, engine.model), ("optimizer", self._optimizer, engine.optimizer),
            ("scheduler", self._scheduler, engine.lr_scheduler),
        ):  # fmt: skip
            if before is not now:
                raise CheckpointError(
                    f"{name}: it was a {type(before).__name__} when the run began and is another "
                    f"{type(now).__name__} now; a resumed run builds the first one, which would not take the state of "
                    "this one. Change it in place, or build it so from the start"
                )
        names = set(_saved_names(engine.model))
        if names != self._names:
            raise CheckpointError(
                f"model: since the run began it has gained {_listed(names - self._names)} and lost "
                f"{_listed(self._names - names)}; a resumed run builds it as it was, and could not load this state. "
                "Make all parameters when the model is built, as prune.identity and frozen layers do"
            )
        added = {id(one) for group in engine.optimizer.param_groups for one in group["params"]} - self._held
        late = [name for name, one in engine.model.named_parameters()
                if id(one) in added and id(one) not in self._parameters]  # fmt: skip
        if late:
            raise CheckpointError(
                f"optimizer: it holds {_listed(late)}, which was put into the place of another parameter while "
                "training; a resumed run builds the first one. Make all layers when the model is built"
            )

    def replaced(self, engine: Engine) -> Iterator[str]:
        """Yield warnings about parts that were replaced and that no checkpoint holds."""
        advice = "a resumed run begins with the first one. Build both and choose by an attribute, which is kept"
        if engine.task is not self._task:
            yield f"task: it has been replaced by another {type(engine.task).__name__}: {advice}"
        loss = getattr(self._owner, "loss_fn", None)
        if loss is not self._loss:
            yield f"loss_fn: it has been replaced by {_name_of(loss)}: {advice}"
        loader = getattr(engine, "data_loader", None)
        if loader is not None and engine.cursor.loader is not None and loader is not engine.cursor.loader:
            yield (
                f"data_loader: it has been replaced by another {type(loader).__name__} while training, which goes on "
                "with the first one: the new one is read from the next call of train() on. Change the loader's data or "
                "sampler in place"
            )


def _name_of(value: Any) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


def _saved_names(model: nn.Module) -> Iterator[str]:
    """Yield the names of parameters and persistent buffers."""
    for prefix, module in unwrap(model).named_modules(remove_duplicate=False):
        names = [*module._parameters, *(name for name in module._buffers
                                        if name not in module._non_persistent_buffers_set)]  # fmt: skip
        yield from (clean_name(f"{prefix}.{name}".lstrip(".")) for name in names)


def _listed(names: Any) -> str:
    found = sorted(names)
    return ", ".join(found[:6]) + (" and more" if len(found) > 6 else "") if found else "nothing"
