"""Cost of an eager step on a GPU against a hand-written loop, on a machine whose speed varies by a tenth per second.

    python benchmarks/eager_gpu.py               # writes results/eager_gpu.md and .json
    python benchmarks/eager_gpu.py --tiny        # a trial on the CPU, writes nothing

Both have their model and optimizer in one process. After every block of the engine's steps, a hook runs as many steps
of the hand-written loop; a block ends when the GPU is idle. A ratio compares two adjacent blocks, and the table has the
median and quartiles of the ratios. Model, batches, fused AdamW and clipping are the same, as in ``overhead_gpu.py``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
from machine import describe, write_result
from overhead import CLIP, Encoder, Fit, Net, Workload, silent, step_by_hand

from treadle import BaseHook, Engine

COLUMNS = ("workload", "steps of a block", "pairs", "µs a step by hand", "µs a step of the Engine", "ratio")


class Pairs(BaseHook):
    """Timer of blocks of the engine's steps, each followed by a block of another loop.

    Args:
        other: runs one step of the other loop.
        block: steps.
        device: waited for at the end of a block.
    """

    def __init__(self, other: Callable[[], None], block: int, device: torch.device) -> None:
        self.other, self.block, self.device = other, block, device
        self.mine: list[float] = []
        self.its: list[float] = []
        self.started = 0.0

    def on_after_step(self, trainer: Engine) -> None:
        if trainer.step % self.block:
            return
        self.mine.append(self._since(self.started))
        self.started = time.perf_counter()
        for _ in range(self.block):
            self.other()
        self.its.append(self._since(self.started))
        self.started = time.perf_counter()

    def _since(self, start: float) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - start) / self.block


def by_hand(work: Workload) -> Callable[[], None]:
    """Return a step of the loop, on a separate model."""
    model, optimizer = work.build()
    batches = work.batches(16)
    number = 0

    def step() -> None:
        nonlocal number
        batch = batches[number % 16]
        number += 1
        step_by_hand(work, model, optimizer, batch)

    return step


def measure(work: Workload, *, block: int, pairs: int) -> Pairs:
    """Return the times of a number of blocks, after three warm-up blocks."""
    model, optimizer = work.build()
    hook = Pairs(by_hand(work), block, work.device)
    precision = "bf16" if work.bf16 else None
    steps = (pairs + 3) * block
    with silent():
        engine = Engine(model, optimizer, Fit(), device=work.device, precision=precision, grad_clip=CLIP, hooks=[hook])
        engine.run(work.batches(steps), max_steps=steps)
    del hook.mine[:3], hook.its[:3]
    return hook


def row_of(name: str, hook: Pairs) -> dict[str, str]:
    ratios = [mine / its for mine, its in zip(hook.mine, hook.its, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return dict(
        zip(
            COLUMNS,
            (
                name, str(hook.block), str(len(ratios)), f"{median(hook.its):,.0f}", f"{median(hook.mine):,.0f}",
                f"{median(ratios):.3f} ({low:.3f} – {high:.3f})",
            ),
            strict=True,
        )
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        print(row_of("trial", measure(Workload(Net, (4, 64), torch.device("cpu"), fused=True), block=2, pairs=4)))
        return
    if not torch.cuda.is_available():
        parser.error("there is no GPU here; overhead.py is the benchmark of the CPU, and --tiny a trial")
    device = torch.device("cuda")
    cases = {
        "MLP 64-64-1, batch 32, fp32": (Workload(Net, (32, 64), device, fused=True), 16, options.pairs),
        "transformer d128 x4 on 32 positions, batch 64, bf16": (
            Workload(Encoder, (64, 32, 64), device, bf16=True, fused=True), 8, max(options.pairs // 3, 4),
        ),
    }  # fmt: skip
    rows = [row_of(name, measure(work, block=block, pairs=pairs)) for name, (work, block, pairs) in cases.items()]
    title = "Microseconds of an eager optimizer step on a GPU beside the loop by hand, gradients clipped"
    write_result("eager_gpu", title, COLUMNS, rows, describe())


if __name__ == "__main__":
    main()
