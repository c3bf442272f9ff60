"""EmaHook: keeps an exponential moving average of the weights."""

from __future__ import annotations

import torch
from torch import nn

from treadle.errors.arguments import checked
from treadle.hooks.averaging import AveragingHook
from treadle.optim.ema import Ema, check_average


class EmaHook(AveragingHook):
    """Averaged copy of the model, updated inside the step after every ``update_interval`` applied steps.

    Args:
        decay: d of s = d·s + (1 - d)·w, in [0, 1].
        update_interval: applied steps between updates.
        device: device of the average; None puts it on the model's device.
        use_buffers: average floating buffers; False copies them.
        name: key in the checkpoint; two averages need different names.

    Attributes:
        ema_model: the ``AveragedModel``; ``ema_model.module`` is the averaged model.

    Example:
        >>> hook = EmaHook(decay=0.999)
    """

    _kind = "ema"

    @checked
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
        """Averaged model.

        Raises:
            ConfigError: accessed before training has started or a state was loaded.
        """
        return self._declared_average()

    def _new_average(self, model: nn.Module) -> Ema:
        return Ema(
            model,
            self.decay,
            update_interval=self.update_interval,
            use_buffers=self.use_buffers,
            device=self.device,
        )
