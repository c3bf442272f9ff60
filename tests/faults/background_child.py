"""The run of ``signal_child`` with background saves, and one whose data workers are forked while a save is written."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from pathlib import Path

import signal_child
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from helpers import MeanSquare
from treadle import CheckpointingHook, Engine
from treadle.checkpoint import store
from treadle.hooks import checkpointing


def talkative_save(tree, path, real=checkpointing.save_checkpoint):
    """Logs and takes its time, so that a fork meets a busy thread."""
    assert threading.current_thread() is not threading.main_thread()
    for number in range(40):
        logging.getLogger("treadle.checkpoint").warning("still writing %s: %d", path.name, number)
        threading.Event().wait(0.001)
    return real(tree, path)


def train_with_workers(workspace: Path) -> None:
    logging.basicConfig(level=logging.WARNING)
    checkpointing.save_checkpoint = talkative_save
    treadle.set_seed(0)
    model = nn.Linear(4, 1)
    x = torch.randn(12, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6, shuffle=True, num_workers=2)
    hook = CheckpointingHook(1, path=workspace, background=True)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.01), MeanSquare(), device="cpu", hooks=[hook])
    engine.run(loader, epochs=12)


if __name__ == "__main__":
    workspace, signal_child.slow_at = Path(sys.argv[1]), sys.argv[2]
    if sys.argv[2] == "workers":
        train_with_workers(workspace)
    else:
        signal_child.say_what_is_heard()
        signal_child.CheckpointingHook = functools.partial(CheckpointingHook, background=True)
        if sys.argv[2] == "save":
            store.write_tree = signal_child.slow_save
        signal_child.run(workspace)
    print("finished")
