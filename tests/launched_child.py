"""Run launched by torchrun, for tests that kill its ranks or send them signals; every rank reports its position.

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
from treadle.hooks import BaseHook
from treadle.runs.launch import process_group

STEP_TIME = 0.02  # seconds, so that there is time to hit a step
STARTS, MOST_STARTS = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))


class Says(BaseHook):
    """Hook that atomically writes process id, step and restarts of this rank into a file.

    It keeps a run that is to be killed from ending earlier, since the kill may be late.
    """

    def __init__(self, folder, steps):
        self.folder, self.last = folder, steps - 1

    def on_after_step(self, trainer):
        self.write(f"{os.getpid()} {trainer.step} {STARTS}")
        time.sleep(STEP_TIME)
        while trainer.step >= self.last and STARTS < MOST_STARTS and not is_held(self.folder):
            time.sleep(STEP_TIME)

    def write(self, text):
        path = self.folder / f"rank_{dist.get_rank()}"
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)


def is_held(folder):
    """Return whether a sharded save has created its folder but not finished it."""
    return (folder / "hold").exists()


def with_saves_that_can_be_held(folder):
    write = sharded.write_shard

    def when_let_go(*args, **kwargs):
        while is_held(folder):
            (folder / f"held_{dist.get_rank()}_{STARTS}").touch()
            time.sleep(0.01)
        return write(*args, **kwargs)

    sharded.write_shard = when_let_go


def train(kind, folder, steps):
    """Train to a step from the newest complete checkpoint; return the final state, on all ranks."""
    saving = {"interval": 3, "keep_previous": 2, "exit_signals": signal.SIGTERM, "background": kind == "fsdp"}
    made = engine(kind, folder / "checkpoints", hooks=[Says(folder, steps)], **saving)
    try:
        made.run(loader(12 * dist.get_world_size()), max_steps=steps)
    except SystemExit as leaving:
        (folder / f"left_{dist.get_rank()}").write_text(f"{leaving.code} {made.step}")
        raise
    return made.state_dict()


if __name__ == "__main__":
    kind, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    with_saves_that_can_be_held(folder)
    # Outside the run it may not end a rank: the first one to leave makes torchrun send it, and others have still to say
    # how they left.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with process_group():
        state = train(kind, folder, steps)
        if dist.get_rank() == 0:
            torch.save(state, folder / "final.pt")
            (folder / "restarts").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
        dist.barrier()
