"""How a step is run again: the run's own code, from the nearest state before the step, with nothing that writes."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from treadle.checkpoint.find_step import nearest_state
from treadle.engine import Engine
from treadle.engine.hook import read_only
from treadle.engine.observers import observing
from treadle.errors import ConfigError, NonFiniteError
from treadle.hooks import BaseHook, NonFiniteHook
from treadle.hooks.flight import batch_as_plain, ids_as_plain, layer_norms
from treadle.hooks.steplog import StepRows
from treadle.means import read_scalars
from treadle.runs.folder import CHECKPOINTS
from treadle.runs.script import run_as_main, train_from


class StepReached(BaseException):
    """The step was run again and the rest of the run is of no interest; no ``except Exception`` holds it up."""


@dataclass
class Replayed:
    """What was seen of a step that was run again.

    Attributes:
        start: from where, in words.
        start_step: the step of that state; 0 is the run's beginning.
        rows: one for each step that was run, as StepLogHook writes them.
        sample_ids: of each micro-batch, None where the loader does not say.
        batches: the micro-batches as they were after the backward pass.
        layer_norms: 2-norm of the gradient for each layer, before clipping.
        versions: those that the state was written with.
        device: where it ran.
        left_out: the hooks that were left out.
    """

    start: str = "the run's beginning"
    start_step: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    sample_ids: list[Any] = field(default_factory=list)
    batches: list[Any] = field(default_factory=list)
    layer_norms: dict[str, float] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    left_out: list[str] = field(default_factory=list)

    @property
    def row(self) -> dict[str, Any]:
        """The row of the step itself."""
        return self.rows[-1]


class ReplayHook(BaseHook):
    """The last hook of a replay: chooses the start, watches every step, and ends the run at the requested one."""

    state_key = "treadle replay"
    replays = True

    def __init__(self, folder: Path, step: int, *, debug: bool):
        self.folder = folder
        self.step = step
        self.debug = debug
        self.seen = Replayed()
        self._rows = StepRows()

    def checkpoint_to_resume(self, trainer: Engine) -> Mapping[str, Any] | None:
        """Find the nearest state before the step."""
        self.seen.device = str(trainer.device)
        beside = [self.folder.parent] if self.folder.name == CHECKPOINTS else []  # a trainer of epochs writes there
        found = [state for place in (self.folder, *beside) if (state := nearest_state(place, self.step - 1))]
        if not found:
            return None
        path, tree = max(found, key=lambda state: int(state[1]["global_step"]))
        self.seen.start, self.seen.start_step = str(path), int(tree["global_step"])
        self.seen.versions = tree.get("versions") or {}
        trainer.state.record_source(path)
        return tree

    def on_before_train(self, trainer: Engine) -> None:
        """Let a rollback find the run's own checkpoints."""
        for hook in trainer.hooks:
            if isinstance(hook, NonFiniteHook):
                hook.foreign_states = set()

    @read_only
    def on_before_optimizer_step(self, trainer: Engine) -> None:
        """Read the gradients of the step, and stop inside it when asked to."""
        if trainer.step != self.step:
            return
        norms = layer_norms(trainer)
        self.seen.layer_norms = dict(zip(norms, read_scalars(norms.values()).tolist(), strict=True))
        self._look_at_data(trainer)
        if self.debug:
            _stop_inside(trainer)

    def on_after_step(self, trainer: Engine) -> None:
        """Note the step; at the one asked for, end the run."""
        self._rows.add(trainer)
        if len(self._rows) >= 1000:
            self.seen.rows += self._rows.read()
        if trainer.step == self.step:
            self._look_at_data(trainer)
            raise StepReached

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Note a step that ended the run as not finite."""
        if isinstance(error, NonFiniteError) and error.step == trainer.step:
            self._rows.add(trainer)
        self.seen.rows += self._rows.read()

    def _look_at_data(self, trainer: Engine) -> None:
        self.seen.batches = list(trainer.attempt.group.batches)
        self.seen.sample_ids = [ids_as_plain(ids) for ids in trainer.attempt.group.sample_ids]


def _stop_inside(trainer: Engine) -> None:
    """The gradients are final but for clipping; ``model``, ``batch`` and ``grads`` are at hand."""
    model, batch = trainer.model, trainer.attempt.group.batches
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    breakpoint()
    del model, batch, grads


class ReplaySetup:
    """Setup that makes a run a replay: other folders, no hook that writes, the witness at the end."""

    def __init__(self, witness: ReplayHook, folder: Path):
        self.witness = witness
        self.folder = folder

    def before_building(self, engine: Engine) -> None:
        """Move the workspace."""
        engine.workspace = self.folder

    def before_running(self, engine: Engine) -> None:
        """Take out what would write; averages, the policy for non-finite steps and the user's own hooks stay."""
        engine.workspace = self.folder
        kept = [hook for hook in engine.hooks if not _writes(hook)]
        self.witness.seen.left_out = [hook.state_key for hook in engine.hooks if _writes(hook)]
        for hook in kept:
            if isinstance(hook, NonFiniteHook):
                hook.path, hook.checkpoints = self.folder / "nonfinite", self.witness.folder
        engine.hooks = [*kept, self.witness]


