"""EmaHook: keeps an exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.optim.ema import Ema, check_average

if TYPE_CHECKING:
    from treadle.engine import Engine


class AveragingHook(BaseHook):
    """Base of hooks that keep an average of the model under a name."""

    _kind: ClassVar[str]  # its default name; the averaged model is the attribute ``<kind>_model``

    def __init__(self, update_interval: int, device: torch.device | str | int | None, name: str):
        self.update_interval = update_interval
        self.device = device
        self.name = name
        self._average: Ema | None = None

    @property
    def state_key(self) -> str:
        """Its class and name, so that two averages with two names can be kept."""
        return type(self).__name__ if self.name == self._kind else f"{type(self).__name__}.{self.name}"

    def averages(self, trainer: Engine) -> Mapping[str, Ema]:
        """Creates the average from the model's present weights."""
        self._average = self._made(trainer.model)
        return {self.name: self._average}

    def _made(self, model: nn.Module) -> Ema:
        raise NotImplementedError

    def _made_average(self) -> Ema:
        if self._average is None:
            raise ConfigError(
                "there is none before training starts or a state is loaded", argument=f"{self._kind}_model"
            )
        return self._average


class EmaHook(AveragingHook):
    """Keeps an averaged copy of the model, updated inside the step after every ``update_interval`` applied steps.

    Args:
        decay: d of s = d·s + (1 - d)·w, in [0, 1].
        update_interval: applied steps between updates.
        device: where the average lives; None puts it beside the model.
        use_buffers: average floating buffers; False copies them.
        name: its key in the checkpoint; two averages need two names.

    Attributes:
        ema_model: the ``AveragedModel``; ``ema_model.module`` is the averaged net.

    Example:
        >>> hook = EmaHook(decay=0.999)
    """

    _kind = "ema"

    def __init__(
        self,
        decay: float = 0.9999,
        update_interval: int = 1,
        device: torch.device | str | int | None = None,
        *,
        use_buffers: bool = False,
        name: str = "ema",
    ):
        check_average(decay, update_interval)
        super().__init__(update_interval, device, name)
        self.decay = decay
        self.use_buffers = use_buffers

    @property
    def ema_model(self) -> Ema:
        """The averaged model.

        Raises:
            ConfigError: it is asked for before training started or a state was loaded.
        """
        return self._made_average()

    def _made(self, model: nn.Module) -> Ema:
        return Ema(
            model,
            self.decay,
            update_interval=self.update_interval,
            use_buffers=self.use_buffers,
            device=self.device,
        )
