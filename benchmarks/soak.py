"""Random kills over all faces and both writers: every rerun must resume, and the end equal the undisturbed run.

    python benchmarks/soak.py --kills 1000 --jobs 16 --write   # minutes on 16 cores, a night on two
    python benchmarks/soak.py --minutes 3                      # what the slow test runs

Each run is a forked child that trains in its own folder, occasionally evaluating in a hook; with ranks, there is one
child per rank. It is killed at a random moment (SIGKILL; SIGTERM, also inside those evaluations; SIGTERM soon followed
by SIGKILL, as batch systems do; of ranks, one or all), or its disk is full from some call on or fails once; between two
starts the folder may be replaced by a copy without its links and with reversed write times. This continues until one
start reaches the end. The final state is then compared with that of an undisturbed run, tensors by torch.equal; no
temporary file may be left, and the folder may exceed the undisturbed one by no more than a few checkpoints. After every
start, the furthest state on disk must be no older than the last one reported as saved, and the next start must continue
from it.

A failing case is printed; `--faces NAME --first NUMBER --kills 1` repeats its choices.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from machine import describe, write_result

import treadle.engine.loop
from faces_kit import FACES, Face, end_of, furthest_step, litter_in, size_of
from fault_points import Points
from helpers import differences
from treadle.engine.state import RunState

ENDED, FAILED, FULL = 0, 1, 3
_LEFT = 128 + signal.SIGTERM
_GRACE = 15.0  # seconds for the other ranks once one has failed
# Times the undisturbed folder. Of two kept states there may be five files: also the one that the run resumed from, one
# that a kill came to before it was pruned, and one half written.
_ROOM = 3.5
_HANGS = 120.0  # seconds after which a start counts as hanging
_COUNTED = ("kills", "terms", "full", "copies", "runs")
_BAD = ("different", "unreadable", "older", "litter", "too large", "hung")
_MARK = ".soak"  # suffix of the soak's own files next to a run folder


# -- one start of a run -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Disk fault in one start: from call number ``at`` on nothing can be written, or only that call fails."""

    number: int
    at: int

    @contextlib.contextmanager
    def injected(self, folder: Path) -> Iterator[None]:
        points = _FullDisk(folder, self.at) if self.number == errno.ENOSPC else Points(folder, self.at, self.fail)
        with points.watching():
            yield

    def fail(self) -> None:
        raise OSError(self.number, os.strerror(self.number))


class _FullDisk(Points):
    """Disk that fails every call that needs space from some call on; existing files can be read, synced and removed."""

    def reach(self, call: str, path: Any) -> None:
        self.seen.append(call)
        if len(self.seen) >= self.at and call in ("mkdir", "replace", "rename", "link", "symlink", "open", "write"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def note_progress(notes: Path) -> None:
    """Append to a file the step from which each run continues, and each step that is reported as saved."""
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    begun: set[int] = set()
    real_attempt, real_saved = treadle.engine.loop.start_attempt, RunState.record_saved

    def start_attempt(engine: Any, group: Any) -> Any:
        if id(engine) not in begun:
            begun.add(id(engine))
            os.write(file, f"{json.dumps(['from', str(engine.workspace), engine.step - 1])}\n".encode())
        return real_attempt(engine, group)

    def record_saved(self: RunState, path: object, step: int) -> None:
        real_saved(self, path, step)
        os.write(file, f"{json.dumps(['saved', str(path), step])}\n".encode())

    treadle.engine.loop.start_attempt = start_attempt
    RunState.record_saved = record_saved  # type: ignore[method-assign]


def child(face: Face, folder: Path, rank: int, fault: Fault | None) -> int:
    """Train in this process; return its exit status."""
    try:
        if face.ranks > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}{_MARK}", rank=rank, world_size=face.ranks)
        if rank == 0:
            note_progress(Path(f"{folder}{_MARK}.notes"))
        with contextlib.nullcontext() if fault is None else fault.injected(folder):
            face(folder)
        if face.ranks > 1:
            dist.barrier()
            dist.destroy_process_group()
        return ENDED
    except SystemExit as left:
        return int(left.code or 0)
    except BaseException:  # noqa: BLE001  (a child reports by its status)
        Path(f"{folder}{_MARK}.error{rank}").write_text(traceback.format_exc())
        return FAILED if fault is None else FULL


