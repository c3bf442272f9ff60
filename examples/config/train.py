"""The trainer of digits.yaml: how a batch becomes a loss; everything configurable is in the configuration.

    treadle train examples/config/digits.yaml
    treadle train examples/config/digits.yaml optimizer.lr=1e-3 trainer.workspace=runs/digits-slow
    treadle verify examples/config/digits.yaml

The 1,797 real 8x8 digits ship with scikit-learn.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from treadle import BaseTrainer
from treadle.builder import REGISTRY, build_from_cfg


@REGISTRY.register()
class DigitsTrainer(BaseTrainer):
    def __init__(self, data_cfg, model_cfg, optimizer_cfg, hooks_cfg, **kwargs):
        super().__init__(**kwargs)
        self.data_cfg, self.model_cfg = data_cfg, model_cfg
        self.optimizer_cfg, self.hooks_cfg = optimizer_cfg, hooks_cfg

    def build_data_loader(self):
        x, y = load_digits(return_X_y=True)
        digits = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
        return DataLoader(digits, shuffle=True, **self.data_cfg)

    def build_model(self):
        return build_from_cfg(self.model_cfg, recursive=True).to(self.device)

    def build_optimizer(self):
        return build_from_cfg(self.optimizer_cfg, params=self.model.parameters())

    def build_hooks(self):
        return build_from_cfg(self.hooks_cfg, recursive=True)

    def forward(self, input):
        x, y = (tensor.to(self.device) for tensor in input)
        logits = self.model(x)
        loss = nn.functional.cross_entropy(logits, y)
        return loss, {"accuracy": (logits.argmax(1) == y).float().mean()}, len(y)


@REGISTRY.register()
def mlp(width, dropout):
    """Return a network from 64 pixels in [0, 1] to ten classes."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10))
