"""Pool of processes that train one member each, or several in turns on one GPU."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from treadle.engine.run_log import RUN_LOG, VARIABLE
from treadle.errors import ConfigError
from treadle.population.member import Make, Member, Outcome, Workspaces, run_member
from treadle.population.turns import Source, run_in_turns

_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


@dataclass(frozen=True)
class Worker:
    """Configuration of a worker process.

    Attributes:
        threads: CPU threads of torch.
        gpu: value of ``CUDA_VISIBLE_DEVICES``; None leaves it unchanged.
        together: number of members that it trains in turns.
        steps: steps per turn.
    """

    threads: int = 1
    gpu: str | None = None
    together: int = 1
    steps: int = 16

    def environment(self) -> dict[str, str]:
        """Return the environment variables that must be set before torch is imported."""
        found = {"OMP_NUM_THREADS": str(self.threads), VARIABLE: "0"}
        return found if self.gpu is None else {**found, "CUDA_VISIBLE_DEVICES": self.gpu}


class _Process:
    """Process with the members that it trains."""

    def __init__(self, make: Make, worker: Worker, context: Any):
        self.worker = worker
        self.running: list[Member] = []
        self.ended = False
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(make, worker, theirs), daemon=False)
        with _environment(worker.environment()):
            self.process.start()
        theirs.close()

    @property
    def has_room(self) -> bool:
        """Whether the process can take another member."""
        return not self.ended and len(self.running) < self.worker.together

    def give(self, member: Member) -> None:
        """Send a member to train."""
        self.running.append(member)
        self.pipe.send(member)

    def take(self) -> list[tuple[Member, Outcome]]:
        """Return the members that have ended since; those of a dead process have failed."""
        found = []
        try:
            while self.pipe.poll():
                name, outcome = self.pipe.recv()
                member = next(each for each in self.running if each.name == name)
                self.running.remove(member)
                found.append((member, outcome))
        except (EOFError, OSError):
            self.ended = True
            self.process.join()
            outcome = _lost(self.process.exitcode or 0)
            found += [(member, outcome) for member in self.running]
            self.running = []
        return found

    def close(self, *, at_once: bool = False) -> None:
        """Let the process end; with SIGTERM if ``at_once``."""
        if at_once:
            self.process.terminate()
        with contextlib.suppress(OSError):
            self.pipe.close()
        self.process.join()


def _lost(exit_code: int) -> Outcome:
    """Return the outcome of a member whose process has died."""
    if exit_code in (-signal.SIGTERM, -signal.SIGINT):
        return Outcome("stopped", code=128 - exit_code)
    how = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    more = "; memory may have run out, so try fewer workers" if exit_code == -9 else ""
    return Outcome("failed", error=f"its process ended: {how}{more}")


def check_picklable(make: Make) -> None:
    """Raise ConfigError for a factory that a new process cannot import.

    Example:
        >>> check_picklable(print)
    """
    try:
        pickle.dumps(make)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"cannot be sent to another process ({error}); define it at the top level of a module, or use workers=0",
            argument="make",
        ) from error


def run_in_processes(make: Make, source: Source, workers: Sequence[Worker]) -> int | None:
    """Train the members of a source in processes.

    Args:
        make: the factory; must be picklable.
        source: provides members and receives their outcomes.
        workers: one process each, started when there is a member for it.

    Returns:
        The signal that ended the runs, or None.
    """
    check_picklable(make)
    context = multiprocessing.get_context("spawn")
    processes: list[_Process] = []
    received: list[int] = []
    try:
        with _forwarding(processes, received):
            while True:
                _fill(processes, make, source, workers, context, stopping=bool(received))
                busy = [each for each in processes if each.running]
                if not busy:
                    return received[0] if received else None
                wait([each.pipe for each in busy], timeout=1.0)
                for each in busy:
                    for member, outcome in each.take():
                        source.tell(member, outcome)
                processes[:] = [each for each in processes if not each.ended]
    except BaseException:
        for each in processes:
            each.close(at_once=True)
        raise
    finally:
        for each in processes:
            each.close()


def _fill(
    processes: list[_Process], make: Make, source: Source, workers: Sequence[Worker], context: Any, *, stopping: bool
) -> None:
    """Send members to processes with capacity, the emptiest first, and start processes for the others."""
    while not stopping:
        free = [each for each in processes if each.has_room]
        taken = [id(each.worker) for each in processes]
        idle = [worker for worker in workers if id(worker) not in taken]
        if not free and not idle:
            return
        member = source.next()
        if member is None:
            return
        empty = [each for each in free if not each.running]
        if not empty and idle:
            empty = [_Process(make, idle[0], context)]
            processes += empty
        (empty[0] if empty else min(free, key=lambda each: len(each.running))).give(member)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _forwarding(processes: list[_Process], received: list[int]) -> Iterator[None]:
    """Forward signals to the processes inside the block; a third one ends this process and all of them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def forward(number: int, _frame: Any) -> None:
        received.append(number)
        if len(received) >= 3:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        for each in processes:
            with contextlib.suppress(OSError):
                if each.process.pid is not None:
                    os.kill(each.process.pid, number)

    for name in _SIGNALS:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


# -- in the process -------------------------------------------------------------------------------------------------


def _serve(make: Make, worker: Worker, pipe: Connection) -> None:
    """Train members received through a pipe until it is closed."""
    _end_with_parent()
    torch.set_num_threads(worker.threads)
    if not logging.root.handlers:  # else warnings go to the handlers of the user's modules
        logging.getLogger("treadle").addHandler(_NamedWarnings())
    inbox = _Inbox(pipe)
    if worker.together > 1:
        run_in_turns(make, inbox, together=worker.together, steps=worker.steps)
        return
    with contextlib.suppress(KeyboardInterrupt):
        _train_each(make, inbox)


class _NamedWarnings(logging.StreamHandler[Any]):
    """Handler that shows warnings with the name of their member, as in a single process."""

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        name = "" if RUN_LOG.member is None else f"{RUN_LOG.member}: "
        return f"{record.levelname.lower()}: {name}{record.getMessage()}"


def _train_each(make: Make, inbox: _Inbox) -> None:
    workspaces = Workspaces()
    while (member := inbox.next()) is not None:
        RUN_LOG.name_member(member.name)
        try:
            outcome = run_member(make, member, workspaces=workspaces)
        except KeyboardInterrupt:
            outcome = Outcome("stopped", code=128 + signal.SIGINT)
        inbox.tell(member, outcome)


class _Inbox:
    """Source of members received through a pipe.

    Args:
        pipe: pipe that carries members and outcomes.
    """

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._running = 0

    def next(self) -> Member | None:
        """Wait for a member; with others running, return None if there is none."""
        try:
            if self._running and not self._pipe.poll():
                return None
            member: Member = self._pipe.recv()
        except (EOFError, OSError):
            return None
        self._running += 1
        return member

    def tell(self, member: Member, outcome: Outcome) -> None:
        """Send an outcome."""
        self._running -= 1
        with contextlib.suppress(OSError):
            self._pipe.send((member.name, outcome))


def _end_with_parent() -> None:
    """End this process when its parent has died, for whatever reason: no member outlives its population."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)

    threading.Thread(target=watch, name="treadle parent watch", daemon=True).start()


def visible_gpus() -> list[str]:
    """Return the GPUs of this machine, named as in ``CUDA_VISIBLE_DEVICES``.

    Example:
        >>> isinstance(visible_gpus(), list)
        True
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]
