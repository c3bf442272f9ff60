"""Cost of examining objects at the first save of a run and after a load. ``python "
"benchmarks/checkpoint_look.py``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from treadle import Engine, StepOutput
from treadle.engine.first_save import try_loading
from treadle.engine.parts import PARTS
from treadle.engine.state_part import Saved

ROUNDS = 7


class MeanSquare:
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput(model(batch).square().mean())


def engine_of(mebibytes: int) -> Engine:
    """Return an engine whose weights and AdamW state take about this many MiB, after one step."""
    width = int((mebibytes * 2**20 / 3 / 4 / 4) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), MeanSquare(), device="cpu")
    engine.run([torch.randn(2, width)], max_steps=1)
    return engine


def milliseconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return 1000 * (time.perf_counter() - start)


def acts_of(engine: Engine) -> dict[str, Callable[[], object]]:
    """Return the operations to time."""
    tree = engine.state_dict()
    saved = Saved.for_engine(engine, tree)
    return {
        "one copy of the state (what a save begins with)": engine.state_dict,
        "the look at the first save, once a run": lambda: try_loading(engine, tree),
        "a load without the look": lambda: engine.state._load(engine, saved, PARTS, warns=False),
        "the look after a load": lambda: engine.state._verify_loaded(engine, saved),
    }


def main() -> None:
    print("| ms | " + " | ".join(f"{size} MiB" for size in (1, 16, 64, 256)) + " |")
    print("|---|---|---|---|---|")
    rows: dict[str, list[str]] = {}
    for size in (1, 16, 64, 256):
        engine = engine_of(size)
        acts = acts_of(engine)
        times: dict[str, list[float]] = {name: [] for name in acts}
        for _ in range(ROUNDS):
            for name, act in acts.items():
                times[name].append(milliseconds(act))
        for name, values in times.items():
            cell = f"{statistics.median(values):.1f} ({min(values):.1f} – {max(values):.1f})"
            rows.setdefault(name, []).append(cell)
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
