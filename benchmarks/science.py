"""Shared parts of the science benchmarks: options, a resumable folder of runs, tables."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch


def options_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common options; ``name`` is that of the benchmark."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs of our models at the same time, a process each")
    parser.add_argument("--budget-minutes", type=float, default=float("inf"), help="then the command ends, and resumes")
    parser.add_argument("--runs", type=Path, help=f"default runs/{name}, with --tiny a temporary folder")
    parser.add_argument("--tiny", action="store_true", help="a trial on little data, which writes no table into a file")
    parser.set_defaults(name=name)
    return parser


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options of benchmarks whose training may be captured, or copied from another machine."""
    parser.add_argument(
        "--capture", action="store_const", const="auto", default=False, help="replay training steps as CUDA graphs"
    )
    parser.add_argument("--trained-on", help="the machine of runs that were brought here, for the notes")


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options with a folder of runs and a deadline."""
    options = parser.parse_args()
    if options.runs is None:
        options.runs = Path(tempfile.mkdtemp()) if options.tiny else Path("runs") / options.name
    options.runs.mkdir(parents=True, exist_ok=True)
    options.deadline = time.time() + 60 * options.budget_minutes
    return options


def pool_of(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of processes that each see one GPU, in turn, and use one thread for numpy and torch.

    Many runs are in parallel.
    """
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    context = get_context("spawn")
    return ProcessPoolExecutor(jobs, context, _take_gpu, (gpus, context.Value("i", 0)))


def _take_gpu(gpus: Sequence[str], taken: Any) -> None:
    with taken.get_lock():
        number, taken.value = taken.value, taken.value + 1
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]


def kept(file: Path, write: Any) -> Path:
    """Write a file atomically: ``write`` gets a temporary name, which is renamed to ``file`` when it is done."""
    other = file.with_suffix(".part")
    write(other)
    other.replace(file)
    return file


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Return the mean and the standard deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def as_markdown(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table below its title."""
    columns = list(rows[0])
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    return f"**{title}**\n\n{head}" + "\n".join(
        f"| {' | '.join(str(row.get(column, '')) for column in columns)} |" for row in rows
    )
