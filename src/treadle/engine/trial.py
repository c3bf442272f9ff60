"""Trial steps on the real model and data, with every change undone."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle import distributed
from treadle.data.cursor import Cursor
from treadle.data.own_state import restored_generators
from treadle.data.stateful_workers import drop_iterator
from treadle.engine.attempt import Attempt
from treadle.engine.progress import Progress
from treadle.engine.session import HookDeclarations
from treadle.errors import ConfigError
from treadle.optim.evaluation_point import into_training_point
from treadle.optim.nonfinite import FiniteGuard
from treadle.optim.precision import Precision
from treadle.seed import forked_rng

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


class TrialSteps:
    """Steps of an engine on a loader, with a copy of its optimizer.

    Args:
        engine: engine inside :func:`undone`.
        loader: loader of micro-batches; restarted at its end.

    Attributes:
        optimizer: copy of the optimizer; its learning rates may be set between steps.
    """

    def __init__(self, engine: Engine, loader: Iterable[Any]):
        self._engine = engine
        self._loader = loader
        self.optimizer = engine.optimizer

    def run(self) -> Tensor | None:
        """Run one step and return its 0-d loss, or None if it was not applied.

        Raises:
            ConfigError: the loader is empty.
        """
        engine = self._engine
        for _ in range(2):
            engine.cursor.open(self._loader)
            group = engine.cursor.take(engine.settings.accumulation_steps)
            if group.batches:
                break
            engine.cursor.restart(epoch=engine.cursor.epoch + 1)
        else:
            raise ConfigError("it gave no batch", argument="loader")
        if engine.train_step(group) != "applied":
            return None
        losses = [output.loss for output in engine.attempt.outputs if output.loss is not None]
        return torch.stack([loss.detach().float() for loss in losses]).mean()


@contextlib.contextmanager
def undone(engine: Engine, loader: Iterable[Any]) -> Iterator[TrialSteps]:
    """Run trial steps inside the block, then restore weights, buffers, RNG and data position exactly.

    Hooks, schedule and averages are not involved, and the optimizer is a copy. The user's own objects on the trainer
    with ``state_dict``, such as second optimizers, are restored too.

    Args:
        engine: engine outside a run.
        loader: loader of the trial.

    Raises:
        ConfigError: the engine is training, or there are several ranks.
    """
    if engine.state.training:
        raise ConfigError("steps cannot be tried while training runs; do it before train()", argument="trainer")
    if distributed.world_size() > 1:
        raise ConfigError("steps are tried in one process; start it without torchrun", argument="trainer")
    engine.prepare()
    with _kept_model(engine), _kept_objects(engine), forked_rng(), restored_generators(loader), _kept_workers(loader):
        parts = {
            "optimizer": _copied(engine.optimizer), "lr_scheduler": None, "hooks": [],
            "declared": HookDeclarations(complete=True), "progress": Progress(), "attempt": Attempt(),
            "guard": FiniteGuard(), "cursor": Cursor(), "precision": Precision(engine.precision.name, engine.device),
        }  # fmt: skip
        with engine.temporarily(**parts):
            engine.model.train()
            into_training_point(engine.optimizer)
            try:
                yield TrialSteps(engine, loader)
            finally:
                engine.cursor.close()


@contextlib.contextmanager
def _kept_model(engine: Engine) -> Iterator[None]:
    model = engine.model
    modes = [(module, module.training) for module in model.modules()]
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    copies = [tensor.clone() for tensor in tensors]
    other = engine.state.modules.collect(model)
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        for tensor, value in zip(tensors, copies, strict=True):
            if not torch.equal(tensor, value):  # an unwritten tensor must not look modified
                tensor.copy_(value)
        for module, training in modes:
            module.training = training
        engine.state.modules.restore(model, other, ready=False)


@contextlib.contextmanager
def _kept_objects(engine: Engine) -> Iterator[None]:
    objects = engine.state.objects
    before = copy.deepcopy(objects.collect())
    try:
        yield
    finally:
        objects.restore(before)


@contextlib.contextmanager
def _kept_workers(loader: Any) -> Iterator[None]:
    """End persistent workers that a trial started: the run's workers must draw their seeds as if there was no trial."""
    before = getattr(loader, "_iterator", None)
    try:
        yield
    finally:
        if before is None and getattr(loader, "_iterator", None) is not None:
            drop_iterator(loader)


def _copied(optimizer: Any) -> Any:
    """Return an optimizer over the same parameters with separate state and groups."""
    double = object.__new__(type(optimizer))
    memo = {id(p): p for group in optimizer.param_groups for p in group["params"]} | {id(optimizer): double}
    own = dict(vars(optimizer))
    if hasattr(own.get("step"), "_wrapped_by_lr_sched"):
        del own["step"]  # a scheduler's wrapper, which would step the original
    double.__dict__.update(copy.deepcopy(own, memo))
    return double
