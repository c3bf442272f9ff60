"""A training run that says READY at a chosen moment and waits there, so that a signal can be sent into it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import treadle
from treadle import BaseHook, CheckpointingHook, Engine, EpochTrainer, StepOutput
from treadle.checkpoint import store
from treadle.engine.signals import SignalListener

slow_at = "nowhere"


def dawdle(where: str) -> None:
    global slow_at
    if where == slow_at:
        slow_at = "nowhere"
        print("READY", flush=True)
        sys.stdin.readline()  # until the test closes it


def say_what_is_heard() -> None:
    """Signals of one number that come together are merged by the system: whoever sends several waits for each line."""
    note = SignalListener._handle

    def heard(self: SignalListener, *given: object) -> None:
        note(self, *given)
        os.write(1, b"HEARD\n")  # a print may not be interrupted by another one

    SignalListener._handle = heard


class Rows(Dataset):
    def __init__(self, where: str):
        self.x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
        self.where = where

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 7:
            dawdle(self.where)
        return self.x[index]


class Square:
    def __init__(self):
        self.steps = 0

    def step(self, model, batch, totals=None, generator=None):
        if model.training:
            self.steps += 1
            if self.steps == 7:
                dawdle("step")
        return StepOutput((model(batch) - batch.sum(1, keepdim=True)).square().mean(), weight=float(len(batch)))


class Start(BaseHook):
    def on_before_train(self, trainer):
        dawdle("start")


def slow_save(file, *given, real=store.write_tree):
    file.write(b"half")
    dawdle("save")
    file.seek(0)
    file.truncate()
    real(file, *given)


def run(workspace: Path) -> None:
    treadle.set_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    stop = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    hooks = [Start(), CheckpointingHook(3, exit_signals=stop)]
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), Square(), device="cpu", hooks=hooks)
    engine.workspace = workspace
    before = signal.getsignal(signal.SIGTERM)
    driver = EpochTrainer(engine)
    train = DataLoader(Rows("loader"), batch_size=4, shuffle=True)
    driver.fit(train, DataLoader(Rows("validation"), batch_size=4), 4)
    assert signal.getsignal(signal.SIGTERM) is before
    store.save_checkpoint(engine.state_dict(), workspace / "end.pt")


if __name__ == "__main__":
    slow_at = sys.argv[2]
    say_what_is_heard()
    if slow_at == "save":
        store.write_tree = slow_save
    run(Path(sys.argv[1]))
    print("finished")
