"""The trainer: parts chosen by the configuration, and how a batch becomes a loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from own_project.task import Batch, QuantileTask
from treadle import BaseHook, BaseTrainer, StepOutput
from treadle.builder import REGISTRY, build_from_cfg
from treadle.datasets import load_tecator

Config = dict[str, Any]
_TRAIN = 172  # of 215 pieces


def network(width: int, dropout: float, quantiles: int = 3) -> nn.Module:
    """Return a network from 98 channels to one output per quantile."""
    return nn.Sequential(nn.Linear(98, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, quantiles))


def pieces() -> tuple[Tensor, Tensor]:
    """Return second derivatives of the spectra (215, 98), and the fat (215,) in units of 10 %."""
    meat = load_tecator()
    spectra = torch.from_numpy(meat.spectra).diff(n=2)
    fat = torch.from_numpy(meat.composition[:, meat.composition_columns.index("fat")]).float() / 10
    return (spectra - spectra[:_TRAIN].mean(0)) / spectra[:_TRAIN].std(0), fat


@REGISTRY.register()
class FatTrainer(BaseTrainer):
    """Trainer of a network for quantiles of the fat content."""

    def __init__(
        self, data_cfg: Config, model_cfg: Config, task_cfg: Config, optimizer_cfg: Config, hooks_cfg: list[Config],
        **settings: Any,
    ):  # fmt: skip
        super().__init__(**settings)
        self.data_cfg, self.model_cfg = data_cfg, model_cfg
        self.optimizer_cfg, self.hooks_cfg = optimizer_cfg, hooks_cfg
        self.quantiles: QuantileTask = build_from_cfg(task_cfg)

    def build_data_loader(self) -> Iterable[Batch]:
        spectra, fat = pieces()
        return DataLoader(TensorDataset(spectra[:_TRAIN], fat[:_TRAIN]), shuffle=True, **self.data_cfg)

    def build_model(self) -> nn.Module:
        model: nn.Module = build_from_cfg(self.model_cfg, quantiles=len(self.quantiles.quantiles))
        return model.to(self.device)

    def build_optimizer(self) -> Optimizer:
        optimizer: Optimizer = build_from_cfg(self.optimizer_cfg, params=self.model.parameters())
        return optimizer

    def build_hooks(self) -> list[BaseHook]:
        hooks: list[BaseHook] = build_from_cfg(self.hooks_cfg, recursive=True)
        return hooks

    def forward(self, input: Batch) -> StepOutput:
        inputs, targets = (tensor.to(self.device) for tensor in input)
        return self.quantiles.step(self.model, (inputs, targets))

    def build_eval_data_loader(self) -> Iterable[Batch]:
        """Return the loader of `treadle evaluate`."""
        spectra, fat = pieces()
        return DataLoader(TensorDataset(spectra[_TRAIN:], fat[_TRAIN:]), batch_size=64)

    def build_predict_data_loader(self) -> Iterable[Batch]:
        """Return the loader of `treadle predict`."""
        return self.build_eval_data_loader()

    def predict_step(self, input: Batch) -> dict[str, Tensor]:
        """Return the arrays that `treadle predict` writes."""
        bounds: Tensor = self.model(input[0].to(self.device)) * 10
        return {"low": bounds[:, 0], "median": bounds[:, bounds.shape[1] // 2], "high": bounds[:, -1]}
