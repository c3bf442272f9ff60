"""StuckRankHook: reports the rank that the others wait for, with its current operation and stack."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from treadle import distributed
from treadle.engine.hook import BaseHook, capturable, read_only
from treadle.errors import ConfigError
from treadle.errors.arguments import check_above, checked
from treadle.hooks.thread_activity import stack_of, thread_activity

if TYPE_CHECKING:
    from treadle.engine import Engine

_STARTING, _STEPPING, _UPDATING, _STEPPED, _EPOCH_OVER, _ENDING = range(-1, 5)
_PHASES = {
    _STARTING: "starting", _STEPPING: "forward and backward", _UPDATING: "optimizer step", _STEPPED: "between steps",
    _EPOCH_OVER: "between epochs", _ENDING: "ending",
}  # fmt: skip
_STORE_TIMEOUT = timedelta(seconds=10)


class StuckRankHook(BaseHook):
    """Watchdog that logs once which rank blocks a run that has made no progress for a while.

    A thread on every rank records what the rank is doing: its step, its last event, and its Python stack. The thread of
    rank 0 compares: a rank is stuck if it is behind and not waiting in a collective. That rank then logs its stack.
    Training itself only pays for an attribute set at events. In a single process, the hook logs what that process is
    doing. It does not end the run; a collective that exceeds the timeout of its process group does.

    Args:
        timeout: seconds without progress (a step, a micro-batch, a batch of an evaluation) on any rank, > 0. A save, or
            the compilation of the first step, may legitimately take long; the report is correct nevertheless.
        interval: seconds between checks; None: a twentieth of the timeout, at most 10 s.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> hook = StuckRankHook(timeout=120)
    """

    writes = True

    @checked
    def __init__(self, timeout: float = 300.0, interval: float | None = None):
        check_above(0, timeout=timeout)
        if interval is not None and not 0 < interval <= timeout:
            raise ConfigError(
                f"must be more than 0 and at most the timeout, {timeout:g} seconds", argument="interval", value=interval
            )
        self.timeout = float(timeout)
        self.interval = min(self.timeout / 20, 10.0) if interval is None else float(interval)
        self._event = _STARTING
        self._watch: _Watch | None = None

    def on_before_train(self, trainer: Engine) -> None:
        """Start watching."""
        self._event = _STARTING
        self._watch = _Watch(self, trainer, _Board.of_all_ranks(trainer))
        self._watch.start()

    def on_before_step(self, trainer: Engine) -> None:
        """Record the event."""
        self._event = _STEPPING

    @capturable
    @read_only
    def on_before_optimizer_step(self, trainer: Engine) -> None:
        """Record the event."""
        self._event = _UPDATING

    def on_after_step(self, trainer: Engine) -> None:
        """Record the event."""
        self._event = _STEPPED

    def on_after_epoch(self, trainer: Engine) -> None:
        """Record the event."""
        self._event = _EPOCH_OVER

    def on_after_train(self, trainer: Engine) -> None:
        """Record the event."""
        self._event = _ENDING

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Stop watching; on rank 0 the notes are kept for a last check by threads of other ranks."""
        if self._watch is not None:
            self._watch.stop()

    def place(self, trainer: Engine) -> tuple[int, ...]:
        """Return numbers that change when this rank advances; the first three order the ranks."""
        cursor, evaluated = trainer.cursor, trainer.eval_cursor
        return (
            trainer.step, self._event, trainer.micro_steps, cursor.epoch, cursor.position, evaluated.epoch,
            evaluated.position,
        )  # fmt: skip


@dataclass(frozen=True)
class Note:
    """State that a rank reports.

    Attributes:
        rank: the rank.
        host: its host name.
        pid: its process id.
        place: step, last event, micro-steps; a rank with a smaller place is behind.
        doing: description of its activity.
        waits: whether it is inside a collective.
        quiet: seconds since its last progress.
        beat: counter of notes, which reveals stopped processes.
    """

    rank: int
    host: str
    pid: int
    place: tuple[int, ...]
    doing: str
    waits: bool
    quiet: float
    beat: int

    @property
    def described(self) -> str:
        """Description of the rank."""
        step = self.place[0] + (self.place[1] in (_STARTING, _STEPPED, _EPOCH_OVER) and self.doing == "loading data")
        doing = self.doing or _PHASES[self.place[1]]
        return f"({self.host}, process {self.pid}) has been in step {step} ({doing}) for {self.quiet:.0f} s"


def stuck_ranks(notes: Sequence[Note], timeout: float) -> list[Note]:
    """Return the ranks that the others wait for; none while any rank advanced within the timeout.

    Ranks inside a collective are waiting; of the others, those that are behind are stuck. If all are waiting, those
    that are behind.
    """
    if min((note.quiet for note in notes), default=0.0) < timeout:
        return []
    suspects = [note for note in notes if not note.waits] or list(notes)
    behind = min(note.place for note in suspects)
    return [note for note in suspects if note.place == behind]


