"""Pause of training for a save into an object store, in the foreground and in the background.

    python benchmarks/remote_stall.py --megabytes 120
    python benchmarks/remote_stall.py --megabytes 120 --shards    # RemoteShardsHook instead of a mirrored workspace

Runs moto's S3 server on this machine. Foreground: the file is written and uploaded before the next step. In the
background the state is copied, written and uploaded while training continues. It measures the time without a step, and
the slowdown of the steps until the next save, which on a machine with few cores is the cost of the upload itself. Needs
``moto[server]`` and ``s3fs``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from remote_kills import point_s3fs_to, s3_server
from torch import nn

from treadle import BaseTrainer, CheckpointingHook
from treadle.checkpoint.objects import ObjectStore
from treadle.checkpoint.remote import RemoteWorkspace
from treadle.hooks import BaseHook, RemoteShardsHook

STEPS, INTERVAL = 160, 40


class Times(BaseHook):
    """Hook that records when each step begins and ends."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []

    def on_before_step(self, trainer: Any) -> None:
        """Note the time."""
        self.begins.append(time.perf_counter())

    def on_after_step(self, trainer: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


class Fit(BaseTrainer):
    """Trainer of a wide layer with steps of a tenth of a second, mostly asleep, as on a GPU."""

    def __init__(self, width: int, saves: BaseHook, **settings: Any):
        super().__init__(**settings)
        self.width, self.saves, self.times = width, saves, Times()

    def build_data_loader(self) -> Any:
        return [torch.ones(1, 8)] * 1000

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, self.width), nn.Linear(self.width, 1))

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def build_hooks(self) -> list[Any]:
        return [self.saves, self.times]

    def forward(self, input: Any) -> Any:
        time.sleep(0.1)
        return self.model(input).square().mean(), {}


def foreground(folder: Path, width: int) -> float:
    """Return the seconds of a save that is written and uploaded before it returns."""
    hook = CheckpointingHook(10_000)
    trainer = Fit(width, hook, max_steps=1, workspace=folder / "foreground", device="cpu", progress=False)
    trainer.train()
    remote = RemoteWorkspace(ObjectStore("s3://runs/foreground"), folder / "foreground")
    remote.restore()
    remote.begin()
    hook._saved = None
    start = time.perf_counter()
    hook.save(trainer)
    remote.publish()
    seconds = time.perf_counter() - start
    remote.claim.release()
    return seconds


def foreground_of_shards(width: int) -> float:
    """Return the seconds of a save that every rank, here one, writes to the store before it returns."""
    hook = RemoteShardsHook("s3://runs/foreground-shards", 10_000, background=False)
    trainer = Fit(width, hook, max_steps=1, device="cpu", progress=False)
    trainer.train()
    hook._saved = None
    start = time.perf_counter()
    hook.save(trainer)
    return time.perf_counter() - start


def background(folder: Path, width: int, shards: bool) -> dict[str, list[float]]:
    """Return, for each save but the first, how long no step ran and how much longer the steps after it took."""
    os.environ["TREADLE_STAGING"] = str(folder / "staging")
    hook = RemoteShardsHook("s3://runs/shards", INTERVAL) if shards else CheckpointingHook(INTERVAL, background=True)
    workspace = None if shards else "s3://runs/background"
    trainer = Fit(width, hook, max_steps=STEPS, workspace=workspace, device="cpu", progress=False)
    trainer.train()
    times = trainer.times
    stalls = [times.begins[step] - times.ends[step - 1] for step in range(INTERVAL, STEPS, INTERVAL)]
    took = [late - early for early, late in zip(trainer.times.ends, trainer.times.ends[1:], strict=False)]
    usual = statistics.median(took)
    spans = [took[start - 1 : start + INTERVAL - 1] for start in range(INTERVAL, STEPS, INTERVAL)]
    longer = [sum(seconds - usual for seconds in span) for span in spans]
    return {"stall": stalls[1:], "longer in all": longer[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=120.0, help="of the state: weights and two moments")
    parser.add_argument("--shards", action="store_true", help="RemoteShardsHook on one rank")
    arguments = parser.parse_args()
    megabytes, shards = arguments.megabytes, arguments.shards
    width = int(megabytes * 1e6 / 4 / 3 / 10)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary, s3_server(Path(temporary)) as server:
        point_s3fs_to(server)
        before = foreground_of_shards(width) if shards else foreground(Path(temporary), width)
        result = {"foreground": before, "background": background(Path(temporary), width, shards)}
    print(json.dumps({"megabytes": megabytes, "shards": shards, **result}))


if __name__ == "__main__":
    main()
