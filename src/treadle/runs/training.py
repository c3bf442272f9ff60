"""Training of a pack in a run folder: from the check of the folder to the last file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from treadle.checkpoint.lock import check_free
from treadle.checkpoint.store import write_text
from treadle.hooks.files import to_json
from treadle.requirements import own_version
from treadle.runs import folder as folders
from treadle.runs.ranks import after_ranks, by_rank_0, parallel_of, ranks_line
from treadle.runs.report import Report, write_page
from treadle.runs.run import Run, Watch
from treadle.runs.settings import changes, leaves
from treadle.runs.start_block import cpu_threads, device_line, print_block

if TYPE_CHECKING:
    from treadle.runs.pack import Pack

Config = TypeVar("Config")
Data = TypeVar("Data")
Trainer = TypeVar("Trainer")
Show = Callable[[Report, Path], None]

_log = logging.getLogger("treadle.cli")


class TrainingRun(Generic[Config, Data, Trainer]):
    """Training run of a pack, which resumes, writes the run folder and is evaluated at its end.

    Args:
        pack: the pack.
        run: settings, folder and device of the run.
    """

    def __init__(self, pack: Pack[Config, Data, Trainer], run: Run[Config]):
        self._pack = pack
        self._run = run
        self._values = pack.values(run.config)
        self._move_aside: Callable[[], None] = lambda: None  # on rank 0, set by the check of the folder

    def execute(self, show: Show) -> dict[str, Any] | None:
        """Train and evaluate, unless the run is finished; show the results.

        Returns:
            The content of ``metrics.json``; None on ranks other than the first, and for a paused run.
        """
        pack, run = self._pack, self._run
        out = run.out.absolute()  # training may change the working directory
        finished = by_rank_0(self._finished)
        metrics = finished
        if finished is None:
            with environment_of(pack, run.config):
                metrics = self._train(dataclasses.replace(run, parallel=parallel_of(pack.parallel(run.config))), out)
        if metrics is not None:
            show(pack.report(metrics, out), run.out)
        return metrics

    def _train(self, run: Run[Config], out: Path) -> dict[str, Any] | None:
        pack = self._pack
        resumes = by_rank_0(self._check_folder)
        run = dataclasses.replace(run, home=run.out if resumes else None)
        data = pack.prepare(run)
        by_rank_0(lambda: pack.refuse_other_data(run, data))
        trainer = pack.build(run, data)
        by_rank_0(lambda: self._prepare_folder(data))
        weights = "" if run.weights is None else f", with the weights of {run.weights}"
        start = pack.resume(run, trainer) if resumes else f"fresh{weights}"
        with pack.held(run):
            decided = pack.describe(run, data, trainer)
            ranks = ranks_line(pack.parallel(run.config))
            device = device_line(run.device, explicit=run.explicit)
            print_block({"device": device, **decided, **ranks, "start": start}, run.messages)
            pack.fit_logged(run, data, trainer)
            if run.paused():
                return None
            alone = dataclasses.replace(run, parallel=None, out=out, home=out, resume=True, watch=Watch())
            trained = after_ranks(trainer, lambda: self._rebuild(alone, data))
            return None if trained is None else self._evaluate(alone, data, trained, decided)

    def _rebuild(self, run: Run[Config], data: Data) -> Trainer:
        """Return, in one process, the trainer of a run that finished on several ranks."""
        trainer = self._pack.build(run, data)
        self._pack.resume(run, trainer)
        self._pack.fit(run, data, trainer)
        return trainer

    def _evaluate(self, run: Run[Config], data: Data, trainer: Trainer, decided: dict[str, str]) -> dict[str, Any]:
        """Write the results, the page, and ``metrics.json``, the last file of a run."""
        pack = self._pack
        if not (run.out / folders.RUN_FILE).exists():
            _log.warning("%s was removed during the run; its settings are written again, its logs are lost", run.out)
            self._write_settings(run, data)
        results = pack.finish(run, data, trainer)
        values = {"device": str(run.device), **pack.identity(data), "config": self._values}
        metrics: dict[str, Any] = to_json({"treadle": own_version(), **results.metrics, **values})
        facts = {**decided, "all settings": f"{folders.RUN_FILE} in the run folder", "treadle": metrics["treadle"]}
        report = pack.report(metrics, run.out)
        if report.title:
            write_page(run.out / "page.html", dataclasses.replace(report, pictures=results.pictures, facts=facts))
        # If this file exists and has these settings, nothing is left to do.
        write_text(json.dumps(metrics, indent=2, allow_nan=False) + "\n", run.out / "metrics.json")
        return metrics

    # -- the run folder ---------------------------------------------------------------------------------------------

    def _finished(self) -> dict[str, Any] | None:
        with folders.readable(self._run.out):
            if self._run.resume:
                return folders.finished_metrics(self._run.out, self._values, needed=self._pack.needed)
        return None

    def _check_folder(self) -> bool:
        """Return whether the folder's run resumes; warn of changes, plan which files move aside, and write nothing."""
        pack, run, out = self._pack, self._run, self._run.out
        folders.refuse_unwritable(out)
        folders.refuse_other_run(out, pack.name)
        for place in (out, out / "checkpoints"):
            check_free(place)  # before run.json is written, since another process may be training this run
        with folders.readable(out):
            record = folders.read_record(out)
            states = out / "checkpoints"
            begun = states.is_dir() and any(not name.startswith(".") for name in os.listdir(states))
        if not (run.resume and begun):
            self._move_aside = partial(folders.set_run_aside, out, parts=(*pack.made, *pack.results))
            return False
        differences = {} if record is None else changes(record.config, self._values)
        for sentence in folders.describe_changes(differences, str(out), free=pack.free):
            _log.warning("%s", sentence)
        outdated = () if record is None else pack.outdated(run, differences)
        self._move_aside = partial(self._set_results_aside, outdated, changed=bool(differences))
        return True

    def _set_results_aside(self, outdated: Sequence[str], *, changed: bool) -> None:
        out = self._run.out
        if changed:
            folders.set_results_aside(out, (*self._pack.results, "page.html", "pictures"))
        for name in outdated:
            folders.set_aside(out / name)

    def _prepare_folder(self, data: Data) -> None:
        """Write the settings, and move leftovers of an earlier run aside."""
        run = self._run
        with folders.writable(run.out):
            run.out.mkdir(parents=True, exist_ok=True)
            # Otherwise a killed fresh start would be taken for the earlier finished run.
            self._move_aside()
            self._write_settings(run, data)

    def _write_settings(self, run: Run[Config], data: Data) -> None:
        record = {"face": self._pack.name, "config": self._values, **self._pack.identity(data)}
        folders.write_record(run.out, record)
        self._pack.keep(run, data)


@contextlib.contextmanager
def environment_of(pack: Pack[Config, Any, Any], config: Config, threads: int | None = None) -> Iterator[None]:
    """Apply the process-wide settings of a run inside the block.

    Args:
        pack: the pack.
        config: settings of the run.
        threads: torch's threads; None takes those of the settings.
    """
    with cpu_threads(threads_of(config) if threads is None else threads), pack.environment(config):
        yield


def threads_of(config: Any) -> int | None:
    """Return the setting ``threads``, or None."""
    return next((value for key, value in leaves(config) if key == "threads"), None)
