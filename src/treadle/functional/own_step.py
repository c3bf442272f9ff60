"""Engine whose steps go through a subclass's ``train_step``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from treadle import distributed
from treadle.data.cursor import Group
from treadle.engine import Engine
from treadle.engine.settings import Outcome
from treadle.errors import ConfigError
from treadle.functional.replaced import ReplacedStep
from treadle.functional.task import TrainerTask

if TYPE_CHECKING:
    from treadle.functional.trainer import Trainer

OwnStep = Callable[[Any], Any]
_STEP_KEYS = ("loss", "lr", "grad_norm")


def engine_class(trainer: Trainer, task: TrainerTask) -> Callable[..., Engine]:
    """Return Engine, or an engine that runs the subclass's ``train_step``."""
    if not trainer._overrides("train_step"):
        return Engine
    replaced = trainer._replaces("train_step")
    return partial(OwnStepEngine, own_step=trainer.train_step, weighted=task.weighted, replaced=replaced)


class OwnStepEngine(Engine):
    """Engine that calls ``own_step(batch)`` for each step, which must call :meth:`inner_step` exactly once.

    The loop, the counters, the hooks and the handling of refused steps remain the engine's. Numbers added by the
    override become records of the step. An override that replaces the step does not call it.

    Args:
        own_step: the trainer's overridden method.
        replaced: whether it replaces the step; see :class:`ReplacedStep`.
        weighted: pairs numbers of the last batch with their weights.
        kwargs: arguments of the engine.
    """

    def __init__(
        self,
        *args: Any,
        own_step: OwnStep,
        weighted: Callable[[Mapping[str, Any]], dict[str, Any]],
        replaced: bool = False,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._replaced = ReplacedStep(self, own_step) if replaced else None
        self._weighted = weighted
        self._own_step: OwnStep | None = own_step
        self._waiting: Group | None = None  # the group whose step the override must run
        self._outcomes: list[Outcome] = []

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Train like the engine.

        Raises:
            ConfigError: a step has several micro-batches, but an override gets only one.
        """
        if self.accumulation_steps > 1:
            raise ConfigError(
                f"={self.accumulation_steps}: an overridden train_step sees a single micro-batch, so a step cannot "
                "have several; override _compute_loss instead, or turn accumulation off",
                argument="gradient_accumulation_steps",
            )
        if self._replaced is not None and distributed.world_size() > 1:
            raise ConfigError(
                "the override replaces this trainer's step, so its gradients would not be all-reduced over ranks; "
                "call super().train_step(batch), or override _forward_pass or _compute_loss",
                argument="train_step",
            )
        super().run(*args, **kwargs)

    def train_step(self, group: Group) -> Outcome:
        """Run the step through the override, once."""
        if self._own_step is None:
            return super().train_step(group)
        if self._replaced is not None:
            return self._replaced.run(group)
        self._outcomes, self._waiting = [], group
        try:
            result = self._own_step(group.batches[0])
        finally:
            self._waiting = None
        if not self._outcomes:
            raise ConfigError(
                "the override did not call super().train_step(batch) for this batch but did for others; call it for "
                "every batch, or for none to replace the step",
                argument="train_step",
            )
        self._add_records(result)
        return self._outcomes[0]

    def inner_step(self, batch: Any) -> bool:
        """Run the step that the loop is waiting for; return False if there is none.

        Raises:
            ConfigError: it has already run.
        """
        if self._replaced is not None and self.progress.in_step:
            raise ConfigError(
                "the override calls the trainer's own step in a way that cannot be detected; call it as "
                "super().train_step(batch)",
                argument="train_step",
            )
        if self._waiting is None:
            return False
        if self._outcomes:
            raise ConfigError(
                "the override calls super().train_step(batch) a second time; call it once, since one batch is one step",
                argument="train_step",
            )
        group = Group([batch], self._waiting.data_time, self._waiting.sample_ids)
        self._outcomes.append(super().train_step(group))
        return True

    def step_group(self, batches: Sequence[Any]) -> bool:
        """Run one step directly, for an override that calls it."""
        with self.temporarily(_own_step=None):
            return super().step_group(batches)

    def _add_records(self, result: Any) -> None:
        if not isinstance(result, Mapping):
            raise ConfigError(
                f"the override returned a {type(result).__name__}; return the dict of super().train_step(batch), "
                "with your additions",
                argument="train_step",
            )
        added = {name: value for name, value in result.items() if name not in _STEP_KEYS}
        if added and self.step_outputs:
            self.attempt.add_records(self._weighted(added))


def numbers_of(info: Mapping[str, Any]) -> dict[str, float]:
    """Read the results of a step of one micro-batch from the device: ``loss``, ``lr``, and ``grad_norm`` if known.

    Example:
        >>> numbers_of({"loss": [None], "lr": [0.1]})
        {'loss': nan, 'lr': 0.1}
    """
    loss = info["loss"][0]
    numbers = {"loss": math.nan if loss is None else float(loss), "lr": float(info["lr"][0])}
    if "grad_norm" in info:
        numbers["grad_norm"] = float(info["grad_norm"])
    return numbers