class _Board:
    """Board where ranks post their notes and read which ranks are stuck; local to a single process."""

    def __init__(self, store: Any, size: int):
        self._store = store
        self._keys = [f"note/{rank}" for rank in range(size)]
        self._own: dict[str, str] = {}

    @classmethod
    def of_all_ranks(cls, trainer: Engine) -> _Board:
        """Create the board; collective."""
        size = distributed.world_size()
        if size == 1:
            return cls(None, 1)
        make_store = dist.TCPStore  # type: ignore[attr-defined]
        host, store, port = _host(), None, None
        if distributed.rank() == 0:
            with contextlib.suppress(RuntimeError):
                store = make_store(host, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
                port = store.port
        port = distributed.gather_objects(port)[0]
        if distributed.rank() != 0 and port is not None:
            with contextlib.suppress(RuntimeError):
                store = make_store(host, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        if not all(distributed.gather_objects(store is not None)):
            if distributed.rank() == 0:
                trainer.logger.warning(
                    "StuckRankHook: the ranks cannot reach rank 0 at %s, so each one watches only itself", host
                )
            return cls(None, 1)
        return cls(store, size)

    @property
    def is_shared(self) -> bool:
        return self._store is not None

    def post(self, note: Note) -> None:
        self._put(self._keys[note.rank if self.is_shared else 0], json.dumps(asdict(note)))

    def notes(self) -> list[Note]:
        """Return the notes of all ranks; empty until every rank has posted one."""
        if self._store is None:
            texts = [self._own[key] for key in self._keys]
        else:
            texts = self._store.multi_get(self._keys) if self._store.check(self._keys) else []
        values = [json.loads(text) for text in texts]
        return [Note(**{**value, "place": tuple(value["place"])}) for value in values]

    def report_stuck(self, stuck: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        self._put("stuck", json.dumps(stuck))

    def reported_stuck(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the stuck ranks and their places."""
        text = self._get("stuck")
        return [] if text is None else [(rank, tuple(place)) for rank, place in json.loads(text)]

    def _put(self, key: str, text: str) -> None:
        if self._store is None:
            self._own[key] = text
        else:
            self._store.set(key, text)

    def _get(self, key: str) -> str | None:
        if self._store is None:
            return self._own.get(key)
        return self._store.get(key).decode() if self._store.check([key]) else None


def _host() -> str:
    """Return the address at which other ranks reach rank 0."""
    hosts = distributed.gather_objects(socket.gethostname())
    given = os.environ.get("MASTER_ADDR")
    return given or ("127.0.0.1" if len(set(hosts)) == 1 else str(hosts[0]))


class _Watch:
    """Watching thread of one rank."""

    def __init__(self, hook: StuckRankHook, trainer: Engine, board: _Board):
        self._hook, self._trainer, self._board = hook, trainer, board
        self._rank = distributed.rank()
        self._judges = self._rank == 0 or not board.is_shared
        self._trains = threading.get_ident()
        self._over = threading.Event()
        self._place, self._since, self._beat = hook.place(trainer), time.monotonic(), 0
        self._last_beats: dict[int, tuple[int, float]] = {}  # last beat of each rank, and when it changed
        self._blamed: list[tuple[int, tuple[int, ...]]] = []
        self._shown: tuple[int, ...] | None = None
        self._thread = threading.Thread(target=self._run, name="treadle-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        # If the ranks can no longer reach each other, the run is ending and reports the cause itself.
        with contextlib.suppress(RuntimeError):
            while not self._over.wait(self._hook.interval):
                self._poll()

    def _poll(self) -> None:
        place, now = self._hook.place(self._trainer), time.monotonic()
        if place != self._place:
            self._place, self._since = place, now
        self._beat += 1
        where = thread_activity(self._trains)
        quiet = now - self._since
        self._board.post(
            Note(self._rank, socket.gethostname(), os.getpid(), place[:3], where.doing, where.waits, quiet, self._beat)
        )
        if self._judges:
            self._check_progress(now)
        if (self._rank, place[:3]) in self._board.reported_stuck() and self._shown != place[:3]:
            self._shown = place[:3]
            self._trainer.logger.error(
                "rank %d is here:\n%s\nFor its other threads and native code: py-spy dump --pid %d",
                self._rank, stack_of(self._trains), os.getpid(),
            )  # fmt: skip

    def _check_progress(self, now: float) -> None:
        notes = [self._with_silent_ranks(note, now) for note in self._board.notes()]
        stuck = stuck_ranks(notes, self._hook.timeout)
        if not self._board.is_shared:
            stuck = [note for note in stuck if not note.waits]  # the awaited rank is unknown
        blamed = [(note.rank, note.place) for note in stuck]
        if blamed == self._blamed:
            return
        self._blamed = blamed
        self._board.report_stuck(blamed)
        others = len(notes) - len(stuck)
        for note in stuck:
            wait = "" if not others else "; the others wait for it" if len(stuck) == 1 else "; the others wait"
            self._trainer.logger.error("rank %d %s%s", note.rank, note.described, wait)

    def _with_silent_ranks(self, note: Note, now: float) -> Note:
        """Add the time since a rank last posted a note: its process may have been stopped."""
        beat, since = self._last_beats.get(note.rank, (-1, now))
        if beat != note.beat:
            self._last_beats[note.rank] = (note.beat, now)
            return note
        silence = now - since
        if silence < 3 * self._hook.interval:
            return note
        described = {
            **asdict(note),
            "quiet": note.quiet + silence,
            "doing": note.doing or "unknown",
            "waits": False,
        }
        return Note(**described)
