"""Trainer settings and batches of chemomae 0.2."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from treadle.device import moved
from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.spectra import config as own_config

FILES = ("history_file", "checkpoint_dir", "raw_weights_file", "ema_weights_file")


@dataclass(frozen=True)
class PreparedBatch:
    """Batch of model input, clean target and an optional mask.

    Attributes:
        model_input: (B, L) floating.
        target: (B, L) floating.
        visible_mask: (B, L) bool, True = visible; None lets the model draw one.

    Raises:
        TypeError: a tensor has the wrong type.
        ConfigError: the shapes differ.

    Example:
        >>> PreparedBatch(torch.zeros(2, 4), torch.zeros(2, 4)).to("cpu").target.shape
        torch.Size([2, 4])
    """

    model_input: Tensor
    target: Tensor
    visible_mask: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("model_input", "target"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) or not value.is_floating_point():
                raise TypeError(f"{name} must be a floating tensor (B, L)")
            if value.dim() != 2 or value.numel() == 0:
                raise ConfigError(f"{name} of shape {tuple(value.shape)}: must be (B, L) and not empty")
        if self.target.shape != self.model_input.shape:
            raise ConfigError(
                f"of shape {tuple(self.target.shape)}: must be that of model_input, {tuple(self.model_input.shape)}",
                argument="target",
            )
        if self.visible_mask is None:
            return
        if not isinstance(self.visible_mask, Tensor) or self.visible_mask.dtype != torch.bool:
            raise TypeError("visible_mask must be a bool tensor, True where a channel is seen")
        if self.visible_mask.shape != self.target.shape:
            raise ConfigError(
                f"of shape {tuple(self.visible_mask.shape)}: must be that of target", argument="visible_mask"
            )

    def to(self, device: torch.device | str) -> PreparedBatch:
        """Return the batch on a device."""
        where = torch.device(device)
        mask = None if self.visible_mask is None else moved(self.visible_mask, where)
        return PreparedBatch(moved(self.model_input, where), moved(self.target, where), mask)


@checked
@dataclass
class TrainerConfig:
    """Settings of :class:`Trainer`, those of chemomae 0.2 with its defaults.

    ``*_file`` and ``checkpoint_dir`` are relative to ``out_dir``; None writes nothing.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> TrainerConfig(loss_region="all").checkpoint_dir
        'checkpoints'
    """

    out_dir: str | Path = "runs"
    device: str | torch.device | None = None
    """None uses the device of the model."""
    amp: bool = False
    amp_dtype: str = "bf16"
    enable_tf32: bool = False
    grad_clip: float | None = 1.0
    use_ema: bool = True
    ema_decay: float = 0.999
    loss_type: str = "mse"
    loss_region: Literal["masked", "all"] = "masked"
    reduction: str = "mean"
    resume_from: str | Path | None = "auto"
    history_file: str | Path | None = "training_history.json"
    checkpoint_dir: str | Path | None = "checkpoints"
    raw_weights_file: str | Path | None = "last_model.pt"
    ema_weights_file: str | Path | None = "ema_last_model.pt"
    model_artifacts: bool = True
    """Also write each weights file as ``.artifact.pt`` with the configuration; for a :class:`PatchMAE`."""
    progress: bool = True
    verbose: bool = True
    restore_rng: bool = True
    """Restore the random state of a checkpoint when resuming."""

    def __post_init__(self) -> None:
        if empty := [name for name in FILES if str(getattr(self, name)).strip() in ("", ".")]:
            raise ConfigError("must be a name or None", argument=empty[0], value="")
        if self.checkpoint_dir is None and self.resume_from is not None:
            raise ConfigError(
                "=None leaves nothing to resume from; pass resume_from=None too", argument="checkpoint_dir"
            )
        self.settings(torch.device("cpu"))

    def settings(self, device: torch.device) -> own_config.TrainerConfig:
        """Return the settings of :class:`treadle.spectra.SpectraTrainer`: a fixed budget without early stopping."""
        same = [field.name for field in dataclasses.fields(own_config.TrainerConfig)]
        shared = {name: value for name, value in vars(self).items() if name in same}
        return own_config.TrainerConfig(**{**shared, "device": str(device), "selection": "last"})

    def file(self, name: str) -> Path | None:
        """Return the path of an output, inside ``out_dir`` unless it is absolute."""
        value = getattr(self, name)
        return None if value is None else Path(self.out_dir).absolute() / value
