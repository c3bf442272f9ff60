"""Pause of training for a checkpoint: ``torch.save`` against treadle's saves, in one run on one machine.

    python benchmarks/checkpoint.py            # writes results/checkpoint.md and .json
    python benchmarks/checkpoint.py --tiny     # a trial, writes no result

A state is a third weights and two thirds optimizer moments, as with AdamW. In each round every way saves once, so that
other load on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import describe, write_result
from torch import nn

from treadle.checkpoint import save_checkpoint, verify_checkpoint
from treadle.checkpoint.schema import to_plain
from treadle.checkpoint.writer import CheckpointWriter

WAYS = {
    "plain": "torch.save",
    "fsync": "torch.save + fsync",
    "sync": "treadle, foreground",
    "stall": "treadle, background: training waits",
    "total": "treadle, background: until durable",
    "verify": "of which reading back and checking",
}
TENSORS = 48


def state(mebibytes: int) -> dict[str, Any]:
    """Return a state of about this size with 16 weights and the two moments of each."""
    parts = [torch.randn(mebibytes * 2**20 // 4 // TENSORS) for _ in range(TENSORS)]
    weights = {f"layer{i}": parts[i] for i in range(16)}
    moments = {i: {"exp_avg": parts[16 + i], "exp_avg_sq": parts[32 + i]} for i in range(16)}
    return {"model": weights, "optimizer": {"state": moments}, "global_step": 1}


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def save_and_sync(tree: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(tree, file)
        file.flush()
        os.fsync(file.fileno())


def save(writer: CheckpointWriter, tree: dict[str, Any], path: Path, *, background: bool = True) -> None:
    def write(copy: dict[str, Any]) -> None:
        save_checkpoint(copy, path)

    writer.save(lambda buffers: to_plain(tree, buffers=buffers), write, background=background)


def one_round(tree: dict[str, Any], folder: Path, writer: CheckpointWriter) -> dict[str, float]:
    """Save once in every way; each waits until the disk has flushed the previous one."""
    found = {}
    os.sync()
    found["plain"] = seconds(lambda: torch.save(tree, folder / "plain.pt"))
    os.sync()
    found["fsync"] = seconds(lambda: save_and_sync(tree, folder / "fsync.pt"))
    os.sync()
    found["sync"] = seconds(lambda: save(writer, tree, folder / "sync.pt", background=False))
    os.sync()
    start = time.perf_counter()
    save(writer, tree, folder / "background.pt")
    found["stall"] = time.perf_counter() - start
    writer.wait()
    found["total"] = time.perf_counter() - start
    found["verify"] = seconds(lambda: verify_checkpoint(folder / "sync.pt"))
    return found


def measure(mebibytes: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    tree, writer = state(mebibytes), CheckpointWriter()
    one_round(tree, folder, writer)  # the first save allocates the memory that later ones reuse
    found = [one_round(tree, folder, writer) for _ in range(rounds)]
    writer.close()
    return {way: [entry[way] for entry in found] for way in WAYS}


def steps_beside_a_write(mebibytes: int, folder: Path, *, rounds: int) -> dict[str, float]:
    """Time small training steps alone and while a state is being written."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(256, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    tree, writer = state(mebibytes), CheckpointWriter()
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(rounds):
        alone += [seconds(step) for _ in range(100)]
        save(writer, tree, folder / "background.pt")
        beside.append(seconds(step))  # at least one: a small state may be written in less time than a step takes
        while writer.writing:
            beside.append(seconds(step))
        writer.wait()
    return {"alone": median(alone), "beside": median(beside), "mean_alone": mean(alone), "mean_beside": mean(beside)}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def rows_of(seconds: dict[int, dict[str, list[float]]]) -> list[dict[str, str]]:
    """Return a row for each way, and then for ratios of medians; a column for each size."""
    rows = []
    for way, words in WAYS.items():
        row = {"ms": words}
        for size, found in seconds.items():
            least, middle, most = (
                f"{1e3 * value:.1f}" for value in (min(found[way]), median(found[way]), max(found[way]))
            )
            row[f"{size} MiB"] = f"{middle} ({least} – {most})"
        rows.append(row)
    for above, below in (("stall", "plain"), ("stall", "fsync"), ("stall", "sync"), ("sync", "fsync")):
        ratios = {size: median(found[above]) / median(found[below]) for size, found in seconds.items()}
        words = f"ratio: {WAYS[above]} / {WAYS[below]}"
        rows.append({"ms": words} | {f"{size} MiB": f"{ratio:.2f}" for size, ratio in ratios.items()})
    return rows


def notes_of(mebibytes: int, steps: dict[str, float], rounds: int) -> list[str]:
    return [
        f"Milliseconds, median (least – most) of {rounds} rounds; in each round every way saves once.",
        f"A small training step takes {1e3 * steps['alone']:.2f} ms alone and {1e3 * steps['beside']:.2f} ms (median; "
        f"mean {1e3 * steps['mean_alone']:.2f} and {1e3 * steps['mean_beside']:.2f}) while a state of {mebibytes} MiB "
        "is written beside it.",
        "A foreground save looks for values that are not finite, writes, flushes, reads the file back and checks its "
        "CRC-32s, renames it and flushes the folder; before a background save training waits for one copy of the state "
        "and no more. `torch.save` alone does none of this but the writing, and returns before the disk has the bytes.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64, 256], help="MiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where the files are written and removed; a temporary folder")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.tiny:
        options.sizes, options.rounds = [1], 1
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        seconds = {size: measure(size, options.rounds, Path(name)) for size in options.sizes}
        steps = steps_beside_a_write(max(options.sizes), Path(name), rounds=min(4, options.rounds))
    rows, notes = rows_of(seconds), notes_of(max(options.sizes), steps, options.rounds)
    if options.tiny:
        print(*rows, *notes, sep="\n")
        return
    machine = describe() | {
        "load": f"{before:.1f} before and {os.getloadavg()[0]:.1f} after, with other work on the cores"
    }
    write_result("checkpoint", "How long training pauses for a checkpoint", list(rows[0]), rows, machine, notes=notes)


if __name__ == "__main__":
    main()
