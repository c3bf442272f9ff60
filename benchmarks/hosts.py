"""Cost of exchanging a few numbers between hosts in a step: gloo's collectives against rounds of doubling.

    python benchmarks/hosts.py                        # 2, 4, 8 and 16 processes; writes results/hosts.md and .json
    python benchmarks/hosts.py 2 --rounds 1           # a trial, writes nothing

All ways run in every round, so that other load on the machine affects all of them. Processes share the machine, so the
figures rank the ways but tell nothing about a network.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from machine import describe, write_result

from treadle import distributed
from treadle.distributed import ranks

COLUMNS = ("processes", "what", "way", "ms a call", "least", "most", "ms of the CPU")
NUMBERS = [1.0] * 12  # what each rank of replicas sends to the others in a step
ALWAYS, NEVER = 0, 1 << 20  # ranks beyond which rounds are used


def tell(few: int) -> None:
    ranks._FEW = few
    distributed.gather_numbers(NUMBERS)


def largest(few: int) -> None:
    ranks._FEW = few
    distributed.max_over_ranks(torch.zeros(221, dtype=torch.uint8))  # which of 221 weights have a gradient


WAYS: dict[tuple[str, str], Callable[[], Any]] = {
    ("12 numbers of each rank", "gloo's gather"): lambda: tell(NEVER),
    ("12 numbers of each rank", "rounds"): lambda: tell(ALWAYS),
    ("sums of 12 numbers", "gloo's all-reduce"): lambda: dist.all_reduce(torch.tensor(NUMBERS, dtype=torch.float64)),
    ("maxima of 221 bytes", "gloo's all-reduce"): lambda: largest(NEVER),
    ("maxima of 221 bytes", "rounds"): lambda: largest(ALWAYS),
}


def time_ways(rank: int, processes: int, folder: str, rounds: int, results: Any) -> None:
    """Run every way in every round and send the measurements of rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    calls = 100 if processes <= 4 else 30
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, call in WAYS.items():
            call()
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(calls):
                call()
            spent = time.perf_counter() - wall, time.process_time() - cpu
            measured[way].append((spent[0] / calls * 1e3, spent[1] / calls * 1e3))
    if rank == 0:
        results.put(measured)
    dist.barrier()
    dist.destroy_process_group()


def measure(processes: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each way."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=time_ways, args=(rank, processes, folder, rounds, results))
            for rank in range(processes)
        ]
        for each in ranks:
            each.start()
        measured = results.get(timeout=600)
        for each in ranks:
            each.join()
    rows = []
    for (what, way), found in measured.items():
        walls, cpus = [wall for wall, _ in found], [cpu for _, cpu in found]
        figures = [f"{value:.2f}" for value in (median(walls), min(walls), max(walls), median(cpus))]
        values = (processes, what, way, *figures)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processes", nargs="*", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    rows = []
    for processes in asked.processes or (2, 4, 8, 16):
        found = measure(processes, asked.rounds)
        rows += found
        print(*(" | ".join(map(str, row.values())) for row in found), sep="\n", flush=True)
    if not asked.processes:
        title = f"Milliseconds of one exchange between hosts, medians of {asked.rounds} rounds"
        write_result("hosts", title, COLUMNS, rows, describe())


if __name__ == "__main__":
    main()
