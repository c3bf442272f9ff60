"""The process that runs the target: installs the recorder, redirects files, runs the script as ``__main__``."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

import numpy as np

from treadle.engine import Engine
from treadle.engine.observers import observing
from treadle.errors import ConfigError
from treadle.hooks import CheckpointingHook
from treadle.runs.packs import find_pack
from treadle.runs.script import RedirectedRuns, run_as_main, train_from
from treadle.runs.target import PackRun, resolve
from treadle.runs.verify.evidence import SeedWatch
from treadle.runs.verify.jobs import Job, RecordFile
from treadle.runs.verify.recorder import Looker, Recorder


class Arrangement(RedirectedRuns):
    """Observer of the target's trainers: redirects their files into the work folder and adds the recorder.

    Args:
        job: the job of this process.
        file: the output of records.
    """

    command = "verify"
    faces = ("mini", "engine", "functional")

    def __init__(self, job: Job, file: RecordFile):
        super().__init__(job.target, job.workspace)
        self.job = job
        self.file = file
        self.watch = SeedWatch()
        self.pack = False  # the command of a pack takes the run folder as an option

    def before_running(self, engine: Engine) -> None:
        """Redirect the files of hooks, ensure checkpoints, and add the recorder.

        Raises:
            ConfigError: the target's face writes files that cannot be redirected.
        """
        if not self.pack:
            self._arrange_files(engine)
        for hook in engine.hooks:
            if isinstance(hook, CheckpointingHook) and hook.interval > self.job.interval:
                self._note(f"a checkpoint every {self.job.interval} steps instead of every {hook.interval}")
                hook.interval = self.job.interval
        recorder = Recorder(self.job, self.file, self.watch)
        recorder.replays = not self.pack  # a trainer of epochs then leaves the folder of its call alone
        engine.hooks = [recorder, *engine.hooks, Looker(recorder)]

    def _arrange_files(self, engine: Engine) -> None:
        for left_out in self.move(engine):
            self._note(f"{left_out} left out: it would upload these runs")
        if not any(isinstance(hook, CheckpointingHook) for hook in engine.hooks):
            self._note(f"a CheckpointingHook added: there is none (every {self.job.interval} steps, and SIGTERM)")
            engine.hooks = [*engine.hooks, CheckpointingHook(self.job.interval, exit_signals=signal.SIGTERM)]

    def _note(self, text: str) -> None:
        self.file.write("arranged", text=text)


class _WarningFile(logging.Handler):
    """Handler that writes the library's warnings into the records, since they often name the cause."""

    def __init__(self, file: RecordFile):
        super().__init__(logging.WARNING)
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        self.file.write("warning", text=record.getMessage())


def run_job(job: Job) -> NoReturn:
    """Run the target in this forked process, and end the process."""
    code = 1
    try:
        _redirect(job)
        code = _run(job)
    except BaseException:  # noqa: BLE001  (nothing may return into the server this was forked from)
        traceback.print_exc()
    finally:
        # As at interpreter exit; a plain return would continue in the server.
        with contextlib.suppress(OSError):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _redirect(job: Job) -> None:
    job.workspace.mkdir(parents=True, exist_ok=True)
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (for the life of the process)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # A new interpreter would seed these from the system; torch's default seed is a constant and is kept.
    random.seed()
    np.random.seed()


def _run(job: Job) -> int:
    file = RecordFile(job.records, job.number)
    arrangement = Arrangement(job, file)
    arrangement.watch.install()
    logging.getLogger("treadle").addHandler(_WarningFile(file))
    try:
        with observing(arrangement):
            _run_target(job, arrangement)
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except ConfigError as error:
        traceback.print_exc()
        file.write("refused", text=str(error))
        return 2
    return 0


def _run_target(job: Job, arrangement: Arrangement) -> None:
    found = resolve(job.target, job.arguments)
    path = Path(job.target)
    if isinstance(found, PackRun):
        arrangement.pack = True
        from rich.console import Console

        messages = Console(stderr=True, highlight=False)
        find_pack(found.face).train(
            found.settings, out=job.workspace, device=found.device, resume=True, messages=messages
        )
    elif found is not None:
        train_from(found, path.parent)
    else:
        run_as_main(path, job.arguments)
