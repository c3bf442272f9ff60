"""Recognise handwritten digits with the step face: subclass BaseTrainer, stop it, start it again, it resumes.

    python examples/mini_digits.py --workspace runs/digits --max-steps 600

The 1,797 real 8x8 digits ship with scikit-learn. Kill it at any moment and run the same command again: it resumes
from the newest checkpoint and ends with the same weights to the bit.
"""

from __future__ import annotations

import argparse
import logging
import signal
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from treadle import BaseTrainer, CheckpointingHook, EmaHook, ProgressHook, set_seed


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 digits to train on and 360 to test on, 64 features in [0, 1]."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    data_x, data_y = torch.tensor(x, dtype=torch.float32)[order] / 16, torch.tensor(y)[order]
    return TensorDataset(data_x[:1437], data_y[:1437]), TensorDataset(data_x[1437:], data_y[1437:])


class DigitsTrainer(BaseTrainer):
    def build_data_loader(self):
        return DataLoader(digits()[0], batch_size=64, shuffle=True)

    def build_model(self):
        layers = (nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
        return nn.Sequential(*layers).to(self.device)

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)

    def forward(self, input):
        x, y = (tensor.to(self.device) for tensor in input)
        logits = self.model(x)
        loss = nn.functional.cross_entropy(logits, y)
        return loss, {"accuracy": (logits.argmax(1) == y).float().mean()}, len(y)

    def build_hooks(self):
        stop = [signal.SIGTERM, signal.SIGINT]
        return [
            ProgressHook(interval=100, with_records=True),
            EmaHook(decay=0.99),
            CheckpointingHook(interval=100, exit_signals=stop),
        ]


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workspace", type=Path, default=Path("runs/digits"))
    parser.add_argument("--max-steps", type=int, default=600)
    parser.add_argument("--device", default=None)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    set_seed(0)
    trainer = DigitsTrainer(arguments.max_steps, workspace=arguments.workspace, device=arguments.device)
    trainer.train()
    accuracy = trainer.evaluate(DataLoader(digits()[1], batch_size=360))["accuracy"]
    print(f"test accuracy after {trainer.step} steps: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
