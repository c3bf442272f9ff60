"""SwaHook: keeps the equal average of the weights of the last part of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from treadle.data.sources import refuse_dataset
from treadle.distributed import unwrap
from treadle.engine.evaluation import for_each_batch
from treadle.errors.arguments import checked
from treadle.hooks.averaging import AveragingHook
from treadle.optim.ema import check_average
from treadle.optim.swa import Swa, check_start

if TYPE_CHECKING:
    from treadle.engine import Engine

_BatchNorm = nn.modules.batchnorm._BatchNorm


class SwaHook(AveragingHook):
    """Equal average of the weights from an applied step on, scored by evaluations in place of the weights.

    Before ``start`` the average is the weights. A model with BatchNorm gets the statistics of its average by a pass
    over the training data after the last step, as ``torch.optim.swa_utils.update_bn`` does; evaluations before that
    score the average with the statistics of the model. For a constant rate while averaging pass
    ``scheduler=treadle.SwaSchedule(...)`` to the trainer. Put the hook before one that evaluates.

    Args:
        start: the first applied step whose weights count, >= 1.
        update_interval: applied steps between two of them, such as those of an epoch.
        bn_loader: batches for the statistics of BatchNorm; None takes the training loader.
        device: where the average lives; None puts it beside the model.
        name: its key in the checkpoint.

    Raises:
        ConfigError: a value is outside its range, or a data set is given where a loader belongs.

    Example:
        >>> hook = SwaHook(start=750, update_interval=10)
    """

    _kind = "swa"

    @checked
    def __init__(
        self,
        start: int,
        update_interval: int = 1,
        *,
        bn_loader: Iterable[Any] | None = None,
        device: torch.device | str | int | None = None,
        name: str = "swa",
    ):
        check_start(start)
        check_average(0.0, update_interval)
        refuse_dataset(bn_loader, "bn_loader")
        super().__init__(update_interval, device, name)
        self.start = start
        self.bn_loader = bn_loader
        self._step_of_statistics: int | None = None

    @property
    def swa_model(self) -> Swa:
        """The ``AveragedModel``; ``swa_model.module`` is the averaged net.

        Raises:
            ConfigError: it is asked for before training started or a state was loaded.
        """
        return cast("Swa", self._made_average())

    def _made(self, model: nn.Module) -> Swa:
        return Swa(model, start=self.start, update_interval=self.update_interval, device=self.device)

    def on_before_train(self, trainer: Engine) -> None:
        """Warn of a start beyond the run."""
        super().on_before_train(trainer)
        if trainer.total_steps is not None and self.start > trainer.total_steps:
            trainer.logger.warning(
                "SwaHook: start=%d is beyond the %d steps of this run, so nothing is averaged", self.start,
                trainer.total_steps,
            )  # fmt: skip

    def on_after_step(self, trainer: Engine) -> None:
        """Measure the statistics of BatchNorm after the last step, so that its checkpoint has them."""
        if trainer.is_last_step:
            self.update_statistics(trainer)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Let any number of steps run: the last one alone matters."""
        return None

    def on_after_train(self, trainer: Engine) -> None:
        """Measure them where training was stopped before its target."""
        if self._step_of_statistics != trainer.step:
            self.update_statistics(trainer)

    def update_statistics(self, trainer: Engine, loader: Iterable[Any] | None = None) -> None:
        """Measure the running statistics of the average's BatchNorm layers by a pass over a loader, exactly.

        Random numbers, generators of the loader and the model's own statistics are put back. The next applied step
        gives the average the statistics of the model again.

        Args:
            trainer: the engine.
            loader: batches; None takes ``bn_loader``, or the loader of the training.
        """
        model, swa = unwrap(trainer.model), self.swa_model
        layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
        self._step_of_statistics = trainer.step
        loader = next((one for one in (loader, self.bn_loader, trainer.cursor.loader) if one is not None), None)
        if not layers or not swa.num_updates or loader is None:
            return
        momenta = [layer.momentum for layer in layers]

        def forward(batch: Any) -> None:
            model.train()  # as torch's update_bn does
            trainer.forward(batch)

        with swa.swapped_into(trainer.model):
            try:
                for layer in layers:
                    layer.reset_running_stats()
                    layer.momentum = None  # the mean over all batches
                for_each_batch(trainer.model, loader, forward, precision=trainer.precision, eval_seed=trainer.eval_seed)
                swa.copy_buffers_of(trainer.model)
            finally:
                for layer, momentum in zip(layers, momenta, strict=True):
                    layer.momentum = momentum
