"""Cost of a step as a function of run length and model size.

    python benchmarks/scale.py                      # writes results/scale_length.* and results/scale_size.*
    python benchmarks/scale.py --tiny               # a trial, writes nothing

Length: one run of a small MLP with the usual hooks, 100,000 steps. For each tenth of it, the mean cost of a step, and
at its end the blocks that Python holds, the objects that the garbage collector tracks, and the memory of the process. A
history or record that grows with the steps shows in the latter three; a step that becomes slower shows in the first.

Size: MLPs of 10⁴ to 10⁸ parameters, ours against the hand-written loop of ``overhead.py``, in paired rounds.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import describe, write_result
from overhead import CLIP, Fit, Workload, measure, spread
from torch import nn

from treadle import BaseHook, CheckpointingHook, EmaHook, Engine, LoggingHook, ProgressHook, ThroughputHook
from treadle.hooks import StepLogHook

LENGTH = ("steps", "µs a step", "processor µs a step", "blocks of Python", "objects known to gc", "memory (MiB)")
SIZE = ("parameters", "hand loop, µs", "treadle Engine, µs", "more than the loop, µs", "of the loop")
SIZES = {10**4: 400, 10**5: 400, 10**6: 200, 10**7: 30, 10**8: 6}  # steps of each way in each round


class Gauge(BaseHook):
    """Hook that records time and memory every ``interval`` steps."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.rows: list[dict[str, Any]] = []

    def on_before_train(self, trainer: Engine) -> None:
        self._clocks = time.perf_counter(), time.process_time()

    def on_after_step(self, trainer: Engine) -> None:
        if trainer.step % self.interval:
            return
        wall, processor = time.perf_counter() - self._clocks[0], time.process_time() - self._clocks[1]
        gc.collect()
        self.rows.append({
            "steps": f"{trainer.step - self.interval:,} to {trainer.step:,}",
            "µs a step": f"{1e6 * wall / self.interval:,.0f}",
            "processor µs a step": f"{1e6 * processor / self.interval:,.0f}",
            "blocks of Python": f"{sys.getallocatedblocks():,}",
            "objects known to gc": f"{len(gc.get_objects()):,}",
            "memory (MiB)": f"{resident():,.1f}",
        })  # fmt: skip
        self._clocks = time.perf_counter(), time.process_time()


def resident() -> float:
    """Return the memory of this process in MiB; NaN where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return float("nan")
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def long_run(steps: int) -> list[dict[str, Any]]:
    """Train with the usual hooks, in epochs of 1,000 steps, and return a row for each tenth."""
    work = Workload(lambda: nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1)), (4, 64), torch.device("cpu"))
    model, optimizer = work.build()
    logger = logging.getLogger("benchmark.scale")
    logger.propagate = False
    gauge = Gauge(steps // 10)
    with tempfile.TemporaryDirectory() as folder:
        hooks = [
            EmaHook(0.999), ProgressHook(100), LoggingHook(100), ThroughputHook(100),
            StepLogHook(f"{folder}/steps.jsonl"), CheckpointingHook(steps // 10, path=f"{folder}/checkpoints"), gauge,
        ]  # fmt: skip
        engine = Engine(model, optimizer, Fit(), device="cpu", grad_clip=CLIP, hooks=hooks, logger=logger)
        engine.run(work.batches(1000), max_steps=steps)
    return gauge.rows


def net_of(parameters: int) -> nn.Module:
    """Return an MLP on 64 numbers with about the given number of parameters, nearly all in two square matrices."""
    width = round((parameters / 2) ** 0.5)
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 1),
    )  # fmt: skip


def size_row(parameters: int, *, steps: int, rounds: int) -> dict[str, Any]:
    work = Workload(lambda: net_of(parameters), (4, 64), torch.device("cpu"), fused=True)
    ways, loop, ours = ["hand loop", "treadle Engine"], [], []
    for number in range(rounds):  # alternating, since the second inherits the memory state of the first
        found = measure(work, ways[:: 1 if number % 2 else -1], steps=steps, rounds=1)
        loop.append(found["hand loop"][0].processor)
        ours.append(found["treadle Engine"][0].processor)
    return {
        "parameters": f"{sum(value.numel() for value in net_of(parameters).parameters()):,}",
        "hand loop, µs": spread(loop), "treadle Engine, µs": spread(ours),
        "more than the loop, µs": f"{median(b - a for a, b in zip(loop, ours, strict=True)):+,.0f}",
        "of the loop": f"{median(b / a for a, b in zip(loop, ours, strict=True)):.3f}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="of the long run")
    parser.add_argument("--rounds", type=int, default=8, help="of each size")
    parser.add_argument("--only", choices=("length", "size"))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.tiny:
        print(*long_run(1000), size_row(10**4, steps=10, rounds=1), sep="\n")
        return
    if options.only != "size":
        title = f"A run of {options.steps:,} steps with an average, two reports, a step log and checkpoints"
        write_result("scale_length", title, LENGTH, long_run(options.steps), describe())
    if options.only != "length":
        rows = [size_row(size, steps=steps, rounds=options.rounds) for size, steps in SIZES.items()]
        title = "Processor time of an optimizer step by the number of parameters, fused AdamW, gradients clipped"
        write_result("scale_size", title, SIZE, rows, describe())


if __name__ == "__main__":
    main()
