"""EmaHook: keeps an exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.optim.ema import Ema, check_average

if TYPE_CHECKING:
    from treadle.engine import Engine


class EmaHook(BaseHook):
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
        self.decay = decay
        self.update_interval = update_interval
        self.device = device
        self.use_buffers = use_buffers
        self.name = name
        self._ema: Ema | None = None

    @property
    def state_key(self) -> str:
        """Its class and name, so that two averages with two names can be kept."""
        return type(self).__name__ if self.name == "ema" else f"{type(self).__name__}.{self.name}"

    @property
    def ema_model(self) -> Ema:
        """The averaged model.

        Raises:
            ConfigError: it is asked for before training started or a state was loaded.
        """
        if self._ema is None:
            raise ConfigError("there is none before training starts or a state is loaded", argument="ema_model")
        return self._ema

    def averages(self, trainer: Engine) -> Mapping[str, Ema]:
        """Creates the average from the model's present weights."""
        self._ema = Ema(
            trainer.model,
            self.decay,
            update_interval=self.update_interval,
            use_buffers=self.use_buffers,
            device=self.device,
        )
        return {self.name: self._ema}
