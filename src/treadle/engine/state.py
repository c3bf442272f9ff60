"""State of a run: all parts of a checkpoint, collected and loaded in one order.

Four loops over the parts do everything: collect, check, warn, load. Checks come before any change, so a state that does
not fit leaves the run unchanged; the random state is loaded last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from treadle import distributed
from treadle.checkpoint.attributes import Attributes
from treadle.checkpoint.base_fingerprints import FrozenBase
from treadle.checkpoint.buffers import HostBuffers, LiveTensors
from treadle.checkpoint.built_values import BuiltValues
from treadle.checkpoint.module_state import ModuleState
from treadle.checkpoint.order import StateProgress
from treadle.checkpoint.schema import KEYS, OF_USERS, DeviceCopies, to_plain
from treadle.device.handover import wait_for_work
from treadle.engine.beginning import Beginning
from treadle.engine.first_save import try_loading
from treadle.engine.hooks_part import HookStates
from treadle.engine.objects_part import objects_of, owners_of_values, parts_of
from treadle.engine.origin import RunOrigin
from treadle.engine.own_objects import OF_OPTIMIZERS, OwnObjects
from treadle.engine.parts import MOVED_BY_STEPS, PARTS, WITHOUT_WEIGHTS
from treadle.engine.prepared_parts import PreparedParts
from treadle.engine.schedule_moves import ScheduleMoves
from treadle.engine.settings import MOVABLE, EngineSettings, other_settings
from treadle.engine.state_options import StateOptions
from treadle.engine.state_part import Saved, StatePart
from treadle.errors import CheckpointError
from treadle.optim.optimizer import is_torch_optimizer
from treadle.optim.optimizer_state import inner_optimizers

if TYPE_CHECKING:
    from treadle.checkpoint.rank_writer import RankWriter
    from treadle.engine.loop import Engine


class Driver(Protocol):
    """Object that adds top-level keys to an engine's checkpoints, like the epoch driver."""

    @property
    def finished(self) -> bool:
        """Whether this driver's training is finished."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's keys and their values."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the keys from a whole checkpoint tree."""
        ...


