"""Writes the frozen checkpoints beside this script: one of the step face, one of the spectra face, and their values.

They are written once per format number and then never again: a later version must read them. Run it with
``PYTHONPATH=tests python tests/data/frozen/make.py NAME`` to add files for a new format; it refuses to replace one.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle import BaseTrainer, CheckpointingHook, EmaHook, LoggingHook
from treadle.spectra import SpectraTrainer, TrainerConfig

HERE = Path(__file__).parent
STEPS, EPOCHS = 4, 2  # where the files were written
MORE = 3  # further steps or epochs of the recorded end


class Mini(BaseTrainer):
    """The step face with everything that has a state: dropout, schedule, average, logging hook."""

    def build_data_loader(self):
        x = torch.linspace(-1, 1, 40).reshape(10, 4)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=True)

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def build_lr_scheduler(self):
        return torch.optim.lr_scheduler.StepLR(self.optimizer, 3)

    def build_hooks(self):
        return [EmaHook(0.9), LoggingHook(2), CheckpointingHook(100, path=self.folder)]

    def forward(self, input):
        x, y = input
        return nn.functional.mse_loss(self.model(x), y), {"size": len(x)}


def mini(folder, steps):
    treadle.set_seed(0)
    trainer = Mini(steps, device="cpu")
    trainer.folder = Path(folder).absolute()
    return trainer


class Scale(nn.Module):
    """A spectra model of four numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x, *args, **kwargs):
        return x * self.weight, x[:, :1], torch.zeros_like(x, dtype=torch.bool)


def spectra(folder):
    treadle.set_seed(0)
    x = torch.linspace(0.1, 2, 32).reshape(8, 4)
    model = Scale()
    train = DataLoader(TensorDataset(x[:6]), batch_size=2, shuffle=True)
    val = DataLoader(TensorDataset(x[6:]), batch_size=2)
    cfg = TrainerConfig(out_dir=folder, amp=False, device="cpu", ema_decay=0.8)
    return SpectraTrainer(model, torch.optim.AdamW(model.parameters(), lr=0.01), train, val, cfg=cfg)


def values(weights, **more):
    return {**more, "weights": {name: value.flatten().tolist() for name, value in weights.items()}}


def main(name):
    recorded = {}
    with tempfile.TemporaryDirectory() as folder:
        mini(f"{folder}/m", STEPS).train()
        keep(f"{folder}/m/checkpoint_step_{STEPS}.pt", f"{name}-mini.pt")
        recorded["mini"] = values(treadle.load_weights(f"{folder}/m/checkpoint_step_{STEPS}.pt"), step=STEPS)
        later = mini(f"{folder}/m", STEPS + MORE)
        later.train()
        recorded["mini_end"] = values(later.state_dict()["model"], step=later.step)

        spectra(f"{folder}/s").fit(EPOCHS)
        keep(f"{folder}/s/checkpoints/last.pt", f"{name}-spectra.pt")
        recorded["spectra"] = values(treadle.load_weights(f"{folder}/s/checkpoints/last.pt"), epoch=EPOCHS)
        later = spectra(f"{folder}/s")
        later.fit(EPOCHS + MORE)
        recorded["spectra_end"] = values(later.model.state_dict(), epoch=later.epoch, history=later.history)
    (HERE / f"{name}.json").write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


def keep(source, name):
    if (HERE / name).exists():
        raise SystemExit(f"{name} is frozen; choose another name")
    shutil.copyfile(source, HERE / name)


if __name__ == "__main__":
    main(sys.argv[1])
