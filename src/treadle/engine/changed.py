"""What changed between a checkpoint and the run that takes it: refused before anything is loaded, or said in words."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from treadle.checkpoint.schema import versions
from treadle.distributed.state_names import check_model_state
from treadle.errors import CheckpointError
from treadle.optim.optimizer import aligned_groups, is_same_setting, overruled_settings

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

# Of torch's schedulers: what moves with the steps, or belongs to the optimizer's groups. The rest are settings.
_MOVING = {
    "base_lrs", "max_lrs", "last_epoch", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter", "mode_worse",
    "total_size", "verbose",
}  # fmt: skip


def refuse_what_does_not_fit(engine: Engine, tree: Mapping[str, Any], kept: Collection[str]) -> None:
    """Looks at model, optimizer, schedule, gradient scaler and averages before any of them is changed.

    Raises:
        CheckpointError: one of them is not that of the checkpoint.
    """
    check_model_state(engine.model, tree["model"], kept=kept)
    if tree.get("optimizer") is not None:
        aligned_groups(engine.optimizer, engine.model, tree["optimizer"])
    if engine.lr_scheduler is not None and tree.get("scheduler") is not None:
        _refuse_another_schedule(engine.lr_scheduler, tree["scheduler"])
    if engine.precision.scaled and tree.get("scaler"):
        _refuse_no_scaler(engine.precision.scaler.state_dict(), tree["scaler"])
    for name, entry in (tree.get("ema") or {}).items():
        if name in engine.averages:
            check_model_state(engine.averages[name].module, entry["shadow"], what="average", kept=kept)


def _refuse_no_scaler(live: Mapping[str, Any], saved: Any) -> None:
    wrong = [key for key in live if not (isinstance(saved, Mapping) and isinstance(saved.get(key), (int, float)))]
    if wrong:
        raise CheckpointError(
            f"scaler: the checkpoint's state of the gradient scaler has no number for {', '.join(wrong)}; take it out "
            "of the file to start with a fresh scale"
        )


def note_what_is_overruled(engine: Engine, tree: Mapping[str, Any]) -> None:
    """Warns of settings of the optimizer and the schedule that were built otherwise than the checkpoint has them."""
    scheduled = engine.lr_scheduler is not None
    if tree.get("optimizer") is not None:
        settings = overruled_settings(engine.optimizer, tree["optimizer"], scheduled=scheduled)
        _say_that_the_checkpoint_wins(engine, "optimizer", settings)
    if scheduled and tree.get("scheduler") is not None:
        _say_that_the_checkpoint_wins(engine, "schedule", overruled_schedule(engine.lr_scheduler, tree["scheduler"]))
        _say_that_the_rate_jumps(engine, tree["scheduler"])


def _say_that_the_checkpoint_wins(engine: Engine, what: str, settings: list[str]) -> None:
    if settings:
        engine.logger.warning(
            "the %s goes on with the checkpoint's %s; to change a setting, set it in a hook's on_before_train, "
            "or start a new run from load_weights(...)",
            what, ", ".join(settings),
        )  # fmt: skip


def _say_that_the_rate_jumps(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Warns where a function of this run, which no checkpoint holds, is not the one of the checkpoint's schedule."""
    scheduler = engine.lr_scheduler
    if type(scheduler) is not LambdaLR or any(saved.get("lr_lambdas") or ()):  # the state of callable objects is loaded
        return
    moves, bases, old = saved["last_epoch"], saved["base_lrs"], saved.get("_last_lr") or ()
    rates = [float(base * factor(moves)) for base, factor in zip(bases, scheduler.lr_lambdas, strict=False)]
    for rate, before in zip(rates, map(float, old), strict=False):
        if not math.isclose(rate, before, rel_tol=1e-6):
            engine.logger.warning(
                "after %d moves the schedule of this run gives a learning rate of %g, the checkpoint's gave %g: from "
                "here on the rate follows this run's; to go on along the old curve, build the schedule as it was, with "
                "the same length",
                moves, rate, before,
            )  # fmt: skip
            return


