"""Train a small network to read the fat of 215 pieces of meat from their near-infrared spectra.

    python examples/functional_tecator.py --out runs/fat --epochs 100

Kill it at any moment and run the same command again: it resumes from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle.datasets import load_tecator


class FatTrainer(treadle.Trainer):
    """Trainer that also reports the explained variance of the fat content."""

    def evaluate(self, dataloader):
        fat = torch.cat([targets for _, targets in dataloader])
        errors = self.predict(dataloader) - fat
        r2 = 1 - errors.square().sum() / (fat - fat.mean()).square().sum()
        return {**super().evaluate(dataloader), "r2": r2}


def loaders() -> tuple[DataLoader, DataLoader]:
    """Return loaders of second derivatives, which do not depend on thickness, and the fat in units of 10 %."""
    meat = load_tecator()
    spectra = torch.from_numpy(meat.spectra).diff(n=2)
    spectra = (spectra - spectra[:172].mean(0)) / spectra[:172].std(0)
    fat = torch.from_numpy(meat.composition[:, [meat.composition_columns.index("fat")]]).float() / 10
    train, validation = TensorDataset(spectra[:172], fat[:172]), TensorDataset(spectra[172:], fat[172:])
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(validation, batch_size=64)


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/fat"))
    parser.add_argument("--epochs", type=int, default=100)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    treadle.set_seed(0)
    train_loader, validation_loader = loaders()
    model = nn.Sequential(nn.Linear(98, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    trainer = FatTrainer(
        model, optimizer, nn.SmoothL1Loss(), config={"training": {"ema_decay": 0.98, "max_grad_norm": 1.0}},
        scheduler=CosineAnnealingLR(optimizer, arguments.epochs),
    )  # fmt: skip
    trainer.train(
        train_loader, arguments.epochs, validation_loader, save_dir=arguments.out, save_freq=50, best_model_metric="r2",
        resume_from="auto",
    )  # fmt: skip
    print(f"R² {trainer.best_metric:.3f} at epoch {trainer.best_epoch} of {trainer.epoch}")
    return trainer.best_metric


if __name__ == "__main__":
    main()
