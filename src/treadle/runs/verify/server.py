"""Fork server with torch imported, which forks one child per job: ``python -m treadle.runs.verify.server``.

Starting an interpreter and importing torch takes seconds, a fork milliseconds. The server computes nothing and touches
no accelerator, so a child is as good as a new interpreter. Two servers with different hash seeds expose dependence on
the order of sets. Jobs arrive on stdin, one per line; the answer is a line with the exit status.
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
# Slow to import and without side effects. torch._dynamo is imported with the first optimizer.
_WARM = ("torch._dynamo", "torch.optim", "torch.utils.data")
_HARMLESS = ("PIL", "numpy", "pandas", "scipy", "sklearn", "torchvision")


def serve(arguments: Sequence[str]) -> None:
    """Run jobs until stdin is closed.

    Args:
        arguments: the target, so that its known imports can be done once.
    """
    jobs, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # only answers may reach the client
    for name in (*_WARM, *modules_to_warm(arguments[0])):
        with contextlib.suppress(ImportError):  # if the target needs it, it will fail there
            importlib.import_module(name)
    with os.fdopen(jobs, "r") as lines:
        while line := lines.readline():
            answer = _run_forked(Job.from_line(line), [jobs, answers])
            os.write(answers, (json.dumps(answer) + "\n").encode())


def modules_to_warm(target: str) -> list[str]:
    """Return the imports of a target that can be done once, before the forks.

    Only packages known to start nothing on import; everything else is imported in each child, as in a new process.

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
        os.setsid()  # its data workers end with it
        for pipe in pipes:
            os.close(pipe)
        run_job(job)
    timed_out = False
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        timed_out = job.limit is not None and time.monotonic() - started > job.limit
        # Nothing is sent while a job runs, so readable input means that the client is gone.
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
