"""The state table: everything a run needs to go on to the bit, gathered and restored in one order.

Gathered: model, scheduler, optimizer, scaler, averages, progress, data, the parts of the epoch driver, hooks, RNG.
Restored in the same order, the RNG last; only the parts, which may refuse, come first, so that a state that does not
fit changes nothing. A missing or unknown entry is an error or a stated warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from treadle.checkpoint.base_fingerprints import without
from treadle.checkpoint.buffers import HostBuffers
from treadle.checkpoint.schema import FORMAT_NAME, FORMAT_VERSION, KEYS, to_plain, versions
from treadle.distributed.state_names import load_model_state, model_state
from treadle.engine.changed import note_what_is_overruled, note_what_starts_fresh, refuse_what_does_not_fit
from treadle.engine.fitting import fitting_state
from treadle.engine.hook import BaseHook
from treadle.engine.rank_state import gather_rank_state, load_epoch_means, own_rng
from treadle.errors import CheckpointError
from treadle.optim.optimizer import load_optimizer_state, optimizer_state

if TYPE_CHECKING:
    from treadle.engine.loop import Engine
    from treadle.optim.ema import Ema


class StatePart(Protocol):
    """Adds top-level keys of the schema to a checkpoint, as the epoch driver does."""

    @property
    def finished(self) -> bool:
        """Whether this part wants no more training."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the keys and their values."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores them from a whole checkpoint tree."""
        ...


def collect_state(engine: Engine, buffers: HostBuffers | None = None, *, parts: bool = False) -> dict[str, Any]:
    """Returns the checkpoint tree of an engine: plain values and CPU copies that a following step cannot change.

    All ranks take part. Of a sharded model, rank 0 gets the whole tensors and the others tensors without memory.

    Args:
        engine: what to copy.
        buffers: memory for the copies; None takes fresh memory.
        parts: each rank gets its own part of the tensors that are spread over ranks.
    """
    tree: dict[str, Any] = dict.fromkeys(KEYS)
    tree["format"] = {
        "name": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "face": engine.face,
        "scored": engine.scored,
    }
    base = engine.base.unchanged(engine.model)
    tree["model"] = without(model_state(engine.model), base)
    tree["base"] = base or None
    tree["optimizer"] = optimizer_state(engine.optimizer, engine.model)
    tree["scheduler"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
    tree["scaler"] = engine.precision.scaler.state_dict() if engine.precision.scaled else None
    tree["ema"] = {name: _average_state(ema, base) for name, ema in engine.averages.items()} or None
    tree["epoch"] = engine.epoch
    tree["global_step"] = engine.step
    tree["progress"] = _progress_state(engine)
    tree["data"] = engine.cursor.state_dict()
    tree["config"] = engine.config
    tree["versions"] = versions()
    tree["hooks"] = {}
    for part in engine.state_parts:
        tree.update(part.state_dict())
    _ask_hooks(engine, tree)
    gather_rank_state(engine, tree)
    return {key: to_plain(value, key, buffers=buffers, parts=parts) for key, value in tree.items()}


def _average_state(ema: Ema, base: Collection[str]) -> dict[str, Any]:
    entry = ema.snapshot()
    return {**entry, "shadow": without(entry["shadow"], base)}  # the average of what does not move is itself


def _progress_state(engine: Engine) -> dict[str, Any]:
    return {
        "applied_steps": engine.applied_steps,
        "micro_steps": engine.micro_steps,
        "epoch_applied_steps": engine.epoch_applied_steps,
        "epoch_means": engine.epoch_means.state_dict(),
        "lr": engine.last_lr,
        "device": engine.device.type,
    }


def _load_progress(engine: Engine, tree: Mapping[str, Any]) -> None:
    progress = tree.get("progress") or {}
    engine.step = int(tree.get("global_step") or 0)
    engine.cursor.restart()
    engine.cursor.epoch = int(tree.get("epoch") or 0)
    engine.applied_steps = int(progress.get("applied_steps", engine.step))
    engine.micro_steps = int(progress.get("micro_steps", 0))
    engine.epoch_applied_steps = int(progress.get("epoch_applied_steps", 0))
    engine.last_lr = list(progress.get("lr", []))
    engine.epoch_means.reset()
    if "epoch_means" in progress:
        load_epoch_means(engine.epoch_means, progress["epoch_means"], device=engine.device)
    described = tree.get("format")
    engine.scored = described.get("scored") if isinstance(described, Mapping) else None


def _ask_hooks(engine: Engine, tree: dict[str, Any]) -> None:
    for hook in engine.hooks:
        before = {key: id(value) for key, value in tree.items()}
        others = dict(tree["hooks"])
        hook.on_state_dict(engine, tree)
        changed = [key for key, identity in before.items() if key not in tree or id(tree[key]) != identity]
        kept = tree.get("hooks") or {}
        changed += [f"hooks.{key}" for key, value in others.items() if kept.get(key) is not value]
        if changed:
            raise CheckpointError(
                f"{type(hook).__name__}.on_state_dict overwrites {changed[0]!r}, which belongs to somebody else; "
                'write to state_dict["hooks"][self.state_key]'
            )


def restore_state(engine: Engine, tree: Mapping[str, Any]) -> None:
    """Restores a checkpoint tree into an engine, in place.

    Raises:
        CheckpointError: the model or the optimizer does not fit.
    """
    note_what_starts_fresh(engine, tree)
    tree, kept = _fitting(engine, tree)
    for part in engine.state_parts:
        part.load_state_dict(tree)
    note_what_is_overruled(engine, tree)
    _load_what_a_step_changes(engine, tree, kept)
    _load_progress(engine, tree)
    rng = own_rng(engine, tree.get("rng"))
    if tree.get("data") is not None:
        engine.cursor.load_state_dict(tree["data"], rng=rng)
    _load_hooks(engine, tree)
    if rng is not None:
        rng.restore()


def _fitting(engine: Engine, tree: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Returns the tree without what was asked to be left out, and the names of weights that stay; changes nothing."""
    kept = engine.base.check(engine.model, tree.get("base"))
    if not engine.state_options.strict:
        tree, kept = fitting_state(engine, tree, kept)
    refuse_what_does_not_fit(engine, tree, kept)
    return tree, kept


