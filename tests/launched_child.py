"""A run that torchrun starts, for tests that kill its ranks or send them signals; every rank says where it is.

torchrun --nproc-per-node N launched_child.py KIND FOLDER STEPS
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from sharded_kit import engine, loader
from treadle.checkpoint import sharded
from treadle.cli.launch import process_group
from treadle.hooks import BaseHook

STEP_TIME = 0.02  # seconds, so that there are moments to meet
WRITE_TIME = 0.1  # of a rank's part of a sharded save, so that a save is met by whoever waits for one


class Says(BaseHook):
    """Writes the process number and the step of this rank into a file, whole at any moment."""

    def __init__(self, folder):
        self.folder = folder

    def on_after_step(self, trainer):
        self.write(f"{os.getpid()} {trainer.step}")
        time.sleep(STEP_TIME)

    def write(self, text):
        path = self.folder / f"rank_{dist.get_rank()}"
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)


def on_a_slow_disk():
    """Lets every rank take its time over its part of a sharded save, when the folder is there and not finished."""
    write = sharded.write_shard

    def slowly(*args, **kwargs):
        time.sleep(WRITE_TIME)
        return write(*args, **kwargs)

    sharded.write_shard = slowly


def train(kind, folder, steps):
    """Trains to a step from the newest whole checkpoint; returns the final state, on all ranks."""
    saving = {"interval": 3, "keep_previous": 2, "exit_signals": signal.SIGTERM, "background": kind == "fsdp"}
    made = engine(kind, folder / "checkpoints", hooks=[Says(folder)], **saving)
    try:
        made.run(loader(12 * dist.get_world_size()), max_steps=steps)
    except SystemExit as leaving:
        (folder / f"left_{dist.get_rank()}").write_text(f"{leaving.code} {made.step}")
        raise
    return made.state_dict()


if __name__ == "__main__":
    kind, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    on_a_slow_disk()
    with process_group():
        state = train(kind, folder, steps)
        if dist.get_rank() == 0:
            torch.save(state, folder / "final.pt")
            (folder / "restarts").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
        dist.barrier()
