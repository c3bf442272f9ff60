"""Optimizers of packages that few installations have, skipped where one is missing, and targets that do not count."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import data as torch_data

from strangers.bench import ROWS, WIDTH, Case, Points, Row
from treadle import Trainer

OPTIMIZERS, TARGETS = "Optimizers", "Ignored targets"
STOPS = (2, 5, 7)


def of_bitsandbytes(name: str) -> Any:
    def case() -> Case:
        import bitsandbytes

        return Case(optimizer=lambda model: getattr(bitsandbytes.optim, name)(model.parameters(), lr=0.02))

    return case


def of_torchao(name: str) -> Any:
    def case() -> Case:
        from torchao import optim

        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
        return Case(model=model, optimizer=lambda of: getattr(optim, name)(of.parameters(), lr=0.02))

    return case


def with_missing(targets: Any, loss: Any) -> Any:
    def case() -> Case:
        x = Points().x / 10
        model = torch.nn.Linear(WIDTH, 3 if targets.dtype == torch.long else 1)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), loss, device="cpu", progress=False)
        return Case(engine=trainer._engine, loader=torch_data.DataLoader(torch_data.TensorDataset(x, targets), 3))

    return case


CLASSES = torch.tensor([0, -100, 1, 2, -100, -100, -100, 0, 1, 2, 0, -100])
MISSING = torch.where(torch.arange(ROWS) % 5 == 1, torch.nan, torch.arange(1.0, ROWS + 1)).reshape(-1, 1)

PEERS = [
    *(Row(f"bitsandbytes.{name}", OPTIMIZERS, of_bitsandbytes(name), needs=("bitsandbytes",), stops=STOPS)
      for name in ("AdamW8bit", "Lion8bit")),
    *(Row(f"torchao.{name}", OPTIMIZERS, of_torchao(name), needs=("torchao",), stops=STOPS)
      for name in ("AdamW8bit", "AdamW4bit")),
    Row("classes of -100 with CrossEntropyLoss", TARGETS, with_missing(CLASSES, torch.nn.CrossEntropyLoss()),
        stops=STOPS),
    Row("targets of NaN with MSELoss", TARGETS, with_missing(MISSING, torch.nn.MSELoss()), ("not finite",)),
]  # fmt: skip