@dataclass(frozen=True)
class Hit:
    """Signal to some ranks after ``after`` seconds, with SIGKILL ``patience`` seconds later if set."""

    after: float
    number: int = signal.SIGKILL
    patience: float | None = None
    ranks: Collection[int] | None = None

    def signals(self) -> list[tuple[float, int]]:
        kill = [] if self.patience is None else [(self.after + self.patience, int(signal.SIGKILL))]
        return [(self.after, self.number), *kill]


def start(face: Face, folder: Path, *, hit: Hit | None = None, fault: Fault | None = None) -> int | None:
    """Train in one child per rank.

    Returns:
        The exit status: 0 at the end, -9 or 143 when killed in time, 3 with a full disk; None if it hangs.
    """
    Path(f"{folder}{_MARK}").unlink(missing_ok=True)
    Path(f"{folder}{_MARK}.notes").unlink(missing_ok=True)
    sys.stdout.flush()
    children = {}
    for rank in range(face.ranks):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            os._exit(child(face, folder, rank, fault))
        children[pid] = rank
    began, waiting, ended, hangs = time.monotonic(), [] if hit is None else hit.signals(), {}, False
    deadline = began + _HANGS
    while len(ended) < face.ranks:
        for pid in [pid for pid in children if pid not in ended]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status)
                if ended[pid]:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        running = [(pid, rank) for pid, rank in children.items() if pid not in ended]
        while waiting and time.monotonic() > began + waiting[0][0]:
            number = waiting.pop(0)[1]
            for pid, rank in running:
                if hit is None or hit.ranks is None or rank in hit.ranks:
                    os.kill(pid, number)
        if running and time.monotonic() > deadline:  # as a launcher does
            hangs, deadline = not any(ended.values()), math.inf
            for pid, _ in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    # The outcomes of the others follow from that of one.
    ranking = [-signal.SIGKILL, -signal.SIGTERM, FULL, FAILED, _LEFT, ENDED]
    return None if hangs else min(ended.values(), key=lambda one: ranking.index(one) if one in ranking else -1)


def replace_by_copy(folder: Path) -> None:
    """Replace a folder by a copy without its links and with reversed write times."""
    copy = folder.with_name(f"{folder.name}.copy")
    shutil.copytree(folder, copy, symlinks=True)
    found = sorted(copy.rglob("*"), key=lambda path: path.lstat().st_mtime_ns, reverse=True)
    for number, path in enumerate(found):
        if path.is_symlink():
            path.unlink()
        else:
            os.utime(path, ns=(10**18 + number * 10**9,) * 2)
    shutil.rmtree(folder)
    copy.rename(folder)


# -- one run, disturbed until it ends -----------------------------------------------------------------------------


