"""Observation of steps and epochs that a subclass implements in place of the trainer's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from treadle.data.cursor import Group
from treadle.engine import Engine
from treadle.engine.attempt import apply_step_effects, begin_record
from treadle.engine.settings import Outcome
from treadle.engine.signal_exit import exit_on_signal
from treadle.errors import ConfigError
from treadle.functional.batches import num_samples, split_batch
from treadle.task import StepOutput

if TYPE_CHECKING:
    from treadle.functional.settings import TrainingSettings

_log = logging.getLogger("treadle.functional")
_LOSS_KEYS = ("loss", "train_loss")
_STEP_KEYS = (*_LOSS_KEYS, "lr", "grad_norm")
_SAVED = (
    "weights, optimizer, scheduler, counters, data position and random state are saved and resumed as usual, but not "
    "what the override keeps elsewhere (a gradient scaler, gradients gathered over several calls)"
)


class StepObserver:
    """Observed steps of the optimizer and the scheduler while user code runs.

    Args:
        optimizer: optimizer whose steps are counted.
        scheduler: scheduler, or None.

    Attributes:
        steps: calls of ``optimizer.step()`` since :meth:`start`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> observer = StepObserver(optimizer, None)
        >>> observer.start(); optimizer.step(); observer.steps, observer.schedule_stepped
        (1, False)
    """

    def __init__(self, optimizer: Optimizer, scheduler: Any):
        self.steps = 0
        self._optimizer, self._scheduler = optimizer, scheduler
        self._count = self._schedule_count()
        self._version = self._weights_version()
        self._handle = optimizer.register_step_post_hook(self._stepped)

    def close(self) -> None:
        """Stop counting permanently."""
        self._handle.remove()

    def start(self) -> None:
        """Start counting."""
        self.steps = 0
        self._count = self._schedule_count()
        self._version = self._weights_version()

    @property
    def weights_changed(self) -> bool:
        """Whether the weights were written to since :meth:`start`, by this optimizer or by other code."""
        return bool(self.steps) or self._weights_version() != self._version

    def _weights_version(self) -> int:
        return sum(one._version for group in self._optimizer.param_groups for one in group["params"])

    @property
    def schedule_stepped(self) -> bool:
        """Whether the scheduler was stepped since :meth:`start`."""
        return bool(self._schedule_count() != self._count)

    def _schedule_count(self) -> Any:
        return getattr(self._scheduler, "_step_count", getattr(self._scheduler, "last_epoch", None))

    def _stepped(self, *_: Any) -> None:
        self.steps += 1


class ReplacedStep:
    """Step that a subclass runs in place of the engine's.

    Args:
        engine: keeps the counters, calls the hooks and saves the state.
        own_step: overriding method.
    """

    def __init__(self, engine: Engine, own_step: Callable[[Any], Any]):
        self._engine = engine
        self._own_step = own_step
        self._observer = StepObserver(engine.optimizer, engine.lr_scheduler)

    def run(self, group: Group) -> Outcome:
        """Run the override and record its results and optimizer steps.

        Returns:
            ``"applied"`` if it changed the weights, by the optimizer or otherwise, else ``"skipped"``.

        Raises:
            ConfigError: it did not return a dict with a loss.
        """
        engine, batch = self._engine, group.batches[0]
        rates = engine.progress.read_rates(engine.optimizer)
        self._observer.start()
        result = self._own_step(batch)
        begin_record(engine, group)
        engine.attempt.info["lr"] = rates
        engine.attempt.record_output(step_output(batch, result))
        if not self._observer.weights_changed:
            engine.attempt.info["reason"] = "the override of train_step did not step the optimizer"
            return "skipped"
        if not self._observer.steps:  # torch would warn about a scheduler that steps before its optimizer
            engine.optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._observer.schedule_stepped:
            engine.state.schedule.compare(engine, expected=True)
            with engine.temporarily(lr_scheduler=None):
                return apply_step_effects(engine)
        return apply_step_effects(engine)


def step_output(batch: Any, result: Any) -> StepOutput:
    """Return the loss of an overridden ``train_step``, weighted by the samples of the batch, and its records.

    Raises:
        ConfigError: it is not a dict, or has no loss.

    Example:
        >>> output = step_output(torch.zeros(4, 2), {"loss": 0.5, "accuracy": 1.0})
        >>> output.loss, output.weight, output.records
        (tensor(0.5000), 4.0, {'accuracy': 1.0})
    """
    if not isinstance(result, Mapping):
        raise ConfigError(
            f"the override returned a {type(result).__name__}; return a dict with the loss, such as "
            "{'loss': loss.item()}",
            argument="train_step",
        )
    loss = next((result[key] for key in _LOSS_KEYS if key in result), None)
    if loss is None:
        raise ConfigError(
            f"the override returned no loss, only {', '.join(map(str, result)) or 'an empty dict'}; return it "
            "under the key 'loss'",
            argument="train_step",
        )
    samples = num_samples(split_batch(batch)[0])
    value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
    records = {name: number for name, number in result.items() if name not in _STEP_KEYS}
    return StepOutput(value, records, weight=float(samples or 1), num_samples=samples)


class EpochBatches:
    """Batches of the running epoch for an override of ``train_epoch``; the position is the engine's.

    Args:
        engine: engine of the epoch.
        loader: loader whose attributes, such as ``dataset``, this object forwards.
        on_resumed: called before the first batch of an epoch that was resumed in the middle.

    Attributes:
        before: batches of this epoch that were trained before a checkpoint was loaded.
    """

    def __init__(self, engine: Engine, loader: Iterable[Any], *, on_resumed: Callable[[], None]):
        self._engine = engine
        self._loader = loader
        self._on_resumed = on_resumed
        self._first: list[Any] = []
        self.before = engine.cursor.position

    @property
    def left(self) -> bool:
        """Whether the epoch has a batch left; reads it if a checkpoint from within the epoch was loaded."""
        if not self.before or self._first:
            return True
        self._engine.cursor.open(self._loader)
        self._first = self._engine.cursor.take(1).batches
        return bool(self._first)

    def __iter__(self) -> Iterator[Any]:
        cursor, first = self._engine.cursor, self._first
        self._first = []
        cursor.open(self._loader)
        if first:
            self._on_resumed()
        while group := first or cursor.take(1).batches:
            first = []
            self._engine.events.hold()
            yield group[0]
            if not cursor.ended:
                self._leave_step()

    def _leave_step(self) -> None:
        """Write and exit as asked for in the step that the override has taken, now that it asks for the next batch."""
        if self._engine.events.release():
            self._engine.events.write_requested()
            exit_on_signal(self._engine)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class OwnSteps:
    """Counter of optimizer steps that an override of ``train_epoch`` takes without the trainer.

    Args:
        engine: engine whose counters are updated.

    Attributes:
        observer: steps of the optimizer and the scheduler in the epoch.
    """

    def __init__(self, engine: Engine):
        self.observer = StepObserver(engine.optimizer, engine.lr_scheduler)
        self._engine = engine
        self._counting = False
        self._inside: Optimizer | None = None  # optimizer whose step is running; nested steps are part of it
        inner = [one for one in vars(engine.optimizer).values() if isinstance(one, Optimizer)]  # SAM steps its own
        self._handles = [
            handle
            for optimizer in (engine.optimizer, *inner)
            for handle in (
                optimizer.register_step_pre_hook(self._count), optimizer.register_step_post_hook(self._leave)
            )
        ]  # fmt: skip

    def start(self) -> None:
        """Start counting at the start of an epoch."""
        self.observer.start()
        self._counting, self._inside = True, None

    def stop(self) -> None:
        """Stop counting after an epoch, and let files be written again."""
        self._counting = False
        self._engine.events.release()

    def close(self) -> None:
        """Stop counting permanently."""
        self.stop()
        for handle in self._handles:
            handle.remove()
        self.observer.close()

    def _leave(self, optimizer: Optimizer, *_: Any) -> None:
        self._inside = None if self._inside is optimizer else self._inside

    def _count(self, optimizer: Optimizer, *_: Any) -> None:
        if self._inside is not None:
            return
        self._inside, progress = optimizer, self._engine.progress
        if self._counting and not progress.in_step:  # a step through train_step counts itself
            progress.count_own_step(self._engine.optimizer)


def warn_of_replaced(replaces: Callable[[str], bool], settings: TrainingSettings) -> None:
    """Warn once about features that a replaced step or epoch lacks, and refuse settings without effect in it.

    Args:
        replaces: returns whether a user's method does not call the one that it overrides.
        settings: settings of the trainer.

    Raises:
        ConfigError: mixed precision or accumulation is requested, which the override must do itself.
    """
    if replaces("train_step"):
        _warn_of_replaced_step(settings)
    if replaces("train_epoch"):
        _warn_of_replaced_epoch(settings)


def _warn_of_replaced_step(settings: TrainingSettings) -> None:
    _refuse_precision(settings, "train_step")
    _log.warning(
        "train_step: the override replaces this trainer's step. Each call is a step, applied if it changes the "
        "weights; %s. Its loss weights each batch by its number of samples. Gradients are not clipped, checked for "
        "being finite or passed to hooks%s",
        _SAVED, _idle(settings),
    )  # fmt: skip


def _warn_of_replaced_epoch(settings: TrainingSettings) -> None:
    _refuse_precision(settings, "train_epoch")
    if settings.gradient_accumulation_steps > 1:
        raise ConfigError(
            "the override of train_epoch replaces this trainer's loop, so there is no accumulation; do it in the "
            "override",
            argument="config.training.gradient_accumulation_steps",
            value=settings.gradient_accumulation_steps,
        )
    _log.warning(
        "train_epoch: the override replaces this trainer's loop. Whole epochs are saved and resume exactly: %s. "
        "Hooks see only the steps that go through train_step; the override's optimizer steps are only counted%s",
        _SAVED,
        _idle(settings),
    )


def _idle(settings: TrainingSettings) -> str:
    """Return the end of a message about ignored settings of the step."""
    names = ("max_grad_norm", "grad_clip_value", "max_non_finite_grad_retries")
    idle = [f"{name}={getattr(settings, name)}" for name in names if getattr(settings, name)]
    return f"; no effect unless the override reads them: {', '.join(idle)}" if idle else ""


def _refuse_precision(settings: TrainingSettings, method: str) -> None:
    if settings.precision is not None:
        raise ConfigError(
            f"the override of {method} replaces this trainer's, so its autocast is not used: use torch.autocast in "
            "the override and leave the setting out",
            argument="config.training.mixed_precision",
            value=settings.mixed_precision,
        )
