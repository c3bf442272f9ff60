"""Times of the collectives in a step of scaling.py's decoders, with a linear fit: fixed cost and bandwidth.

    python benchmarks/collectives.py --ranks 2 4 8        # on GPUs of one host; writes results/collectives.md and .json
    python benchmarks/collectives.py --tiny --ranks 2 4   # on the CPU with gloo, a trial that writes nothing

All-reduces and reductions are of float32, gathers of bfloat16, as in the steps; messages between hosts go through gloo
by treadle's own calls. A time is the median over rounds of several calls in a row, on the slowest rank. Bandwidth is
that of the bus as NCCL's tests count it: bytes times 2 (N - 1) / N of an all-reduce, (N - 1) / N of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from machine import describe, write_result
from messages import (
    ALL_GATHER,
    ALL_REDUCE,
    HOST_GATHER,
    HOST_MAXIMUM,
    ON_DEVICE,
    REDUCE_SCATTER,
    TOLD,
    bus_share,
    fit,
    messages_of,
)  # fmt: skip

from treadle import distributed

COLUMNS = ("operation", "ranks", "bytes", "ms", "bus GB/s", "fixed µs")
PROBES = (1 << 12, 1 << 16, 1 << 20)  # bytes, in addition to those of the steps, for the fixed cost
ROUNDS = 7


def sizes_of(operation: str, models: Sequence[str], ranks: int) -> list[int]:
    """Return the message sizes to measure, in bytes: those of the steps, and probes for collectives on the device."""
    steps = {
        message.num_bytes
        for model in models
        for way in ("ddp", "fsdp")
        for message in messages_of(way, model)
        if message.operation == operation
    }
    if operation not in ON_DEVICE:
        return sorted(steps)
    whole = 4 * ranks  # bytes: every rank has as many numbers of float32
    return sorted({-(-size // whole) * whole for size in steps.union(PROBES)})


def call_of(operation: str, num_bytes: int, device: torch.device) -> Callable[[], Any]:
    """Return a call of the collective with separate buffers."""
    ranks = dist.get_world_size()
    mean = dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM  # gloo has no mean
    if operation == ALL_REDUCE:
        buffer = torch.zeros(num_bytes // 4, device=device)
        return lambda: dist.all_reduce(buffer, op=mean)
    if operation == ALL_GATHER:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
        whole = torch.zeros(num_bytes // 2, device=device, dtype=torch.bfloat16)
        own = torch.zeros(num_bytes // 2 // ranks, device=device, dtype=torch.bfloat16)
        return lambda: gather(whole, own)
    if operation == REDUCE_SCATTER:
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        every = torch.zeros(num_bytes // 4, device=device)
        part = torch.zeros(num_bytes // 4 // ranks, device=device)
        return lambda: reduce(part, every, op=mean)
    if operation == HOST_GATHER:
        assert num_bytes == TOLD
        return lambda: distributed.gather_numbers([1.0] * (num_bytes // 8))
    told = torch.zeros(num_bytes, dtype=torch.uint8)
    return lambda: distributed.max_over_ranks(told)


def milliseconds(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Return the time of a call on the slowest rank, as the median over rounds."""
    call()
    found = []
    for _ in range(ROUNDS):
        _wait(device)
        dist.barrier()
        _wait(device)
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        _wait(device)
        found.append(1e3 * (time.perf_counter() - begun) / calls)
    slowest = torch.tensor(median(found), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def worker(options: argparse.Namespace) -> None:
    device = torch.device("cpu") if options.tiny else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("gloo" if options.tiny else "nccl")
    rows = []
    for operation in (*ON_DEVICE, HOST_GATHER, HOST_MAXIMUM):
        for num_bytes in sizes_of(operation, options.sizes, dist.get_world_size()):
            calls = 3 if options.tiny else 20 if num_bytes > PROBES[-1] else 100
            ms = milliseconds(call_of(operation, num_bytes, device), calls, device)
            rows.append({"operation": operation, "bytes": num_bytes, "ms": ms})
    if dist.get_rank() == 0:
        options.found.write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return the rows for a number of ranks, those of each operation followed by their linear fit."""
    found = folder / f"{ranks}.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__,
        "--found", str(found), "--sizes", *options.sizes,
    ]  # fmt: skip
    command += ["--tiny"] if options.tiny else []
    subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})
    return table(json.loads(found.read_text(encoding="utf-8")), ranks)


def table(measured: Sequence[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Return the lines of the result."""
    lines: list[dict[str, Any]] = []
    for operation in dict.fromkeys(row["operation"] for row in measured):
        times = [(row["bytes"], row["ms"]) for row in measured if row["operation"] == operation]
        for num_bytes, ms in times:
            rate = f"{_bus(operation, ranks, ms / num_bytes):.2f}" if operation in ON_DEVICE else ""
            lines.append(
                {"operation": operation, "ranks": ranks, "bytes": num_bytes, "ms": f"{ms:.4f}", "bus GB/s": rate}
            )
        if operation in ON_DEVICE:
            through = fit(times)
            lines.append({
                "operation": operation, "ranks": ranks, "bytes": "fit",
                "bus GB/s": f"{_bus(operation, ranks, through.per_byte):.2f}", "fixed µs": f"{1e3 * through.fixed:.1f}",
            })  # fmt: skip
    return lines


def _bus(operation: str, ranks: int, ms_per_byte: float) -> float:
    return bus_share(operation, ranks) / ms_per_byte / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--sizes", nargs="+", default=["100m", "1b"], help="decoders whose steps are looked at")
    parser.add_argument("--tiny", action="store_true", help="a small decoder on the CPU, and no files")
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.sizes = ["tiny"]
    elif not torch.cuda.is_available():
        parser.error("needs GPUs; --tiny is a trial on the CPU")
    if options.found:
        worker(options)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            rows += measure(ranks, options, Path(folder))
    if options.tiny:
        print(*lines_of(rows), sep="\n")
        return
    title = f"Collectives of a step between GPUs of one host, medians of {ROUNDS} rounds on the slowest rank"
    write_result("collectives", title, COLUMNS, rows, describe() | {"gpus": str(torch.cuda.device_count())})


def lines_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [" | ".join(str(row.get(column, "")) for column in COLUMNS) for row in rows]


if __name__ == "__main__":
    main()
