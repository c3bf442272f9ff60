"""Samples per second of torch's DataLoader and of treadle's loaders, without training, in one run on one machine.

    python benchmarks/loader.py                # writes results/loader.md and .json (loader_gpu where there is a GPU)
    python benchmarks/loader.py --tiny         # a trial, writes nothing

All give the same rows, shuffled, on the device that would train: the CPU, or the GPU where there is one, to which the
DataLoader's batches are moved as each comes. Every round runs a pass of every way, in a new order each time, so that
other load on the machine affects all of them. On a busy machine, look at the processor time: it is that of all threads
of this process, without the workers of a DataLoader. Workers persist, and a first pass that starts them is not counted.
On a GPU there is one more figure: the rate while matrix products keep the GPU busy, as training does. The table is
written after each batch size. The nine rounds should take about four minutes on an H200; ``--rounds`` sets their
number.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from machine import describe, write_result
from rounds import Rounds, exit_if_failed
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from treadle import MappedLoader, TensorLoader, TransferLoader

SHAPES = {"spectra, 256 floats": (40_960, 256, np.float32), "tokens, 1024 integers": (8_192, 1024, np.int64)}
PLAIN = "DataLoader, 0 workers"
FAILED = "failed"
WIDTH, PRODUCTS = 2048, 24  # of the concurrent matrix products


class Moved:
    """Loader that moves each batch when it is read, as a hand-written loop does."""

    def __init__(self, loader: Iterable[Any], device: torch.device):
        self.loader, self.device = loader, device

    def __iter__(self) -> Iterator[Any]:
        for (batch,) in self.loader:
            yield batch.to(self.device, non_blocking=True)


def ways(array: np.memmap, batch_size: int, device: torch.device) -> dict[str, Iterable[Any]]:
    """Return the loaders by name, all over the same rows."""
    rows = torch.from_numpy(np.array(array))
    on_gpu = device.type == "cuda"

    def torchs(num_workers: int) -> DataLoader[Any]:
        return DataLoader(
            TensorDataset(rows), batch_size, shuffle=True, num_workers=num_workers, pin_memory=on_gpu,
            persistent_workers=num_workers > 0,
        )  # fmt: skip

    def ours(**settings: Any) -> TensorLoader:
        return TensorLoader(rows, batch_size=batch_size, shuffle=True, device=device, **settings)

    found: dict[str, Iterable[Any]] = {
        PLAIN: Moved(torchs(0), device),
        "DataLoader, 2 workers": Moved(torchs(2), device),
        "TransferLoader(DataLoader, 0 workers)": TransferLoader(torchs(0), device),
        "TransferLoader(DataLoader, 2 workers)": TransferLoader(torchs(2), device),
        "TensorLoader": ours(),
        "TensorLoader(num_buffers=1)": ours(num_buffers=1),
        "MappedLoader, windows of 8 MiB": MappedLoader(
            array, batch_size=batch_size, shuffle=True, window_chunks=8, device=device
        ),
    }
    if on_gpu:
        on_cpu = TensorLoader(rows, batch_size=batch_size, shuffle=True)
        found["TransferLoader(TensorLoader on the CPU)"] = TransferLoader(on_cpu, device)
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_pass(loader: Iterable[Any], device: torch.device, beside: Callable[[], object] | None) -> tuple[float, float]:
    """Return the wall-clock seconds of a pass, including the device's work, and the processor seconds."""
    synchronize(device)
    start, used = time.perf_counter(), time.process_time()
    for _ in loader:
        if beside is not None:
            beside()
    synchronize(device)
    return time.perf_counter() - start, time.process_time() - used


def measure(
    found: dict[str, Iterable[Any]], device: torch.device, *, rounds: int, beside: Callable[[], object] | None
) -> Rounds[str, tuple[float, float]]:
    """Return the seconds of each pass of each way, after an uncounted one that starts workers and allocates memory."""
    built = {way: lambda loader=loader: loader for way, loader in found.items()}
    seconds = Rounds(built, lambda loader, number: one_pass(loader, device, beside))
    for _ in seconds.play(rounds):
        pass
    return seconds


def products(device: torch.device) -> Callable[[], Tensor]:
    """Return matrix products that stand in for the work of a step."""
    weight = torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)

    def beside() -> Tensor:
        product = weight
        for _ in range(PRODUCTS):
            product = product @ weight
        return product

    return beside


def rate(count: int, passes: list[tuple[float, float]]) -> str:
    """Return samples per wall-clock second: median, minimum and maximum."""
    clock = [seconds for seconds, _ in passes]
    least, middle, most = (f"{count / number:,.0f}" for number in (max(clock), median(clock), min(clock)))
    return f"{middle} ({least} – {most})"


def processor(count: int, passes: list[tuple[float, float]]) -> float:
    """Return the median microseconds of processor time per sample."""
    return 1e6 * median(used for _, used in passes) / count


def table(
    folder: Path, device: torch.device, *, batch_sizes: list[int], rounds: int, share: int
) -> Iterator[list[dict[str, Any]]]:
    """Measure everything; yield the rows so far after each batch size."""
    lines: list[dict[str, Any]] = []
    for workload, (count, width, dtype) in SHAPES.items():
        count //= share
        array = np.memmap(folder / "rows.bin", dtype=dtype, mode="w+", shape=(count, width))
        array[:] = np.random.default_rng(0).integers(0, 100, (count, width))
        array.flush()
        for batch_size in batch_sizes:
            found = ways(array, batch_size, device)
            measured = [measure(found, device, rounds=rounds, beside=None)]
            if device.type == "cuda":
                measured.append(measure(found, device, rounds=rounds, beside=products(device)))
            alone, with_work = measured[0].figures, measured[-1].figures
            base = processor(count, alone[PLAIN])
            for way in alone:
                line: dict[str, Any] = {"workload": workload, "batch": batch_size, "way": way}
                line["samples/s"] = rate(count, alone[way])
                if device.type == "cuda" and way in with_work:
                    line["samples/s beside a step"] = rate(count, with_work[way])
                line["processor µs a sample"] = f"{processor(count, alone[way]):.2f}"
                line["of DataLoader, 0 workers"] = f"{processor(count, alone[way]) / base:.2f}"
                lines.append(line)
                print(line, flush=True)
            for way, why in {way: why for each in measured for way, why in each.failed.items()}.items():
                lines.append({"workload": workload, "batch": batch_size, "way": f"{way}: {FAILED}, {why[:200]}"})
            yield lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--folder", type=Path, help="where the rows are written and removed; a temporary folder")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    logging.getLogger("treadle").setLevel(logging.ERROR)  # hide the message that there is no GPU
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.tiny:
        options.rounds = 1
    before = os.getloadavg()[0]
    title = f"Samples a second that loaders give, shuffled, on the {'GPU' if device.type == 'cuda' else 'CPU'}"
    name = "loader_gpu" if device.type == "cuda" else "loader"
    sizes: dict[str, Any] = {"batch_sizes": options.batch_sizes, "rounds": options.rounds}
    cases, done = len(SHAPES) * len(options.batch_sizes), 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for rows in table(Path(folder), device, **sizes, share=20 if options.tiny else 1):
            done += 1
            if options.tiny:
                continue
            load = f"{before:.1f} before and {os.getloadavg()[0]:.1f} after, with other work on the cores"
            machine = describe() | {"load": load}
            write_result(name, title, list(rows[0]), rows, machine, partial=done < cases)
    exit_if_failed(any(f": {FAILED}, " in row["way"] for row in rows))


if __name__ == "__main__":
    main()
