"""Base class of packs: a kind of training with its own data, settings and report, which can run, resume and replay."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from treadle.checkpoint.store import load_weights
from treadle.config.sections import with_nested
from treadle.device import get_device
from treadle.distributed.state_names import load_model_state
from treadle.engine.evaluation import for_each_batch
from treadle.engine.outputs import joined, outputs_on_cpu
from treadle.errors import ConfigError, number_of
from treadle.faces.step import BaseTrainer
from treadle.runs import folder as folders
from treadle.runs.ranks import device_of_rank
from treadle.runs.replay import Replayed, replay_run
from treadle.runs.report import Report, Table
from treadle.runs.results import Evaluation, Opened, Predictions, Results
from treadle.runs.run import Run, Watch, load_newest, newest_checkpoint
from treadle.runs.setting_names import settings_named
from treadle.runs.settings import apply_overrides, changes, leaves, refuse_idle, without
from treadle.runs.start_block import without_epoch_lines
from treadle.runs.training import Show, TrainingRun, environment_of, threads_of

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Evaluation", "Opened", "Pack", "Predictions", "Results", "Run", "Show", "Watch", "load_newest",
    "newest_checkpoint", "predicted_arrays",
]  # fmt: skip

Config = TypeVar("Config")
Data = TypeVar("Data")
Trainer = TypeVar("Trainer")

_log = logging.getLogger("treadle.cli")


class Pack(Generic[Config, Data, Trainer]):
    """Pack: one kind of training, with its data, trainer and results.

    A subclass sets :attr:`name` and :attr:`config`, and overrides :meth:`prepare`, :meth:`build`, :meth:`fit` and
    :meth:`finish`; everything else has a default. It is found by an entry point in ``treadle.packs``, whose name is the
    command: ``treadle train NAME``.

    Attributes:
        name: the name of the command, also written to ``run.json``.
        summary: one line for the list of commands.
        help: the help of the command.
        config: the dataclass of the settings; sections are dataclasses too. A field ``threads`` sets torch's threads.
        example: example settings for the help.
        flags: fields that are not settings of the command -> what to use instead.
        free: settings that a run may change on resuming.
        needed: files that a finished run must have besides ``metrics.json``.
        made: folders and files by which a fresh start detects an earlier training.
        results: files written at the end of a run, moved aside when it continues with other settings.
        parts: folders inside a run with its further trainings.
        splits: the splits that can be evaluated.
        takes: supported options of ``treadle predict``.
        without: why the others are not supported.
        loads_in_processes: whether evaluations support ``--num-workers``.
        afterwards: what follows the training, for the log.
        warm: modules that a process may import once for many runs.

    Example:
        >>> class Waves(Pack):
        ...     name = "waves"
        >>> Waves().default_split("")
        'test'
    """

    name: str
    summary: str = ""
    help: str = ""
    config: type[Config]
    example: str = "epochs=3"
    flags: Mapping[str, str] = {}
    free: Collection[str] = ()
    needed: Sequence[str] = ()
    made: Sequence[str] = ("checkpoints",)
    results: Sequence[str] = ("metrics.json",)
    parts: Sequence[str] = ()
    splits: Sequence[str] = folders.SPLITS
    takes: Collection[str] = ("split", "batch_size")
    without: str = "generates no text"
    loads_in_processes: bool = False
    afterwards: str = "the test"
    warm: Sequence[str] = ()

    # -- settings -------------------------------------------------------------------------------------------------

    def defaults(self, device: torch.device) -> Config:
        """Return the default settings for a device."""
        return self.config()

    def read_settings(self, settings: Sequence[str], device: str | None = None) -> Config:
        """Return the defaults for a device with strings ``key=value`` applied.

        Raises:
            ConfigError: a key is unknown, a value is invalid, or a setting has no effect besides the others.
        """
        config = apply_overrides(self.defaults(get_device(device)), settings, elsewhere=self.flags)
        refuse_idle(settings, self.values(config), self.idle(config))
        return config

    def idle(self, config: Config) -> Iterable[tuple[str, str]]:
        """Yield the settings or sections that nothing reads because of another setting, with the reason."""
        return ()

    def values(self, config: Config) -> dict[str, Any]:
        """Return settings as nested plain values, without :attr:`flags`."""
        return without(config, self.flags)

    def from_values(self, values: Mapping[str, Any]) -> Config:
        """Return settings from nested plain values, as stored in a run folder."""
        return with_nested(self.config(), values)

    def shown(self, config: Config) -> Iterable[tuple[str, Any]]:
        """Yield every setting as a dotted key with its value."""
        return ((key, value) for key, value in leaves(config) if key not in self.flags)

    def parallel(self, config: Config) -> str | None:
        """Return the setting that spreads the model over ranks."""
        return None

    # -- a run, by subclasses ---------------------------------------------------------------------------------------

    def prepare(self, run: Run[Config]) -> Data:
        """Return the data; a resumed run reads fitted parts, such as tokenizers, from ``run.home``."""
        raise NotImplementedError

    def build(self, run: Run[Config], data: Data) -> Trainer:
        """Seed, and return a new trainer with ``run.hooks()`` that writes to ``run.folder``."""
        raise NotImplementedError

    def fit(self, run: Run[Config], data: Data, trainer: Trainer) -> None:
        """Train to the end; do nothing if the run is already at its end."""
        raise NotImplementedError

    def finish(self, run: Run[Config], data: Data, trainer: Trainer) -> Results:
        """Test the trained model, plot, and write all other results; in one process, after all ranks trained."""
        raise NotImplementedError

    def resume(self, run: Run[Config], trainer: Trainer) -> str:
        """Load the newest checkpoint, unless :meth:`fit` does; return where the run starts, for the start block."""
        return newest_checkpoint(run.out, ("", *self.parts))

    def describe(self, run: Run[Config], data: Data, trainer: Trainer) -> dict[str, str]:
        """Return the decisions, as name -> description, for the start block and the page."""
        return {}

    def identity(self, data: Data) -> dict[str, Any]:
        """Return plain values that identify the data, which a resumed run must share; stored in ``run.json``."""
        return {}

    def refuse_other_data(self, run: Run[Config], data: Data) -> None:
        """Raise if the data of a run that is resumed, replayed or evaluated has changed since the run started.

        Raises:
            ConfigError: a value of :meth:`identity` differs from that in ``run.json``.
        """
        record = None if run.home is None else folders.read_record(run.home)
        before, now = {} if record is None else record.identity, self.identity(data)
        changed = [key for key in now if key in before and before[key] != now[key]]
        if changed:
            fix = ", give another folder with --out, or --no-resume to start over in this one" if run.trains else ""
            raise ConfigError(
                f"the data of the run in {run.home} has changed since the run started: {', '.join(changed)} differs "
                f"from that in {folders.RUN_FILE}. Restore the data and the versions of the packages that make it{fix}"
            )

    def keep(self, run: Run[Config], data: Data) -> None:
        """Write whatever a later process needs besides the settings, such as fitted tokenizers, into ``run.out``."""
        text = json.dumps({"face": self.name, **self.values(run.config), **self.identity(data)}, indent=2) + "\n"
        folders.write_changed(text, run.out / "config.json")

    def outdated(self, run: Run[Config], differences: Mapping[str, tuple[Any, Any]]) -> Sequence[str]:
        """Return the names of files that a resumed run must move aside because its settings changed.

        Raises:
            ConfigError: it cannot resume with these settings.
        """
        return ()

    def environment(self, config: Config) -> contextlib.AbstractContextManager[None]:
        """Make errors name the settings, and apply process-wide settings while a run is built and trained."""
        return settings_named(dict(leaves(config)))

    def held(self, run: Run[Config]) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of the run folder longer than the trainer does."""
        return contextlib.nullcontext()

    def report(self, metrics: Mapping[str, Any], out: Path) -> Report:
        """Return the results as plain data.

        Args:
            metrics: the content of ``metrics.json``.
            out: the run folder.
        """
        numbers = {key: value for key, value in metrics.items() if isinstance(value, float | int)}
        rows = [[key, f"{value:,}" if isinstance(value, int) else f"{value:.6g}"] for key, value in numbers.items()]
        table = Table(["", "value"], rows, width=24, about_first=False)
        names = sorted(path.name + "/" * path.is_dir() for path in out.glob("[!.]*"))
        return Report(f"A run of {self.name}", tables=[table], files=[f"  {'  '.join(names)}"])

    # -- stored runs, by subclasses ---------------------------------------------------------------------------------

    def default_split(self, part: str) -> str:
        """Return the split of a run's own report."""
        return "test"

    def stored(self, home: Path, path: Path | None, tree: Mapping[str, Any] | None) -> tuple[Config, int | None]:
        """Return the settings of a run and its number of threads.

        Args:
            home: its folder, which is only read.
            path: the checkpoint, or None.
            tree: the content of the checkpoint.

        Raises:
            ConfigError: there are no settings, or they are from another version.
        """
        record = folders.read_record(home)
        if not home.is_dir():
            raise ConfigError("no such folder; give the folder of a run", argument="RUN", value=str(home))
        name = folders.RUN_FILE if record is None else record.file
        try:
            if record is None:
                raise ValueError("it holds no settings of a run")
            config = self.from_values(record.config)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{name} cannot be used ({type(error).__name__}: {error}); give the folder of a run "
                "of 'treadle train', or your own script with --script",
                argument="RUN",
                value=str(home),
            ) from error
        return config, threads_of(config)

    def load(self, run: Run[Config], trainer: Trainer, path: Path, tree: Mapping[str, Any]) -> None:
        """Load the scored weights of a checkpoint into a new trainer's model."""
        model: Any = trainer
        if isinstance(trainer, BaseTrainer):
            trainer.workspace = None
            trainer.prepare()
        load_model_state(model.unwrapped_model if isinstance(trainer, BaseTrainer) else model.model, load_weights(path))

    def loader(self, run: Run[Config], data: Data, split: str, *, batch_size: int | None, num_workers: int) -> Any:
        """Return the batches of a split in order, for the default :meth:`evaluate` and :meth:`predict`."""
        raise ConfigError(f"the pack {self.name!r} has no loader(): its runs cannot be evaluated")

    def evaluate(
        self, opened: Opened[Config, Data, Trainer], split: str, *, batch_size: int | None, num_workers: int
    ) -> Evaluation:
        """Return the metrics of a split; by default those of the trainer's ``evaluate``."""
        trainer: Any = opened.trainer
        batches = self.loader(opened.run, opened.data, split, batch_size=batch_size, num_workers=num_workers)
        return Evaluation(trainer.evaluate(batches))

    def predict(
        self, opened: Opened[Config, Data, Trainer], split: str, *, batch_size: int | None, **options: Any
    ) -> Predictions:
        """Return arrays by name; by default the concatenated outputs of the trainer's ``predict_step(batch)``."""
        trainer: Any = opened.trainer
        if not hasattr(trainer, "predict_step"):
            raise ConfigError(f"{type(trainer).__name__}: has no predict_step(); add it to the trainer")
        batches = self.loader(opened.run, opened.data, split, batch_size=batch_size, num_workers=0)
        return Predictions(predicted_arrays(trainer, batches))

    def predict_smiles(
        self,
        stored: Sequence[tuple[Path, Mapping[str, Any]]],
        file: Path,
        *,
        column: str | None,
        batch_size: int | None,
        device: str | None,
    ) -> Predictions:
        """Return predictions for the molecules in a file, from one run or an ensemble of runs.

        Args:
            stored: a checkpoint of each run, and its content.
            file: a CSV file with a column of SMILES.
            column: the column of SMILES; None finds it by its name.
            batch_size: None takes the one used in training.
            device: None takes CUDA, then MPS, then the CPU.
        """
        raise ConfigError(f"--smiles {file}: a run of the face {self.name} reads no SMILES")

    def predictions_file(self, split: str) -> str:
        """Return the default output file name of ``treadle predict``."""
        return f"predictions_{split}.npz"

    # -- inherited by subclasses ---------------------------------------------------------------------------------------

    def train(
        self,
        settings: Sequence[str],
        *,
        out: Path,
        device: str | None,
        resume: bool,
        messages: Console,
        show: Show = lambda report, out: None,
        paused: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any] | None:
        """Train or resume, evaluate, and write the run folder; a finished run shows its results.

        Args:
            settings: strings ``key=value``.
            out: the run folder.
            device: None takes CUDA, then MPS, then the CPU.
            resume: resume from the folder's newest checkpoint; otherwise the files of an earlier run are moved aside.
            messages: console for progress.
            show: prints the results.
            paused: called after the training, returns whether it will be continued later; the run is then not
                evaluated.

        Returns:
            The content of ``metrics.json``; None on ranks other than the first, and for a paused run.

        Raises:
            ConfigError: a setting is invalid, or differs from that of the run in this folder.
            CheckpointError: no checkpoint in the folder is intact, or a file cannot be written.
            NonFiniteError: training diverged.
            ImportError: a package is missing; the message names it.
        """
        where = device_of_rank(device)
        config = self.read_settings(settings, device)
        explicit = device is not None
        run = Run(config, out, where, messages, resume=resume, given=settings, explicit=explicit, paused=paused)
        return self.run(run, show)

    def run(self, run: Run[Config], show: Show) -> dict[str, Any] | None:
        """Train like :meth:`train`, from parsed settings."""
        return TrainingRun(self, run).execute(show)

    def fit_logged(self, run: Run[Config], data: Data, trainer: Trainer) -> None:
        """Train, and log the duration, or that the run was saved before a signal ended it."""
        started = time.perf_counter()
        try:
            with without_epoch_lines(self.name):
                self.fit(run, data, trainer)
        except SystemExit:
            if run.watch.engine is not None:
                _log.info("saved at step %d; the same command resumes from here", run.watch.engine.step)
            raise
        done = 0 if run.watch.engine is None else run.watch.engine.epoch - run.watch.first_epoch
        if done > 0 and not run.part:
            seconds = timedelta(seconds=round(time.perf_counter() - started))
            _log.info("trained %s in %s; now %s", number_of(done, "epoch"), seconds, self.afterwards)

    def replay(self, run: Path, step: int, *, device: str | None, debug: bool, messages: Console) -> Replayed:
        """Rerun a step from a run folder, which is only read.

        Args:
            run: the run folder, or the folder of one of its :attr:`parts`.
            step: 1-based.
            device: None takes CUDA, then MPS, then the CPU.
            debug: stop inside the step.
            messages: console for progress.

        Raises:
            ConfigError: the folder is not of such a run, or the run has no such step.
            CheckpointError: a file that the step needs is missing or damaged.
        """
        home, part = self.home_of(run)
        config, threads = self.stored(home, None, None)

        def train(scratch: Path) -> None:
            again = Run(config, scratch, get_device(device), messages, home=home, part=part)
            data = self.prepare(again)
            self.refuse_other_data(again, data)
            self.fit(again, data, self.build(again, data))

        with environment_of(self, config, threads), without_epoch_lines(self.name):
            return replay_run(train, run, step, debug=debug)

    @contextlib.contextmanager
    def open(
        self, path: Path, tree: Mapping[str, Any], *, device: str | None, messages: Console
    ) -> Iterator[Opened[Config, Data, Trainer]]:
        """Yield a run rebuilt from its folder, with the weights of a checkpoint; the folder is only read.

        Args:
            path: the checkpoint.
            tree: the content of the checkpoint.
            device: None takes CUDA, then MPS, then the CPU.
            messages: console for progress.

        Raises:
            ConfigError: the folder is not of such a run.
            CheckpointError: a file needed for the weights is missing or damaged.
        """
        home, part = self.home_of(folders.run_folder_of(path))
        config, threads = self.stored(home, path, tree)
        with tempfile.TemporaryDirectory(prefix="treadle-stored-") as scratch, environment_of(self, config, threads):
            where = get_device(device)
            run = Run(config, Path(scratch), where, messages, home=home, part=part, trains=False)
            data = self.prepare(run)
            self.refuse_other_data(run, data)
            trainer = self.build(run, data)
            self.load(run, trainer, path, tree)
            yield Opened(run, data, trainer, path, tree)

    def home_of(self, run: Path) -> tuple[Path, str]:
        """Return the run folder of a folder, and the part of the run that the folder holds.

        Example:
            >>> Pack().home_of(Path("runs/waves"))[1]
            ''
        """
        run_path = run.absolute()
        if run_path.name in self.parts and folders.read_record(run) is None:
            return run_path.parent, run_path.name
        return run, ""

    def holds_another(self, run: Run[Config]) -> bool:
        """Return whether the folder of a run holds an earlier run of this pack that it could not continue."""
        record = folders.read_record(run.out)
        differences = {} if record is None else changes(record.config, self.values(run.config))
        return any(key not in self.free for key in differences)


def predicted_arrays(trainer: Any, batches: Iterable[Any]) -> dict[str, Any]:
    """Return the concatenated outputs of a BaseTrainer's ``predict_step`` over batches, by name."""
    outputs: list[Any] = []
    for_each_batch(
        trainer.model, batches, lambda batch: outputs.append(outputs_on_cpu(trainer.predict_step(batch))),
        precision=trainer.precision, eval_seed=trainer.eval_seed,
    )  # fmt: skip
    found = joined(outputs)
    named = found if isinstance(found, dict) else {"prediction": found}
    return {
        name: value.float().numpy() if value.is_floating_point() else value.numpy() for name, value in named.items()
    }