def _load_what_a_step_changes(engine: Engine, tree: Mapping[str, Any], kept: frozenset[str]) -> None:
    load_model_state(engine.model, tree["model"], kept=kept)
    _load_schedule(engine, tree)
    if tree.get("optimizer") is not None:
        load_optimizer_state(engine.optimizer, engine.model, tree["optimizer"])
    _load_scaler(engine, tree.get("scaler"))
    _load_averages(engine, tree.get("ema") or {}, kept)
    engine.num_loads += 1


def roll_back(engine: Engine, tree: Mapping[str, Any]) -> None:
    """Restores what a step changes: weights, optimizer, schedule, scaler, averages. Data and random numbers go on.

    The count of attempted steps goes on too, so that no file or log point is numbered twice; that of applied steps is
    the checkpoint's, since those after it are undone.

    Raises:
        CheckpointError: the model or the optimizer does not fit.
    """
    _load_what_a_step_changes(engine, *_fitting(engine, tree))
    engine.applied_steps = int((tree.get("progress") or {}).get("applied_steps", engine.applied_steps))


def _load_schedule(engine: Engine, tree: Mapping[str, Any]) -> None:
    saved = tree.get("scheduler")
    if engine.lr_scheduler is not None and saved is not None:
        engine.lr_scheduler.load_state_dict(_as_built(engine.lr_scheduler, saved))
        if (tree.get("progress") or {}).get("applied_steps"):
            # The optimizer did step, in another process; torch would warn of a wrong order at an epoch's end.
            engine.optimizer._opt_called = True  # type: ignore[attr-defined]
    elif engine.lr_scheduler is not None and "progress" in tree:
        engine.logger.warning("no scheduler state is loaded: the scheduler starts fresh and the resume is not exact")
    elif saved is not None:
        engine.logger.warning("the checkpoint's scheduler state is ignored: this run has no scheduler")


def _as_built(scheduler: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a scheduler's saved state, and those of the schedulers that it is made of, in their own containers."""
    before = vars(scheduler)
    state = {key: _as_before(before.get(key), value) for key, value in saved.items()}
    if state.get("_schedulers"):
        state["_schedulers"] = [
            _as_built(part, own) for part, own in zip(scheduler._schedulers, state["_schedulers"], strict=True)
        ]
    return state


def _as_before(before: Any, value: Any) -> Any:
    """Gives a plain value the container type that the scheduler made it with, such as MultiStepLR's Counter."""
    container = type(before) in (tuple, Counter) and isinstance(value, (list, dict))
    return type(before)(value) if container else value


def _load_scaler(engine: Engine, saved: Any) -> None:
    if engine.precision.scaled and saved:
        engine.precision.scaler.load_state_dict(dict(saved))
    elif engine.precision.scaled:
        engine.logger.warning("the checkpoint has no gradient-scaler state: the fp16 scale starts fresh")
    elif saved:
        engine.logger.warning("the checkpoint's gradient-scaler state is ignored: this run does not use fp16")


def _load_averages(engine: Engine, saved: Mapping[str, Any], kept: Collection[str]) -> None:
    for name, ema in engine.averages.items():
        if name in saved:
            ema.restore(saved[name], kept=kept)
        else:
            engine.logger.warning(
                "the checkpoint has no average %r: it starts from the loaded weights, not from the initial ones",
                name,
            )
            ema.restart_from(engine.model)
    for name in saved:
        if name not in engine.averages:
            engine.logger.warning("the checkpoint's average %r is ignored: this run keeps no such average", name)


def _load_hooks(engine: Engine, tree: Mapping[str, Any]) -> None:
    saved = tree.get("hooks") or {}
    known = {hook.state_key for hook in engine.hooks}
    for key in saved:
        if key not in known:
            engine.logger.warning(
                "the checkpoint's state of hook %r is ignored: this run has no such hook", key,
                extra={"topic": "ignored hook state"},
            )  # fmt: skip
    own_keys = set(tree) - set(KEYS)  # a hook may keep its state under a key of its own
    for hook in engine.hooks:
        keeps_state = type(hook).on_state_dict is not BaseHook.on_state_dict
        if keeps_state and "hooks" in tree and not own_keys and hook.state_key not in saved:
            engine.logger.warning("the checkpoint has no state of hook %r: it starts fresh", hook.state_key)
        hook.on_load_state_dict(engine, tree)
