"""Override points of the chemomae 0.2 trainer, as a task, a loader and hooks of the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from treadle.engine import Engine
from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.spectra.chemomae.config import PreparedBatch
from treadle.spectra.files import EXTENSION
from treadle.spectra.task import PreparedSpectra, SpectraTask
from treadle.task import Rng, StepOutput, Totals

if TYPE_CHECKING:
    from treadle.spectra.chemomae.trainer import Trainer

STEP_HOOKS = ("prepare_batch", "forward_batch", "compute_loss", "before_step")


class EpochBatches:
    """Batches of the current epoch, from ``train_batches`` of a subclass."""

    def __init__(self, trainer: Trainer):
        # A function, which is not searched for state: the trainer is not part of the data.
        self._open: Callable[[], Iterable[Any]] = lambda: trainer.train_batches(trainer.epoch + 1)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._open())


class OwnMasksTask(SpectraTask):
    """Reconstruction task that also accepts batches with masks."""

    def __init__(self, task: SpectraTask):
        vars(self).update(vars(task))

    def _prepared(self, model: nn.Module, batch: Any) -> PreparedSpectra:
        if not isinstance(batch, PreparedBatch):
            return super()._prepared(model, batch)
        mask = batch.visible_mask
        if mask is None:
            clean = super()._prepared(model, batch.target) if self.augmenter is None else PreparedSpectra(batch.target)
            return dataclasses.replace(clean, seen=batch.model_input)
        return PreparedSpectra(batch.target, batch.model_input, mask)


class HookedTask(OwnMasksTask):
    """Reconstruction task that calls the methods of a :class:`Trainer` subclass; its loss is weighted by spectra."""

    def __init__(self, trainer: Trainer, task: SpectraTask):
        super().__init__(task)
        self.trainer = trainer
        self.batch: PreparedBatch | None = None
        self.batch_index = -1
        self._epoch = 0

    def prepare_batch(self, model: nn.Module, batch: Any) -> tuple[Any, float | None]:
        """Return the batch prepared by the subclass, and its number of spectra."""
        prepared = self.trainer.prepare_batch(batch)
        if not isinstance(prepared, PreparedBatch):
            raise ConfigError(f"prepare_batch returned a {type(prepared).__name__}; it must return a PreparedBatch")
        return prepared, float(len(prepared.target))

    def step(self, model: nn.Module, batch: Any, totals: Totals = None, generator: Rng = None) -> StepOutput:
        """Return the loss computed by the subclass."""
        trainer, epoch = self.trainer, self.trainer.current_epoch
        prepared = self.prepare_batch(model, batch)[0].to(self.device)
        self.batch_index = self.batch_index + 1 if epoch == self._epoch else 0
        self._epoch, self.batch = epoch, prepared
        trainer.before_step(epoch, self.batch_index, prepared)
        x_recon, visible_mask = trainer.forward_batch(prepared)
        loss = trainer.compute_loss(x_recon, prepared.target, visible_mask)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise ConfigError("compute_loss must return a tensor without dimensions")
        return StepOutput(loss, weight=float(len(prepared.target)), num_samples=len(prepared.target))


class ExtensionHook(BaseHook):
    """Hook that stores the state of a :class:`Trainer` subclass in checkpoints."""

    implicit = True

    def __init__(self, owner: Trainer):
        self._owner = owner

    @property
    def state_key(self) -> str:
        """Return the key of the state."""
        return EXTENSION

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Add the state of the subclass, if there is any."""
        state = self._owner.checkpoint_extra_state()
        if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
            raise ConfigError("checkpoint_extra_state must return a dict whose keys are strings")
        if state:
            state_dict["hooks"][self.state_key] = state

    def on_load_state_dict(self, trainer: Engine, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of the subclass."""
        self._owner.load_checkpoint_extra_state(dict((state_dict.get("hooks") or {}).get(self.state_key) or {}))


class StepExtension(ExtensionHook):
    """Hook that stores the state of a subclass and calls its ``after_step`` after each step."""

    def __init__(self, owner: Trainer):
        super().__init__(owner)
        self._applied = 0

    def on_before_step(self, trainer: Engine) -> None:
        """Record how many steps were applied."""
        self._applied = trainer.applied_steps

    def on_after_step(self, trainer: Engine) -> None:
        """Call ``after_step`` of the subclass with the loss."""
        task = trainer.task
        assert isinstance(task, HookedTask)
        assert task.batch is not None
        losses = trainer.step_info["loss"]
        self._owner.after_step(
            self._owner.current_epoch, task.batch_index, task.batch, loss=float(losses[-1]),
            optimizer_updated=trainer.applied_steps > self._applied,
        )  # fmt: skip
