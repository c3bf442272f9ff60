"""A process that has torch imported and forks one child per job: ``python -m treadle.runs.verify.server``.

Starting an interpreter and importing torch takes seconds, a fork milliseconds. Nothing is computed here and no
accelerator is touched, so a child is as good as a new interpreter. Two servers with different hash seeds show what
depends on the order of sets. Jobs come in on stdin, a line each; the answer is a line with the exit status.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from treadle.runs.packs import PACKS, find_pack, module_of
from treadle.runs.verify.child import run_job
from treadle.runs.verify.jobs import Job

_POLL_SECONDS = 0.02
# Slow to import and without side effects. torch._dynamo comes with the first optimizer.
_WARM = ("torch._dynamo", "torch.optim", "torch.utils.data")
_HARMLESS = ("PIL", "numpy", "pandas", "scipy", "sklearn", "torchvision")


def serve(arguments: Sequence[str]) -> None:
    """Run jobs until stdin is closed.

    Args:
        arguments: the target, so that what it is known to need can be imported once.
    """
    jobs, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # nothing but answers may reach the other side
    for name in (*_WARM, *modules_to_warm(arguments[0])):
        with contextlib.suppress(ImportError):  # if the target needs it, it will say so
            importlib.import_module(name)
    with os.fdopen(jobs, "r") as lines:
        while line := lines.readline():
            answer = _run_forked(Job.from_line(line), [jobs, answers])
            os.write(answers, (json.dumps(answer) + "\n").encode())


def modules_to_warm(target: str) -> list[str]:
    """Return what a target imports that may as well be imported once, before the forks.

    Only packages that are known to start nothing on import; all else is imported in each child, as in a new process.

    Example:
        >>> modules_to_warm("spectra")
        ['treadle.spectra.runs']
    """
    if target in PACKS:
        return [module_of(target), *find_pack(target).warm]
    try:
        tree = ast.parse(Path(target).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []  # the child reports the error
    return [name for name in _imported(tree) if name.partition(".")[0] in _HARMLESS]


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _run_forked(job: Job, pipes: Sequence[int]) -> dict[str, object]:
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()  # its data workers are ended with it
        for pipe in pipes:
            os.close(pipe)
        run_job(job)
    timed_out = False
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        timed_out = job.limit is not None and time.monotonic() - started > job.limit
        # While a job runs nothing is sent, so something to read means that the other side is gone.
        gone = bool(select.select([pipes[0]], [], [], 0)[0])
        if timed_out or gone:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(_POLL_SECONDS)
    _end_group(child)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - started,
        "timed_out": timed_out,
    }


def _end_group(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1:])
