"""SwaHook: stochastic weight averaging over the last part of a run."""

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
    """Equal average of the weights, starting at an applied step, which evaluations score in place of the weights.

    Before ``start`` the average equals the weights. For a model with BatchNorm, the statistics of the average are
    computed by a pass over the training data after the last step, as ``torch.optim.swa_utils.update_bn`` does; earlier
    evaluations use the statistics of the model. For a constant learning rate during averaging, pass
    ``scheduler=treadle.SwaSchedule(...)`` to the trainer. Put the hook before hooks that evaluate.

    Args:
        start: first applied step whose weights are averaged, >= 1.
        update_interval: applied steps between updates, such as those of an epoch.
        bn_loader: batches for the statistics of BatchNorm; None takes the training loader.
        device: device of the average; None puts it on the model's device.
        name: key in the checkpoint.

    Raises:
        ConfigError: a value is outside its range, or a data set is given in place of a loader.

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
        """The ``AveragedModel``; ``swa_model.module`` is the averaged model.

        Raises:
            ConfigError: accessed before training has started or a state was loaded.
        """
        return cast("Swa", self._declared_average())

    def _new_average(self, model: nn.Module) -> Swa:
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
        """Compute the BatchNorm statistics after the last step, so that its checkpoint has them."""
        if trainer.is_last_step:
            self.update_statistics(trainer)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow any number of steps: only the last one matters."""
        return None

    def on_after_train(self, trainer: Engine) -> None:
        """Compute the BatchNorm statistics if training was stopped before its target."""
        if self._step_of_statistics != trainer.step:
            self.update_statistics(trainer)

    def update_statistics(self, trainer: Engine, loader: Iterable[Any] | None = None) -> None:
        """Compute exact running statistics of the average's BatchNorm layers by a pass over a loader.

        RNG, generators of the loader and the model's own statistics are restored. The next applied step resets the
        average's statistics to those of the model.

        Args:
            trainer: the engine.
            loader: batches; None takes ``bn_loader``, or the training loader.
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

        with swa.applied_to(trainer.model):
            try:
                for layer in layers:
                    layer.reset_running_stats()
                    layer.momentum = None  # the mean over all batches
                for_each_batch(trainer.model, loader, forward, precision=trainer.precision, eval_seed=trainer.eval_seed)
                swa.copy_buffers_of(trainer.model)
            finally:
                for layer, momentum in zip(layers, momenta, strict=True):
                    layer.momentum = momentum
