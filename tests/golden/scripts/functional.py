"""Trains the functional face, as a script of a user does: ``python functional.py FOLDER EPOCHS``."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle import StepLogHook, Trainer


def main(folder: str, epochs: int) -> None:
    treadle.set_seed(0)
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training = {"max_grad_norm": 1.0, "ema_decay": 0.9, "gradient_accumulation_steps": 2}
    plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    config = {"training": training}
    trainer = Trainer(model, optimizer, nn.MSELoss(), config, "cpu", plateau, hooks=[StepLogHook("steps.jsonl")])
    loader = DataLoader(data, batch_size=4, shuffle=True)
    trainer.train(loader, epochs, DataLoader(data, batch_size=10), folder, resume_from="auto")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
