"""State of a run: all parts of a checkpoint, collected and loaded in one order.

Four loops over the parts do everything: collect, check, warn, load. Checks come before anything is changed, so a state
that does not fit leaves the run as it was; the random state is loaded last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from treadle.checkpoint.base_fingerprints import FrozenBase
from treadle.checkpoint.buffers import HostBuffers
from treadle.checkpoint.schema import KEYS, to_plain
from treadle.engine.parts import MOVED_BY_STEPS, PARTS, Saved, StatePart
from treadle.engine.state_options import StateOptions

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


class Driver(Protocol):
    """Object around an engine that adds top-level keys to its checkpoints, as the epoch driver does."""

    @property
    def finished(self) -> bool:
        """Whether this driver wants no more training."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the keys and their values."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores them from a whole checkpoint tree."""
        ...


class RunState:
    """State table of an engine, and where its present state came from.

    Args:
        options: what is left out of a state, or may be missing when one is loaded.

    Attributes:
        drivers: objects around the engine that add keys of their own.
        base: fingerprints of frozen weights that checkpoints leave out.
        loaded: whether a state was loaded, by hand or by a hook.
        resumed: whether hooks were asked for a checkpoint to resume from.
        source: the checkpoint that the run resumed from, for the log.
        saved: the newest checkpoint that this process wrote, for the log; None before one.
        saved_step: the step of its state.
        scored: the weights that the last evaluation scored, ``"model"`` or ``"ema"``; None before one.
        num_loads: how often a state was loaded; tensors of the optimizer lie in other memory after each.
    """

    base: FrozenBase

    def __init__(self, options: StateOptions):
        self.options = options
        self.drivers: list[Driver] = []
        self.loaded = False
        self.resumed = False
        self.source: str | None = None
        self.saved: str | None = None
        self.saved_step: int | None = None
        self.scored: str | None = None
        self.num_loads = 0

    def prepare(self, engine: Engine) -> None:
        """Takes fingerprints of the frozen weights."""
        self.base = FrozenBase(engine.model, asked=self.options.ignore_frozen_params)

    def collect(self, engine: Engine, buffers: HostBuffers | None = None, *, parts: bool = False) -> dict[str, Any]:
        """Returns the checkpoint tree: plain values and CPU copies that a following step cannot change.

        All ranks take part. Of a sharded model, rank 0 gets the whole tensors and the others tensors without memory.

        Args:
            engine: the engine of this state.
            buffers: memory for the copies; None takes fresh memory.
            parts: each rank gets its own part of the tensors that are spread over ranks.
        """
        tree: dict[str, Any] = dict.fromkeys(KEYS)
        for part in PARTS:
            part.collect(engine, tree)
        return {key: to_plain(value, key, buffers=buffers, parts=parts) for key, value in tree.items()}

    def restore(self, engine: Engine, tree: Mapping[str, Any]) -> None:
        """Loads a checkpoint tree, in place.

        Raises:
            CheckpointError: a part does not fit; nothing was changed.
        """
        saved = Saved.for_engine(engine, tree)
        self._load(engine, saved, PARTS, warns=True)
        self.loaded = True

    def roll_back(self, engine: Engine, tree: Mapping[str, Any]) -> None:
        """Loads what a step changes: weights, optimizer, schedule, scaler, averages. Data and random numbers stay.

        The count of attempted steps stays too, so that no file or log point is numbered twice; that of applied steps is
        the checkpoint's, since those after it are undone.

        Raises:
            CheckpointError: the model or the optimizer does not fit.
        """
        saved = Saved.for_engine(engine, tree)
        self._load(engine, saved, MOVED_BY_STEPS, warns=False)
        progress = tree.get("progress") or {}
        engine.progress.roll_back(int(progress.get("applied_steps", engine.progress.applied_steps)))

    def _load(self, engine: Engine, saved: Saved, parts: tuple[StatePart, ...], *, warns: bool) -> None:
        for part in parts:
            part.check(engine, saved)
        for part in parts if warns else ():
            for notice in part.notices(engine, saved):
                engine.logger.warning("%s", notice.text, extra={"topic": notice.topic})
        for part in parts:
            part.load(engine, saved)
        self.num_loads += 1

    def record_source(self, source: object) -> None:
        """Records the checkpoint that the run resumed from."""
        self.source = str(source)

    def record_saved(self, path: object, step: int) -> None:
        """Records a checkpoint that was written, and the step whose state it holds."""
        self.saved, self.saved_step = str(path), step

    def record_resumed(self) -> None:
        """Records that hooks were asked for a checkpoint."""
        self.resumed = True

    def record_scored(self, weights: str | None) -> None:
        """Records which weights an evaluation scored, ``"model"`` or ``"ema"``."""
        self.scored = weights
