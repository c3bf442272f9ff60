"""AveragingHook: base class of hooks that keep an average of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.optim.ema import Ema

if TYPE_CHECKING:
    from treadle.engine import Engine


class AveragingHook(BaseHook):
    """Base class of hooks that keep a named average of the model."""

    _kind: ClassVar[str]  # default name; the averaged model is the attribute ``<kind>_model``

    def __init__(self, update_interval: int, device: torch.device | str | int | None, name: str):
        self.update_interval = update_interval
        self.device = device
        self.name = name
        self._average: Ema | None = None

    @property
    def state_key(self) -> str:
        """Class and name, so that two averages with different names can be kept."""
        return type(self).__name__ if self.name == self._kind else f"{type(self).__name__}.{self.name}"

    def averages(self, trainer: Engine) -> Mapping[str, Ema]:
        """Create the average from the model's current weights."""
        self._average = self._new_average(trainer.model)
        return {self.name: self._average}

    def _new_average(self, model: nn.Module) -> Ema:
        raise NotImplementedError

    def _declared_average(self) -> Ema:
        if self._average is None:
            raise ConfigError(
                "not available before training starts or a state is loaded", argument=f"{self._kind}_model"
            )
        return self._average
