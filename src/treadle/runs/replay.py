"""Replay of a step: the run's own code, from the nearest state before the step, without any writing hook."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from treadle.checkpoint.find_step import nearest_state
from treadle.device.host_transfer import read_scalars
from treadle.engine import Engine
from treadle.engine.hook import read_only
from treadle.engine.observers import observing
from treadle.errors import ConfigError, NonFiniteError
from treadle.hooks import BaseHook, NonFiniteHook
from treadle.hooks.flight import batch_as_plain, ids_as_plain, layer_norms
from treadle.hooks.steplog import StepRows
from treadle.runs.folder import CHECKPOINTS


class StepReached(BaseException):
    """Signal that the step was replayed and the run can end; not caught by ``except Exception``."""


@dataclass
class Replayed:
    """Observations of a replayed step.

    Attributes:
        start: the starting point, in words.
        start_step: the step of that state; 0 is the beginning of the run.
        rows: one for each replayed step, as StepLogHook writes them.
        sample_ids: of each micro-batch; None if the loader does not report them.
        batches: the micro-batches as they were after the backward pass.
        layer_norms: 2-norm of the gradient for each layer, before clipping.
        versions: the versions that wrote the state.
        device: the device of the replay.
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
    """Last hook of a replay: chooses the start, observes every step, and ends the run at the requested one."""

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
        """Read the gradients of the step, and stop inside it if requested."""
        if trainer.step != self.step:
            return
        norms = layer_norms(trainer)
        self.seen.layer_norms = dict(zip(norms, read_scalars(norms.values()).tolist(), strict=True))
        self._look_at_data(trainer)
        if self.debug:
            _stop_inside(trainer)

    def on_after_step(self, trainer: Engine) -> None:
        """Record the step, and end the run at the requested one."""
        self._rows.add(trainer)
        if len(self._rows) >= 1000:
            self.seen.rows += self._rows.read()
        if trainer.step == self.step:
            self._look_at_data(trainer)
            raise StepReached

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Record a step that ended the run as non-finite."""
        if isinstance(error, NonFiniteError) and error.step == trainer.step:
            self._rows.add(trainer)
        self.seen.rows += self._rows.read()

    def _look_at_data(self, trainer: Engine) -> None:
        self.seen.batches = list(trainer.attempt.group.batches)
        self.seen.sample_ids = [ids_as_plain(ids) for ids in trainer.attempt.group.sample_ids]


def _stop_inside(trainer: Engine) -> None:
    """Stop in the debugger, with ``model``, ``batch`` and ``grads``, which are final except for clipping."""
    model, batch = trainer.model, trainer.attempt.group.batches
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    breakpoint()
    del model, batch, grads


class ReplaySetup:
    """Setup that turns a run into a replay: other folders, no writing hooks, the replay hook last."""

    def __init__(self, witness: ReplayHook, folder: Path):
        self.witness = witness
        self.folder = folder
        self._loggers: list[logging.Logger] = []

    def before_building(self, engine: Engine) -> None:
        """Move the workspace."""
        engine.workspace = self.folder

    def before_running(self, engine: Engine) -> None:
        """Remove hooks that write; averages, the policy for non-finite steps and the user's own hooks stay."""
        engine.workspace = self.folder
        kept = [hook for hook in engine.hooks if not _writes(hook)]
        self.witness.seen.left_out = [hook.state_key for hook in engine.hooks if _writes(hook)]
        for hook in kept:
            if isinstance(hook, NonFiniteHook):
                hook.path, hook.checkpoints = self.folder / "nonfinite", self.witness.folder
        engine.hooks = [*kept, self.witness]
        engine.logger.addFilter(_is_about_run)
        self._loggers.append(engine.logger)

    def close(self) -> None:
        """Let the loggers of the replayed trainers log everything again."""
        for logger in self._loggers:
            logger.removeFilter(_is_about_run)


def _writes(hook: BaseHook) -> bool:
    return hook.writes and not isinstance(hook, NonFiniteHook)  # this one writes into the replay's folder


def _is_about_run(record: logging.LogRecord) -> bool:
    """Return whether a record is no warning about the unused state of hooks that the replay removed."""
    return getattr(record, "topic", None) != "ignored hook state"


def checkpoints_of(run: Path) -> Path:
    """Return the folder of a run's checkpoints: ``checkpoints`` inside it, or itself.

    Example:
        >>> checkpoints_of(Path("no_such_run")).name
        'no_such_run'
    """
    inside = run / CHECKPOINTS
    return inside if inside.is_dir() else run


def refuse_run_of_ranks(run: Path) -> None:
    """Raise for a run of a pack's command that was trained under torchrun.

    Its ranks drew different random numbers and may have read the samples in a different order, so a single process
    would compute different steps.

    Raises:
        ConfigError: it was.
    """
    newest = nearest_state(checkpoints_of(run), sys.maxsize)
    data = {} if newest is None else newest[1].get("data") or {}
    one_order = data.get("kind") == "stateful"  # that of a TensorLoader, in one process too
    if data.get("order") is not None and not (one_order and data.get("num_ranks") == 1):
        raise ConfigError(
            "was trained under torchrun, where samples have a different order or each rank draws separate random "
            "numbers; only runs of one process can be replayed",
            argument="RUN",
            value=str(run),
        )


def replay_run(train: Callable[[Path], Any], run: Path, step: int, *, debug: bool) -> Replayed:
    """Rerun a step of a run from its nearest state, with the workspace of the trainer in a temporary folder.

    Args:
        train: makes the trainer and trains it; called with the temporary folder.
        run: the run folder, which is only read.
        step: 1-based.
        debug: stop inside the step.

    Raises:
        ConfigError: the run has no such step.
    """
    witness = ReplayHook(checkpoints_of(run), step, debug=debug)
    path = list(sys.path)
    with tempfile.TemporaryDirectory(prefix="treadle-replay-") as scratch:
        setup = ReplaySetup(witness, Path(scratch))
        try:
            with observing(setup):
                train(Path(scratch))
        except StepReached:
            pass
        except NonFiniteError as error:
            if error.step != step:
                raise
        finally:
            setup.close()
            sys.path[:] = path
    rows = witness.seen.rows
    if not rows or rows[-1]["step"] != step:
        end = rows[-1]["step"] if rows else witness.seen.start_step  # nothing is left to train after a final state
        last = f"it ended at step {end}" if end else "nothing was trained"
        raise ConfigError(f"--step={step}: the run has no such step: {last}")
    return witness.seen


def save_batch(batches: Sequence[Any], path: Path) -> None:
    """Save a list of micro-batches for ``torch.load(path, weights_only=True)``.

    Raises:
        ConfigError: the batch holds something that only a pickle could store, or the file cannot be written.
    """
    try:
        torch.save([batch_as_plain(batch) for batch in batches], path)
    except (TypeError, OSError, RuntimeError) as error:
        raise ConfigError(f"--save={str(path)!r}: {error}") from error