@dataclass
class Case:
    """Case of a soak: a run in its own folder that is disturbed until it ends.

    Attributes:
        counts: kills, terms, full disks, copies, runs.
        wrong: kind of failure -> description.
    """

    face: Face
    folder: Path
    chance: random.Random
    duration: float
    room: float
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    wrong: dict[str, list[str]] = field(default_factory=dict)
    furthest: dict[Path, int] = field(default_factory=dict)

    def run(self, expected: list[Any], until: float) -> None:
        """Start the run repeatedly; the last start, and those after ``until``, are not disturbed."""
        self.counts["runs"] += 1
        for attempt in range(12):
            left_alone = attempt == 11 or time.monotonic() > until
            status = start(self.face, self.folder, **({} if left_alone else self.disturbance()))
            self.look_at(status)
            if status == ENDED:
                break
            if self.folder.exists() and self.chance.random() < 0.2:
                replace_by_copy(self.folder)
                self.counts["copies"] += 1
        runs = self.face.runs_in(self.folder)
        found = [f"{len(expected)} runs and {len(runs)}"] if len(runs) != len(expected) else []
        for run, end in zip(runs, expected, strict=False):
            try:
                found += differences(end, end_of(run))
            except (AssertionError, OSError, RuntimeError) as error:
                found.append(f"{type(error).__name__}: {error}")
        self.note("different", found)
        self.note("litter", [str(path) for path in litter_in(self.folder)])

    def disturbance(self) -> dict[str, Any]:
        chance = self.chance
        fault = None
        if chance.random() < 0.25:
            fault = Fault(chance.choice([errno.ENOSPC, errno.ENOSPC, errno.EIO]), int(math.exp(chance.uniform(0, 8))))
        number = chance.choice([signal.SIGKILL, signal.SIGTERM])
        patience = chance.expovariate(20) if number == signal.SIGTERM and chance.random() < 0.5 else None
        ranks = None if chance.random() < 0.5 else [chance.randrange(self.face.ranks)]
        # Within the first half, so that most attempts are killed.
        return {"hit": Hit(chance.uniform(0, self.duration / 2), number, patience, ranks), "fault": fault}

    def look_at(self, status: int | None) -> None:
        """Count how a start ended, and compare the files on disk with its reports."""
        self.counts["kills"] += status in (-signal.SIGKILL, -signal.SIGTERM)
        self.counts["terms"] += status == _LEFT
        self.counts["full"] += status == FULL
        errors = sorted(self.folder.parent.glob(f"{self.folder.name}{_MARK}.error*"))
        if status not in (ENDED, FULL, _LEFT, -signal.SIGKILL, -signal.SIGTERM, None):
            self.note("unreadable", [f"status {status}", *(path.read_text() for path in errors)])
        for path in errors:
            path.unlink()
        self.note("hung", [] if status is not None else ["no end"])
        files = [path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        if (size := size_of(files)) > self.room:
            listed = ", ".join(f"{path.name} {path.stat().st_size}" for path in sorted(files))
            self.note("too large", [f"{size} bytes, at most {self.room:.0f}: {listed}"])
        notes = Path(f"{self.folder}{_MARK}.notes")
        lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
        before, self.furthest = self.furthest, {run: furthest_step(run) for run in self.face.runs_in(self.folder)}
        for run, step in self.furthest.items():
            mine = [line for line in lines if len(self.furthest) == 1 or Path(line[1]).is_relative_to(run)]
            begun = [at for kind, _, at in mine if kind == "from"]
            saved = max([before.get(run, 0), *(at for kind, _, at in mine if kind == "saved")])
            if begun and begun[0] < before.get(run, 0):
                self.note("older", [f"{run.name} went on from {begun[0]} where {before[run]} was saved"])
            if step < saved:
                self.note("older", [f"{run.name} has {step} where {saved} was saved"])

    def note(self, kind: str, found: list[str]) -> None:
        if found:
            self.wrong.setdefault(kind, []).extend(found)


# -- many, side by side -------------------------------------------------------------------------------------------


class Soak:
    """Cases of many faces in parallel processes, which pick the face with the fewest kills next."""

    def __init__(self, names: list[str], root: Path, *, kills: int, until: float, seed: int, first: int):
        self.names, self.root, self.kills, self.until, self.seed = names, root, kills, until, seed
        fork = multiprocessing.get_context("fork")
        self.lock = fork.Lock()
        self.done = fork.Array("q", len(names), lock=False)  # kills and signals
        self.running = fork.Array("q", len(names), lock=False)
        self.next = fork.Array("q", [first] * len(names), lock=False)
        self.ends: dict[str, tuple[list[Any], float, float]] = {}

    def straight(self, job: int) -> None:
        """Train each face undisturbed."""
        while (number := self._take(self.next, len(self.names))) is not None:
            name = self.names[number]
            folder = self.root / name / "straight"
            folder.parent.mkdir()
            began = time.perf_counter()
            status = start(FACES[name], folder)
            (self.root / name / "duration").write_text(json.dumps([status, time.perf_counter() - began]))

    def _take(self, counter: Any, most: int) -> int | None:
        with self.lock:
            counter[0] += 1
            return counter[0] - 1 if counter[0] <= most else None

    def disturbed(self, job: int) -> None:
        """Run cases until there are enough kills, or no time is left."""
        with open(self.root / f"rows{job}.jsonl", "w") as rows:
            while True:
                with self.lock:
                    if sum(self.done) >= self.kills or time.monotonic() > self.until:
                        return
                    at = min(range(len(self.names)), key=lambda one: self.done[one] + 6 * self.running[one])
                    number, self.next[at], self.running[at] = self.next[at], self.next[at] + 1, self.running[at] + 1
                row = self.case(self.names[at], number)
                rows.write(f"{json.dumps(row)}\n")
                rows.flush()
                with self.lock:
                    self.done[at] += row["kills"] + row["terms"]
                    self.running[at] -= 1

    def case(self, name: str, number: int) -> dict[str, Any]:
        face, folder = FACES[name], self.root / name / f"run{number}"
        expected, duration, size = self._end(name)
        case = Case(face, folder, random.Random(f"{self.seed} {name} {number}"), duration, _ROOM * size)
        case.run(expected, self.until)
        if not case.wrong:
            shutil.rmtree(folder)
        return {"face": name, "number": number, **case.counts, "wrong": case.wrong}

    def _end(self, name: str) -> tuple[list[Any], float, float]:
        if name not in self.ends:
            face, straight = FACES[name], self.root / name / "straight"
            _, duration = json.loads((self.root / name / "duration").read_text())
            size = size_of(straight.rglob("*"))
            self.ends[name] = [end_of(run) for run in face.runs_in(straight)], duration, size
        return self.ends[name]

    def rows(self) -> list[dict[str, Any]]:
        """Return the cases that have ended."""
        return [json.loads(line) for path in self.root.glob("rows*.jsonl") for line in path.read_text().splitlines()]


def side_by_side(jobs: int, work: Callable[[int], None], *, until: float, meanwhile: Callable[[], None]) -> bool:
    """Run work in forked processes, killing those that take longer; return whether all finished."""
    running = set()
    for job in range(jobs):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                work(job)
                os._exit(0)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
                os._exit(1)
        running.add(pid)
    whole = True
    try:
        while running and time.monotonic() < until:
            for pid in list(running):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    running.remove(pid)
                    whole &= status == 0
            meanwhile()
            time.sleep(0.05)
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return whole and not running


def table(names: list[str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each face, and their sum."""
    made = []
    for name in names:
        mine = [row for row in rows if row["face"] == name]
        counts = {key: sum(row[key] for row in mine) for key in _COUNTED}
        made.append({"face": name, **counts, **{key: sum(key in row["wrong"] for row in mine) for key in _BAD}})
    return [*made, {"face": "all", **{key: sum(row[key] for row in made) for key in (*_COUNTED, *_BAD)}}]


def report(rows: list[dict[str, Any]], seed: int) -> None:
    """Print each failed case once."""
    for row in rows:
        if row["wrong"]:
            print(f"FAILED: --seed {seed} --faces {row['face']!r} --first {row['number']}", flush=True)
            for kind, found in row["wrong"].items():
                print(f"  {kind}:", *found[:5], sep="\n    ", flush=True)


def warm_up(names: list[str], root: Path) -> None:
    """Train the single-process faces here, so that no child has to import anything."""
    for name in names:
        if FACES[name].ranks == 1:
            FACES[name](root / "warm" / name, 1)
    if any(FACES[name].ranks > 1 for name in names):
        import torch.distributed.checkpoint
        import torch.distributed.fsdp  # noqa: F401


def leave(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, help="cases side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each face")
    parser.add_argument("--faces", nargs="*", default=[*FACES], choices=[*FACES])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/soak.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # before any work: OpenMP threads do not survive a fork
    signal.signal(signal.SIGTERM, leave)
    began, columns = time.monotonic(), ["face", *_COUNTED, *_BAD]
    end = began + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        settings = {"kills": arguments.kills, "until": end, "seed": arguments.seed, "first": arguments.first}
        warm_up(arguments.faces, Path(root))
        straight = Soak(arguments.faces, Path(root), **{**settings, "first": 0})
        print(f"{time.monotonic() - began:.0f} s: warm", flush=True)
        assert side_by_side(arguments.jobs, straight.straight, until=math.inf, meanwhile=lambda: None)
        bad = [name for name in arguments.faces if json.loads((Path(root) / name / "duration").read_text())[0] != ENDED]
        assert not bad, bad
        print(f"{time.monotonic() - began:.0f} s: undisturbed runs are made", flush=True)
        soak, shown = Soak(arguments.faces, Path(root), **settings), time.monotonic()

        def meanwhile() -> None:
            nonlocal shown
            if time.monotonic() > shown + 30:
                shown, rows = time.monotonic(), soak.rows()
                print(f"{shown - began:.0f} s:", table(arguments.faces, rows)[-1], flush=True)
                if arguments.write:
                    write_result("soak", _TITLE, columns, table(arguments.faces, rows), describe(), partial=True)

        whole = False
        with contextlib.suppress(KeyboardInterrupt):
            whole = side_by_side(arguments.jobs, soak.disturbed, until=end + 45, meanwhile=meanwhile)
        rows = soak.rows()
    report(rows, arguments.seed)
    found = table(arguments.faces, rows)
    if arguments.write:
        took = f"{(time.monotonic() - began) / 60:.1f} minutes, {arguments.jobs} side by side, seed {arguments.seed}."
        write_result("soak", _TITLE, columns, found, describe(), notes=[took], partial=not whole)
    print(*found, sep="\n", flush=True)
    return 0 if whole and not any(found[-1][name] for name in _BAD) else 1


_TITLE = "Random kills over the faces"

if __name__ == "__main__":
    sys.exit(main())
