"""Population: concurrent runs, each bitwise equal to the run alone."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from treadle.checkpoint.lock import run_lock
from treadle.checkpoint.store import write_text
from treadle.data.sharing import shared_tensors
from treadle.engine.run_log import RUN_LOG
from treadle.errors import ConfigError, TreadleError, number_of
from treadle.errors.arguments import check_whole
from treadle.hooks.files import to_json
from treadle.population.member import Make, Member, Outcome, member_name
from treadle.population.memory import Admission
from treadle.population.pool import Worker, check_picklable, run_in_processes, visible_gpus
from treadle.population.results import Results, Row, read_rows
from treadle.population.search import InOrder, StudySource, SuccessiveHalving
from treadle.population.sweeps import with_seeds
from treadle.population.turns import MAX_STREAMS, Source, restored_log_levels, run_in_turns

_log = logging.getLogger("treadle.population")
FILE = "population.json"


class Population:
    """Population of runs: each an ordinary run in its own folder, with the same weights and files as when run alone.

    The runs of one process take turns. On a GPU each has a stream, so that small runs share the device; on the CPU this
    is as fast as one after another, and ``workers`` processes with a core each are faster. Repeating the call resumes
    every member from its own checkpoint. A failing member is reported and does not affect the others.

    Args:
        make: returns a trainer whose ``train()`` takes no argument, or a function that trains. Called with the settings
            of a member by name, and with ``workspace=`` (the folder of the member) if it accepts it. A setting ``seed``
            seeds all random generators before the call.
        settings: one mapping per member; see :func:`grid` and :func:`draws`.
        seeds: seeds with which each mapping is run, as its setting ``seed``.
        out: folder of the population; members' folders in it are named by their settings.
        workers: number of processes; 0 trains all in this one. With processes, ``make`` must be importable, and a
            script must use ``if __name__ == "__main__"``.
        together: concurrent members per process. None: as many as fit into GPU memory, estimated from the first one, up
            to 32; on the CPU all in this process, or one in each of several.
        turn: steps per turn of a member.
        threads: torch threads in each of ``workers`` processes on the CPU.
        gpus: GPUs over which ``workers`` are distributed, named as in ``CUDA_VISIBLE_DEVICES``; None for all; not used
            without workers.
        halving: stops members early; see :class:`SuccessiveHalving`.
        progress: False shows nothing.

    Attributes:
        members: members in order.

    Raises:
        ConfigError: there are no members, two have the same name, or a number is outside its range.

    Example:
        >>> def make(seed, workspace):
        ...     return lambda: {"loss": seed / 10}
        >>> import tempfile
        >>> population = Population(make, seeds=range(3), out=tempfile.mkdtemp(), progress=False)
        >>> str(population.run().summary("loss"))
        '0.1 ± 0.1 (3)'
    """

    def __init__(
        self,
        make: Make,
        settings: Sequence[Mapping[str, Any]] = (),
        *,
        seeds: Iterable[int] | None = None,
        out: str | Path,
        workers: int = 0,
        together: int | None = None,
        turn: int = 16,
        threads: int = 1,
        gpus: Sequence[str] | None = None,
        halving: SuccessiveHalving | None = None,
        progress: bool = True,
    ):
        if not callable(make):
            raise ConfigError("must be a function that returns a trainer", argument="make", value=make)
        check_whole(0, workers=workers)
        check_whole(1, turn=turn, threads=threads)
        if together is not None and not (isinstance(together, int) and 1 <= together <= MAX_STREAMS):
            raise ConfigError(f"must be from 1 to {MAX_STREAMS}, or None", argument="together", value=together)
        if isinstance(settings, (str, Mapping)):
            raise ConfigError(
                "must be a list with a dict for each member, such as [{'lr': 0.1}, {'lr': 0.01}]",
                argument="settings", value=settings,
            )  # fmt: skip
        if gpus is not None and not workers:
            raise ConfigError("applies only to worker processes; pass workers= too", argument="gpus", value=gpus)
        if workers:
            check_picklable(make)
        self.out = Path(out).absolute()
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError("is a file; give a folder", argument="out", value=str(out))
        self.members = [self._place(each) for each in with_seeds(settings, seeds)]
        self._make = make
        self._workers = _workers(workers, gpus, together=together, turn=turn, threads=threads) if workers else []
        self._together, self._turn = together, turn
        self._halving = halving
        self._progress = progress
        self._rows: dict[str, Row] = {}
        self._study: Callable[[], Source] | None = None
        names = [member.name for member in self.members]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"two members are {twice}; give each member different settings", argument="settings")

    def _place(self, settings: Mapping[str, Any]) -> Member:
        name = member_name(settings)
        return Member(name, dict(settings), self.out / name)

    @classmethod
    def of_study(
        cls,
        make: Make,
        study: Any,
        space: Callable[[Any], Mapping[str, Any]],
        *,
        trials: int,
        metric: str,
        out: str | Path,
        **options: Any,
    ) -> Population:
        """Return a population whose settings come from an Optuna study.

        Args:
            make: as for :class:`Population`.
            study: a new study with one direction, whose sampler has a seed.
            space: returns the settings of a trial, such as ``lambda trial: {"lr": trial.suggest_float("lr", 0, 1)}``.
            trials: total number of runs, >= 1.
            metric: name of the number in ``Outcome.metrics`` to report to the study.
            out: folder of the population; a rerun with a new study of the same seed resumes in it.
            options: further arguments of :class:`Population`.

        Raises:
            ConfigError: ``trials`` is below 1.
        """
        check_whole(1, trials=trials)
        population = cls(make, out=out, **options)
        population._study = lambda: StudySource(
            study, space, trials=trials, metric=metric, folder=population.out, place=population._place,
            record=population._record,
        )  # fmt: skip
        return population

    def run(self) -> Results:
        """Train every member to its end, and return the results.

        Returns:
            One row per member, including failed ones.

        Raises:
            TreadleError: every member failed.
            SystemExit: a signal ended the runs after saving; the same call resumes.
            CheckpointError: another process is training this population.
        """
        if not self.members and self._study is None:
            raise ConfigError("there are no members; give settings= or seeds=", argument="settings")
        with RUN_LOG.scope(_log, wanted=self._progress), run_lock(self.out):
            self._rows = {row.name: row for row in read_rows(self.out / FILE)}
            source = self._source()
            _log.info("%s in %s", number_of(len(self.members), "member"), self.out, extra={"topic": "start block"})
            received = self._train(source)
            results = self.results()
            results.to_csv(self.out / "population.csv")
            for line in results.lines() if self._progress else ():
                _log.info("%s", line)
        if received is not None:
            raise SystemExit(128 + received)
        failed = [row for row in results.rows if row.status == "failed"]
        if failed and len(failed) == len(results.rows):
            raise TreadleError(f"every member failed; {failed[0].name}: {failed[0].error}")
        return results

    def results(self) -> Results:
        """Return the results of the members that have ended so far."""
        order = {member.name: number for number, member in enumerate(self.members)}
        return Results(sorted(self._rows.values(), key=lambda row: order.get(row.name, len(order))))

    def _source(self) -> Source:
        if self._study is not None:
            return self._study()
        if self._halving is not None:
            return self._halving.source(self.members, self.out, record=self._record)
        return InOrder(self.members, record=self._record)

    def _train(self, source: Source) -> int | None:
        if self._workers:
            return run_in_processes(self._make, source, self._workers)
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("a population trains in the main thread, which serves signals", argument="run")
        admission = Admission(asked=self._together)
        with restored_log_levels(), shared_tensors():
            together = self._together or MAX_STREAMS
            return run_in_turns(self._make, source, together=together, steps=self._turn, admit=admission)

    def _record(self, member: Member, outcome: Outcome) -> None:
        """Record an outcome and write it to file."""
        before = self._rows.get(member.name)
        metrics = dict(outcome.metrics)
        if before is not None and before.step == outcome.step:  # nothing left to do, so not all was logged again
            metrics = {**before.metrics, **metrics}
        row = Row(
            member.name, dict(member.settings), outcome.status, outcome.step, outcome.epoch, metrics,
            (0.0 if before is None else before.seconds) + outcome.seconds, outcome.error,
        )  # fmt: skip
        self._rows[member.name] = row
        rows = [each.as_values() for each in self.results().rows]
        write_text(json.dumps({"members": to_json(rows)}, indent=1) + "\n", self.out / FILE)
        level = logging.WARNING if outcome.status == "failed" else logging.INFO
        _log.log(level, "%s", row.line())


def _workers(count: int, gpus: Sequence[str] | None, *, together: int | None, turn: int, threads: int) -> list[Worker]:
    """Return the processes of a population, distributed over the GPUs."""
    names = list(gpus) if gpus is not None else (visible_gpus() if torch.cuda.is_available() else [])
    cores = os.cpu_count() or 1
    if count * threads > cores:
        _log.warning(
            "workers=%d with %d threads each share %d cores, so they slow each other down", count, threads, cores
        )
    return [
        Worker(threads, names[number % len(names)] if names else None, together or 1, turn) for number in range(count)
    ]
