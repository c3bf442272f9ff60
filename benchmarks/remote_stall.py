"""How long training pauses for a save into an object store, in the foreground and in the background.

    python benchmarks/remote_stall.py --megabytes 120

Runs moto's S3 server on this machine. Foreground: the file is written and uploaded before the next step. In the
background the state is copied, written and uploaded while training continues. It counts the time without a step, and
what the steps until the next save took longer, which on a machine of few cores is what the upload itself needs.
Needs ``moto[server]`` and ``s3fs``.
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
from treadle.hooks import BaseHook


class Times(BaseHook):
    """Notes when each step begins and ends."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []

    def on_before_step(self, trainer: Any) -> None:
        """Notes the time."""
        self.begins.append(time.perf_counter())

    def on_after_step(self, trainer: Any) -> None:
        """Notes the time."""
        self.ends.append(time.perf_counter())


class Fit(BaseTrainer):
    """A wide layer that takes a tenth of a second a step, most of it asleep as on a GPU."""

    def __init__(self, width: int, interval: int, **settings: Any):
        super().__init__(**settings)
        self.width, self.interval, self.times = width, interval, Times()

    def build_data_loader(self) -> Any:
        return [torch.ones(1, 8)] * 1000

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, self.width), nn.Linear(self.width, 1))

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def build_hooks(self) -> list[Any]:
        return [CheckpointingHook(self.interval, background=True), self.times]

    def forward(self, input: Any) -> Any:
        time.sleep(0.1)
        return self.model(input).square().mean(), {}


def foreground(folder: Path, width: int) -> float:
    """Returns the seconds of a save that is written and uploaded before it returns."""
    trainer = Fit(width, 10_000, max_steps=1, workspace=folder / "foreground", device="cpu", progress=False)
    trainer.train()
    hook = next(hook for hook in trainer.hooks if isinstance(hook, CheckpointingHook))
    remote = RemoteWorkspace(ObjectStore("s3://runs/foreground"), folder / "foreground")
    remote.restore()
    remote.begin()
    hook._background, hook._saved = False, None
    start = time.perf_counter()
    hook.save(trainer)
    remote.publish()
    seconds = time.perf_counter() - start
    remote.claim.release()
    return seconds


def background(folder: Path, width: int, steps: int = 160, interval: int = 40) -> dict[str, list[float]]:
    """Returns for each save but the first how long no step ran, and how much longer the steps after it took."""
    os.environ["TREADLE_STAGING"] = str(folder / "staging")
    trainer = Fit(width, interval, max_steps=steps, workspace="s3://runs/background", device="cpu", progress=False)
    trainer.train()
    times = trainer.times
    stalls = [times.begins[step] - times.ends[step - 1] for step in range(interval, steps, interval)]
    took = [late - early for early, late in zip(trainer.times.ends, trainer.times.ends[1:], strict=False)]
    usual = statistics.median(took)
    spans = [took[start - 1 : start + interval - 1] for start in range(interval, steps, interval)]
    longer = [sum(seconds - usual for seconds in span) for span in spans]
    return {"stall": stalls[1:], "longer in all": longer[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=120.0, help="of the state: weights and two moments")
    megabytes = parser.parse_args().megabytes
    width = int(megabytes * 1e6 / 4 / 3 / 10)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary, s3_server(Path(temporary)) as server:
        point_s3fs_to(server)
        result = {"foreground": foreground(Path(temporary), width), "background": background(Path(temporary), width)}
    print(json.dumps({"megabytes": megabytes, **result}))


if __name__ == "__main__":
    main()