def overruled_schedule(scheduler: Any, saved: Mapping[str, Any]) -> list[str]:
    """Returns what a checkpoint's schedule sets otherwise than it was built: ``"T_max=10 (built as 20)"``.

    Of torch's schedulers, and those that they are made of; what others keep may move with the steps.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> old, new = (torch.optim.lr_scheduler.StepLR(optimizer, size) for size in (1, 2))
        >>> overruled_schedule(new, old.state_dict())
        ['step_size=1 (built as 2)']
    """
    return [
        f"{key}={old!r} (built as {new[key]!r})"
        for new, settings in _pairs(scheduler, saved)
        for key, old in settings.items()
        if key in new and not is_same_setting(old, new[key])
    ]


def _refuse_another_schedule(scheduler: Any, saved: Mapping[str, Any]) -> None:
    for new, old in _pairs(scheduler, saved):
        missing, strange = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
        if missing and strange:
            raise CheckpointError(
                f"scheduler: the checkpoint's is of another kind: it has {', '.join(strange)}, the "
                f"{type(scheduler).__name__} of this run has {', '.join(missing)}. Build it as it was, or give "
                "load_state_dict a state whose 'scheduler' is None, and this one starts fresh"
            )


def _pairs(scheduler: Any, saved: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields the settings of a scheduler of torch and those saved, then of each scheduler that it is made of."""
    if not type(scheduler).__module__.startswith("torch."):
        return
    own = {key: value for key, value in scheduler.state_dict().items() if _is_setting(key)}
    yield own, {key: value for key, value in saved.items() if _is_setting(key)}
    for part, state in zip(getattr(scheduler, "_schedulers", []), saved.get("_schedulers") or [], strict=False):
        yield from _pairs(part, state)


def _is_setting(key: str) -> bool:
    return key == "_milestones" or not (key.startswith("_") or key in _MOVING)


def note_what_starts_fresh(engine: Engine, tree: Mapping[str, Any]) -> None:
    """Warns of what a checkpoint lacks, and of versions and devices under which kernels may round differently.

    Raises:
        CheckpointError: it has no model.
    """
    if "model" not in tree:
        raise CheckpointError(f"the checkpoint has no 'model' entry; its keys are {sorted(tree)}")
    missing = [key for key in ("optimizer", "global_step", "progress", "rng", "data") if tree.get(key) is None]
    if engine.lr_scheduler is not None and tree.get("scheduler") is None and "progress" not in tree:
        missing.append("scheduler")  # of a checkpoint of treadle it is said where it would be loaded
    written = {key for part in engine.state_parts for key in part.state_dict()}  # by an epoch driver
    missing += [key for key in ("selection", "history") if key in written and key not in tree]
    if missing:
        engine.logger.warning(
            "nothing is loaded for %s, which the checkpoint lacks or which was left out: these start fresh and the "
            "resume is not exact",
            ", ".join(missing),
        )
    saved = tree.get("versions") or {}
    for name, now in versions().items():
        if name in ("torch", "numpy") and saved.get(name) not in (None, now):
            engine.logger.warning(
                "the checkpoint was written with %s %s and this is %s: kernels may round differently",
                name,
                saved[name],
                now,
            )
    _say_what_the_device_changes(engine, (tree.get("progress") or {}).get("device"))


def _say_what_the_device_changes(engine: Engine, before: str | None) -> None:
    """Warns of another kind of device than that of the checkpoint, and of one whose kernels may vary from run to run.

    Args:
        engine: of this run.
        before: the type of the checkpoint's device; None where it does not say.
    """
    now = engine.device.type
    if before not in (None, now):
        engine.logger.warning(
            "the checkpoint was written on %s and this run is on %s: kernels round differently, and what is "
            "drawn at random on the device is something else",
            before, now,
        )  # fmt: skip
    elif now != "cpu" and not torch.are_deterministic_algorithms_enabled():
        engine.logger.warning(
            "the resume is exact only if the kernels of this model are deterministic: on %s, those that add with "
            "atomics round otherwise each time; set_seed(seed, deterministic=True) chooses others",
            now,
        )
