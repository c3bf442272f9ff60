"""Several ranks on this machine for one test: ``run_on_ranks(work, 2)`` returns what ``work()`` returned on each.

The ranks are forked from one process that has imported torch, so a launch costs a fraction of a second. ``work`` may be
in the test file itself: it is found by file and name. Its arguments must be picklable; it may return tensors.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from processes import python

_PRELOADED = [
    "pytest", "torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "treadle",
    "treadle.astro", "treadle.graphs", "treadle.spectra",
]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TORCHRUN_OF_FORKS = [sys.executable, "-m", "torchrun_of_forks", "--standalone"]  # for processes.Forked
_PATIENCE = 240.0  # seconds; only spent on a hang
_GRACE = 60.0  # seconds for the other ranks once one has failed: their errors follow from its error


@dataclass
class Outcome:
    """Outcome of one rank.

    Attributes:
        result: what the function returned.
        error: its traceback, or where it hung; None after success and after a silent death.
        exitcode: exit code of the process; 0 after success, -9 if it had to be killed here.
    """

    result: Any = None
    error: str | None = None
    exitcode: int | None = None
    failed_at: float = float("inf")

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode == 0


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = _PATIENCE) -> list[Any]:
    """Call ``function(*args)`` on every rank of a fresh gloo group and return the results in rank order.

    Raises:
        AssertionError: a rank raised, died or hung; the first failure is shown first.
    """
    outcomes = outcomes_on_ranks(function, world_size, *args, timeout=timeout)
    failed = [(outcome.failed_at, rank, outcome) for rank, outcome in enumerate(outcomes) if not outcome.ok]
    if failed:
        told = [
            f"--- rank {rank} of {world_size} (exit code {outcome.exitcode}) ---\n{outcome.error or 'died silently'}"
            for _, rank, outcome in sorted(failed, key=lambda entry: entry[:2])
        ]
        raise AssertionError("\n" + "\n".join(told))
    return [outcome.result for outcome in outcomes]


def outcomes_on_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = _PATIENCE, grace: float = _GRACE
) -> list[Outcome]:
    """Run like :func:`run_on_ranks`, with ranks that may fail or die; return the outcome of each.

    Args:
        function: run on each rank.
        world_size: number of ranks.
        args: for the function.
        timeout: seconds until all ranks are killed and those still running are reported as hung.
        grace: seconds for the others after the first failure.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    where = (sys.modules[function.__module__].__file__, function.__module__, function.__qualname__)
    outcomes = [Outcome() for _ in range(world_size)]
    with tempfile.TemporaryDirectory() as folder:
        running: dict[Connection, int] = {}
        processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            job = (where, args, rank, world_size, folder, timeout, theirs)
            process = context.Process(target=_on_a_rank, args=job, daemon=False)  # a loader's workers are children
            process.start()
            theirs.close()
            running[ours] = rank
            processes.append(process)
        try:
            _collect(running, outcomes, timeout, grace)
        finally:
            for rank, process in enumerate(processes):
                process.join(grace if outcomes[rank].error is None and rank not in running.values() else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
                outcomes[rank].exitcode = process.exitcode
        for rank in running.values():
            stacks = Path(folder, f"stacks_{rank}").read_text()
            outcomes[rank].error = f"still running after {timeout:g} s, or {grace:g} s after another failed\n{stacks}"
    return outcomes


def torchrun(
    *arguments: str, ranks: int = 2, options: Sequence[str] = (), timeout: float = _PATIENCE, **rest: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``torchrun`` on this machine and return its result with its output.

    Args:
        arguments: a script or ``-m`` and a module, with arguments.
        ranks: number of processes.
        options: options of torchrun.
        timeout: seconds until it is killed, with an error.
        rest: for :func:`processes.python`, such as ``cwd``.
    """
    command = [*TORCHRUN_OF_FORKS[1:], f"--nproc-per-node={ranks}", *options, *arguments]
    return python(*command, env=launch_environment(), timeout=timeout, **rest)


def launch_environment() -> dict[str, str]:
    """Return the environment of newly started processes: one thread, no GPU, the tests' modules."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}


def _collect(running: dict[Connection, int], outcomes: list[Outcome], timeout: float, grace: float) -> None:
    """Receive from the ranks until all have ended or the time is over; leave those that are still running."""
    deadline = time.monotonic() + timeout
    while running and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(running), timeout=left):
            rank = running.pop(connection)
            outcomes[rank].failed_at = time.monotonic()
            with contextlib.suppress(EOFError):  # it died silently
                ok, value, outcomes[rank].failed_at = connection.recv()
                if ok:
                    outcomes[rank].result = torch.load(io.BytesIO(value), weights_only=False)
                    continue
                outcomes[rank].error = value
            deadline = min(deadline, time.monotonic() + grace)


def _on_a_rank(
    where: tuple[str, str, str],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    folder: str,
    timeout: float,
    results: Connection,
) -> None:
    torch.set_num_threads(1)
    stacks = Path(folder, f"stacks_{rank}").open("w")  # noqa: SIM115  (open until the process ends)
    faulthandler.dump_traceback_later(max(timeout - 1, timeout / 2), file=stacks)
    try:
        function = _find(*where)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )  # fmt: skip
        _wait_until_all_are_connected(Path(folder), rank, world_size)
        value = function(*args)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        buffer = io.BytesIO()
        torch.save(value, buffer)
    except BaseException:
        results.send((False, traceback.format_exc(), time.monotonic()))
        results.close()
        raise SystemExit(1) from None
    results.send((True, buffer.getvalue(), float("inf")))


def _wait_until_all_are_connected(folder: Path, rank: int, world_size: int) -> None:
    """Keep a rank from ending before others have connected to it, which would fail their start."""
    (folder / f"connected_{rank}").touch()
    while len([*folder.glob("connected_*")]) < world_size:
        time.sleep(0.002)


def _find(file: str, module: str, name: str) -> Any:
    """Return a function of a test file, which pytest imports under a name unknown to other processes."""
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found
