"""Train a masked autoencoder on 215 near-infrared spectra of meat, then read the fat from its latent.

    python examples/spectra_tecator.py --out runs/tecator --epochs 60

Kill it at any moment and run the same command again: it resumes from checkpoints/last.pt.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from sklearn.linear_model import RidgeCV
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle.datasets import load_tecator
from treadle.spectra import (
    ChemoMAE,
    Extractor,
    ExtractorConfig,
    SNVScaler,
    SpectraTrainer,
    TrainerConfig,
    build_optimizer,
    build_scheduler,
)


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/tecator"))
    parser.add_argument("--epochs", type=int, default=60)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    treadle.set_seed(0)
    meat = load_tecator()
    spectra = SNVScaler().transform(torch.from_numpy(meat.spectra))
    train, validation = TensorDataset(spectra[:172]), TensorDataset(spectra[172:])
    train_loader = DataLoader(train, batch_size=32, shuffle=True)
    model = ChemoMAE(
        seq_len=100, d_model=32, num_layers=2, dim_feedforward=64, dropout=0.0, latent_dim=16, n_blocks=20, n_mask=12,
        use_learnable_pos=False,
    )  # fmt: skip
    optimizer = build_optimizer(model, lr=3e-3)
    steps = treadle.steps_per_epoch(train_loader)
    scheduler = build_scheduler(optimizer, steps_per_epoch=steps, epochs=arguments.epochs, warmup_epochs=5)
    cfg = TrainerConfig(out_dir=arguments.out, amp=False, ema_decay=0.98)
    val_loader = DataLoader(validation, batch_size=64)
    trainer = SpectraTrainer(model, optimizer, train_loader, val_loader, scheduler=scheduler, cfg=cfg)
    best = trainer.fit(arguments.epochs)["best"]

    model.load_state_dict(treadle.load_weights(arguments.out / "best_model.pt"))
    latent = Extractor(model, ExtractorConfig(amp=False, return_numpy=True))(DataLoader(spectra, batch_size=64))
    fat = meat.composition[:, meat.composition_columns.index("fat")]
    score = RidgeCV(alphas=[10.0**k for k in range(-6, 3)]).fit(latent[:172], fat[:172]).score(latent[172:], fat[172:])
    print(f"masked MSE {best['val_loss']:.4f} at epoch {best['epoch']}; fat from the latent: R² {score:.3f}")
    return score


if __name__ == "__main__":
    main()