def _writes(hook: BaseHook) -> bool:
    return hook.writes and not isinstance(hook, NonFiniteHook)  # that one writes into the replay's folder


@contextmanager
def _quiet_about_left_out_hooks() -> Iterator[None]:
    """Keep the log from warning that the state of the hooks which were left out is not used."""

    def passes(record: logging.LogRecord) -> bool:
        return getattr(record, "topic", None) != "ignored hook state"

    # Every face has its own logger, also that of another package's trainer.
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in loggers:
        logger.addFilter(passes)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(passes)


def checkpoints_of(run: Path) -> Path:
    """Return the folder of a run's checkpoints: ``checkpoints`` inside it, or itself.

    Example:
        >>> checkpoints_of(Path("no_such_run")).name
        'no_such_run'
    """
    inside = run / CHECKPOINTS
    return inside if inside.is_dir() else run


def refuse_run_of_ranks(run: Path) -> None:
    """Refuse the run of a pack's command that was trained under torchrun.

    Its ranks drew different random numbers, and may have read the samples in another order than one process, so one
    process would run other steps.

    Raises:
        ConfigError: it was.
    """
    newest = nearest_state(checkpoints_of(run), sys.maxsize)
    data = {} if newest is None else newest[1].get("data") or {}
    one_order = data.get("kind") == "stateful"  # that of a TensorLoader, in one process too
    if data.get("order") is not None and not (one_order and data.get("num_ranks") == 1):
        raise ConfigError(
            "was trained under torchrun, where samples come in another order or each rank draws "
            "separate random numbers; only runs of one process can be replayed: train without torchrun what is to be",
            argument="RUN",
            value=str(run),
        )


def replay_script(run: Path, step: int, *, script: Path, arguments: Sequence[str], debug: bool) -> Replayed:
    """Run a step of a user's own script again: everything up to its training, then from the nearest state.

    The trainer's workspace is a temporary folder meanwhile, and a folder of checkpoints is neither read nor
    written. What the script itself writes, it writes again.

    Raises:
        ConfigError: there is no such script or folder, it trains with no trainer of treadle, or the run has no such
            step.
    """
    if not script.is_file():
        raise ConfigError(f"--script={str(script)!r}: no such file")
    if not run.is_dir():
        raise ConfigError("no such folder; give the workspace of the run", argument="RUN", value=str(run))
    witness = ReplayHook(checkpoints_of(run), step, debug=debug)
    with (
        tempfile.TemporaryDirectory(prefix="treadle-replay-") as scratch,
        observing(ReplaySetup(witness, Path(scratch))),
    ):
        run_to_step(lambda: run_as_main(script, arguments), witness)
    return witness.seen


def replay_config(run: Path, step: int, *, config: dict[str, Any], folder: Path, debug: bool) -> Replayed:
    """Run a step of a trainer again that a configuration describes, with its workspace in a temporary folder.

    Args:
        run: the workspace of the run.
        step: 1-based.
        config: the configuration.
        folder: that of its file.
        debug: stop inside the step.

    Raises:
        ConfigError: the configuration describes no trainer that can be replayed, or the run has no such step.
    """
    witness = ReplayHook(checkpoints_of(run), step, debug=debug)
    path = list(sys.path)
    with tempfile.TemporaryDirectory(prefix="treadle-replay-") as scratch:
        try:
            with observing(ReplaySetup(witness, Path(scratch))):
                run_to_step(lambda: train_from(config, folder), witness)
        finally:
            sys.path[:] = path
    return witness.seen


def run_to_step(train: Callable[[], Any], witness: ReplayHook) -> None:
    """Train until the witness has seen its step.

    Raises:
        ConfigError: the run has no such step.
    """
    try:
        with _quiet_about_left_out_hooks():
            train()
    except StepReached:
        pass
    except NonFiniteError as error:
        if error.step != witness.step:
            raise
    rows = witness.seen.rows
    if not rows or rows[-1]["step"] != witness.step:
        end = rows[-1]["step"] if rows else witness.seen.start_step  # a state at its end leaves nothing to train
        last = f"it ended at step {end}" if end else "nothing was trained"
        raise ConfigError(f"--step={witness.step}: the run has no such step: {last}")


def save_batch(batches: Sequence[Any], path: Path) -> None:
    """Save a list of micro-batches for ``torch.load(path, weights_only=True)``.

    Raises:
        ConfigError: the batch holds something that only a pickle could keep, or the file cannot be written.
    """
    try:
        torch.save([batch_as_plain(batch) for batch in batches], path)
    except (TypeError, OSError, RuntimeError) as error:
        raise ConfigError(f"--save={str(path)!r}: {error}") from error