class RunState:
    """State table of an engine, and where its current state came from.

    Args:
        options: parts to leave out of a state, or allowed to be missing from a loaded one.

    Attributes:
        drivers: objects that add keys to the state.
        writers: writers of files that belong to a state, such as the best weights; a later state is written after them.
        base: fingerprints of frozen weights that checkpoints leave out.
        loaded: whether a state was loaded, by hand or by a hook.
        resumed: whether hooks were queried for a checkpoint to resume from.
        closed: why training is refused, or None.
        searched: whether a front end has already chosen the state among those of all hooks, so that hooks need not
            search.
        source: the checkpoint that the run resumed from, for the log.
        saved: the newest checkpoint that this process wrote, for the log; None before one.
        saved_step: the step of its state.
        origin: where the run began.
        scored: the weights that the last evaluation scored, ``"model"`` or ``"ema"``; None before one.
        num_loads: how often a state was loaded; each load moves the optimizer's tensors to other memory.
        training: whether a run takes steps.
        num_runs: runs of this object that took steps.
        length_checked: whether the length of the schedule was checked against that of the run.
        modules: state of the model that is not in its state dict.
        beginning: what hooks change when they begin.
        schedule: comparison of the moves of the schedule with those of the engine.
        built: the parts with which the run was prepared.
        built_values: values of modules and own objects then.
        objects: the user's own objects on the trainer and the task.
        hooks: state of users' hooks beyond what they save themselves.
        optimizer_attributes: plain attributes of a third-party optimizer.
    """

    base: FrozenBase
    modules: ModuleState
    objects: OwnObjects
    built: PreparedParts
    built_values: BuiltValues
    hooks: HookStates
    optimizer_attributes: Attributes

    def __init__(self, options: StateOptions):
        self.options = options
        self.drivers: list[Driver] = []
        self.loaded = False
        self.resumed = False
        self.searched = False
        self.source: str | None = None
        self.saved: str | None = None
        self.saved_step: int | None = None
        self.origin = RunOrigin()
        self.writers: list[RankWriter] = []
        self.scored: str | None = None
        self.num_loads = 0
        self.training = False
        self.num_runs = 0
        self.closed: str | None = None
        self.schedule = ScheduleMoves()
        self.beginning = Beginning()
        self.objects = OwnObjects({})
        self.registered: frozenset[str] = frozenset()
        self.hooks = HookStates()
        self._trial: Callable[[], None] | None = None
        self._loading_tested = False
        self._warned: set[str] = set()
        self._parts: tuple[Any, ...] = ()
        self.length_checked = False
        self._settings: EngineSettings | None = None

    def prepare(self, engine: Engine) -> None:
        """Fingerprint the frozen weights, and record the initial state of the user's objects."""
        self.base = FrozenBase(engine.model, requested=self.options.ignore_frozen_params)
        self.modules = ModuleState(engine.model)
        self.built = PreparedParts(engine)
        self._parts = (*parts_of(engine), engine.task)  # kept alive: they are known by id, which could be reused
        self.objects = objects_of(engine)
        known = {id(part) for part in (*self._parts, engine, *self.objects.owners.values())}
        self.built_values = BuiltValues(lambda: owners_of_values(engine))
        self.hooks = HookStates(engine.hooks, known=known, model=engine.model)
        owner = None if is_torch_optimizer(engine.optimizer) else engine.optimizer
        inner = inner_optimizers(owner).values()
        shared = {id(part) for one in inner for part in (one.state, one.param_groups)}  # under other names too
        self.optimizer_attributes = Attributes(owner, deep=True, leave_out=OF_OPTIMIZERS, tensors=True, known=shared)

    def leave_out(self, loader: Any) -> None:
        """Exclude a loader that a cursor reads from the user's objects."""
        for objects in (self.objects, *self.hooks.objects.values()):
            objects.leave_out(loader)

    def warn_once(self, engine: Engine, text: str) -> None:
        """Log a warning about lost state, once."""
        if text not in self._warned:
            self._warned.add(text)
            engine.logger.warning("%s", text, extra={"topic": "state that is lost"})

    def warn_of_lost(self, engine: Engine, name: str, advice: str) -> None:
        """Log a warning about a change that no checkpoint holds, once."""
        text = f"{name} has changed, but checkpoints do not hold it: a resume is exact only if nothing depends on it. "
        self.warn_once(engine, text + advice)

    def search_again(self) -> None:
        """Search for objects that hooks created before training.

        Raises:
            CheckpointError: the loaded checkpoint holds one that was not created.
        """
        for objects in (self.objects, *self.hooks.objects.values()):
            objects.search_again()

    def try_before_step_1(self, trial: Callable[[], None]) -> None:
        """Register a trial to run before the first step of a fresh run; a resumed run has passed it before."""
        self._trial = trial

    def run_trial(self, engine: Engine) -> None:
        """Run a trial and restore the user's objects afterwards."""
        trial, self._trial = self._trial, None
        if trial is not None and not engine.progress.step and not self.loaded:
            self.isolated(engine, trial)

    def isolated(self, engine: Engine, trial: Callable[[], None]) -> None:
        """Call a function, and undo its changes to buffers and to the user's objects."""
        modules, objects = self.modules.collect(engine.model), self.objects.attributes()
        trial()
        self.modules.restore(engine.model, modules, ready=False)
        self.objects.restore_attributes(objects)

    def record_length_checked(self) -> None:
        """Record that the length of the schedule was checked for this run."""
        self.length_checked = True

    def begin_run(self, engine: Engine) -> None:
        """Record that steps are being taken."""
        self._settings = engine.settings
        self.schedule.compare(engine)
        self.built.begin(engine)
        self.built.watch(engine)
        self.training, self.num_runs = True, self.num_runs + 1
        self.length_checked = False

    def begin_anew(self) -> None:
        """Let hooks begin as in a new run, where every epoch is one."""
        self.beginning.begin_anew()
        for objects in (self.objects, *self.hooks.objects.values()):
            objects.loaded_states()  # and forget that they were loaded

    def record_moved_settings(self, engine: Engine) -> None:
        """Record in the progress which settings a hook has changed since the run began."""
        for name in MOVABLE if self.training else ():
            if getattr(engine.settings, name) != getattr(self._settings, name):
                engine.progress.moved_settings[name] = getattr(engine.settings, name)

    def end_run(self, engine: Engine) -> None:
        """Record that no more steps are taken, and the current modes of the modules."""
        self.record_moved_settings(engine)
        self.schedule.compare(engine)
        self.modules.end(engine.model)
        self.built.end_watch()
        self.training = False

    def collect(self, engine: Engine, buffers: HostBuffers | None = None, *, parts: bool = False) -> dict[str, Any]:
        """Return the checkpoint tree: plain values and CPU copies that later steps cannot change.

        Collective. For a sharded model, rank 0 gets the whole tensors and the other ranks meta tensors.

        Args:
            engine: the engine of this state.
            buffers: memory for the copies; None allocates new memory.
            parts: each rank gets its own shards of sharded tensors.
        """
        wait_for_work(engine.device)
        tree: dict[str, Any] = dict.fromkeys(KEYS)
        self.built.refuse_lost_parameters(engine)
        if self.training:
            self.schedule.compare(engine)
            self.built.refuse_replaced(engine)
            for text in (*self.built.unloadable(engine), *self.built.replaced(engine)):
                self.warn_once(engine, text)
        for part in PARTS:
            part.collect(engine, tree)
        soon = type(buffers) is LiveTensors
        joins = engine.device.type == "cuda" and (buffers is None or soon)
        copies = DeviceCopies(tree).result(apart=not soon) if joins else {}
        plain = {
            key: to_plain(
                value, key, copies=copies.get(key), buffers=buffers, parts=parts, encoding=OF_USERS.get(key, "none")
            )
            for key, value in tree.items()
        }  # fmt: skip
        if self.training and not self._loading_tested and not parts and distributed.world_size() == 1:
            self._loading_tested = True
            try_loading(engine, plain)
        return plain

    def restore(self, engine: Engine, tree: Mapping[str, Any]) -> None:
        """Load a checkpoint tree in place.

        Raises:
            CheckpointError: a part does not fit; nothing was changed.
        """
        saved = Saved.for_engine(engine, tree)
        self._load(engine, saved, PARTS, warns=True)
        others = other_settings(tree.get("config"), engine.config)
        if others:
            engine.logger.warning(
                "resumed with settings that differ from the checkpoint's: %s; from here on the run differs",
                ", ".join(others), extra={"topic": "other settings"},
            )  # fmt: skip
        self._verify_loaded(engine, saved)
        if not others:
            self._warn_of_other_values(engine, saved)
        self.loaded = True
        self.beginning.record_loaded()
        self.origin.moved(StateProgress(engine.progress.step, engine.epoch))

    def _warn_of_other_values(self, engine: Engine, saved: Saved) -> None:
        """Warn about values with which the run was built differently; rank 0 compares those that rank 0 wrote."""
        if distributed.rank() or len(saved.get("rng") or ()) != distributed.world_size():
            return
        if values := self.built_values.differing(saved.part("built")):
            engine.logger.warning(
                "this run was built with other values than the one that wrote the checkpoint: %s. No checkpoint holds "
                "them, so the run differs from here on. Build it the same way: keep the arguments, and call "
                "treadle.set_seed before anything is drawn at random",
                ", ".join(values), extra={"topic": "other values"},
            )  # fmt: skip

    def _verify_loaded(self, engine: Engine, saved: Saved) -> None:
        """Collect the state again and compare it with the loaded checkpoint.

        Raises:
            CheckpointError: they differ.
        """
        if not self.options.strict:
            return
        for part in PARTS:
            for path, how in part.differences(engine, saved):
                raise CheckpointError(
                    f"{path}: after loading, it differs from the checkpoint ({how}, in the file and in memory). The "
                    "object does not restore what it saves, or was built differently than in the run that wrote the "
                    "file; build it the same way, or start a new run from load_weights(...)"
                )

    def roll_back(self, engine: Engine, tree: Mapping[str, Any]) -> None:
        """Load what a step changes: weights, optimizer, schedule, scaler, averages. Keep the position in the data and
        RNG.

        The count of attempted steps is kept too, so that no file or log point is numbered twice; that of applied steps
        is the checkpoint's, since later ones are undone.

        Raises:
            CheckpointError: the model or the optimizer does not fit.
        """
        saved = Saved.for_engine(engine, tree)
        self._load(engine, saved, MOVED_BY_STEPS, warns=False)
        progress = tree.get("progress") or {}
        engine.progress.roll_back(int(progress.get("applied_steps", engine.progress.applied_steps)))

    def put_back(self, engine: Engine, tree: Mapping[str, Any]) -> None:
        """Load what a step changes, and the random state, from a state of this run; of a sharded model, no weights."""
        engine.cursor.put_back(tree["data"])
        parts = WITHOUT_WEIGHTS if distributed.is_sharded(engine.model) else (*MOVED_BY_STEPS, PARTS[-1])
        self._load(engine, Saved.for_engine(engine, tree), parts, warns=False)

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
        """Record the checkpoint that the run resumed from."""
        self.source = self.origin.source = str(source)

    def record_searched(self) -> None:
        """Record that the state was chosen among those of all hooks."""
        self.searched = True

    def record_saved(self, path: object, step: int) -> None:
        """Record a checkpoint that was written, and the step whose state it holds."""
        self.saved, self.saved_step = str(path), step

    def record_registered(self, hooks: frozenset[str]) -> None:
        """Record the hooks that are registered on the model when training starts."""
        self.registered = hooks

    def record_resumed(self) -> None:
        """Record that hooks were queried for a checkpoint."""
        self.resumed = True

    def record_scored(self, weights: str | None) -> None:
        """Record which weights an evaluation scored, ``"model"`` or ``"ema"``."""
        self.scored = weights
