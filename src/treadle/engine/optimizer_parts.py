"""Checkpoint parts of the optimizer, the schedule and the gradient scaler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle.checkpoint.attributes import missing_from_state
from treadle.checkpoint.schema import from_plain, to_plain
from treadle.engine.state_part import Difference, Notice, Saved, StatePart, unlike
from treadle.errors import CheckpointError
from treadle.optim.optimizer import aligned_groups, load_optimizer_state, optimizer_state, overridden_settings
from treadle.optim.optimizer_state import OWN, by_position
from treadle.optim.saved_schedule import as_built, overridden_schedule, rate_jump, refuse_another_schedule
from treadle.optim.schedules import scheduler_state

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


class SchedulerPart(StatePart):
    """State of the learning-rate scheduler."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        scheduler: Any = engine.lr_scheduler
        state = tree["scheduler"] = None if scheduler is None else scheduler_state(scheduler)
        if state is not None and type(scheduler).state_dict is not LRScheduler.state_dict:
            tree["scheduler"] = to_plain(state, "scheduler", encoding="exact")

    def check(self, engine: Engine, saved: Saved) -> None:
        if engine.lr_scheduler is not None and saved.get("scheduler") is not None:
            refuse_another_schedule(engine.lr_scheduler, from_plain(saved.get("scheduler")))

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        scheduler, state = engine.lr_scheduler, from_plain(saved.get("scheduler"))
        if scheduler is not None and state is not None:
            objects = saved.part("objects")
            yield from _checkpoint_wins("schedule", overridden_schedule(scheduler, state, objects=objects))
            jump = rate_jump(scheduler, state, objects)
            yield from [Notice(jump)] if jump is not None else []
        elif scheduler is not None and "progress" in saved.tree:
            yield Notice("no scheduler state was loaded: the scheduler starts fresh, so the resume is not exact")
        elif state is not None:
            yield Notice("the checkpoint's scheduler state is ignored: this run has no scheduler")

    def load(self, engine: Engine, saved: Saved) -> None:
        state = saved.get("scheduler")
        if engine.lr_scheduler is None or state is None:
            return
        engine.lr_scheduler.load_state_dict(as_built(engine.lr_scheduler, from_plain(state)))
        if saved.part("progress").get("applied_steps"):
            # The optimizer did step, in another process; torch would warn about a wrong order at the end of an epoch.
            engine.optimizer._opt_called = True  # type: ignore[attr-defined]

    def differences(self, engine: Engine, saved: Saved) -> Iterator[Difference]:
        state = saved.get("scheduler")
        if engine.lr_scheduler is not None and state is not None and saved.same_torch:
            now = to_plain(scheduler_state(engine.lr_scheduler), "scheduler", encoding="odd")
            own = getattr(engine.lr_scheduler, "settings_of_run", ())
            kept = [{k: v for k, v in one.items() if k not in own} for one in (from_plain(state), now)]
            yield from unlike(to_plain(kept[0], encoding="odd"), kept[1], "scheduler")


class OptimizerPart(StatePart):
    """State of the optimizer, by parameter."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        if (foreign := engine.state.beginning.foreign_group(engine)) is not None:
            raise CheckpointError(foreign)
        tree["optimizer"] = optimizer_state(engine.optimizer, engine.model)
        if changed := missing_from_state(tree["optimizer"].get(OWN), engine.state.optimizer_attributes.changed()):
            tree["optimizer"]["attributes"] = changed
        own = type(engine.optimizer).state_dict is not Optimizer.state_dict
        for name in () if own else engine.state.optimizer_attributes.lost():
            engine.state.warn_of_lost(
                engine, f"optimizer: {name}", "Define state_dict() and load_state_dict() in the class"
            )

    def check(self, engine: Engine, saved: Saved) -> None:
        if saved.get("optimizer") is not None:
            aligned_groups(engine.optimizer, engine.model, saved.get("optimizer"))

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        if saved.get("optimizer") is not None:
            scheduled = engine.lr_scheduler is not None
            built = from_plain(saved.part("progress").get("built") or ())
            settings = overridden_settings(engine.optimizer, saved.get("optimizer"), scheduled=scheduled, built=built)
            yield from _checkpoint_wins("optimizer", settings)

    def load(self, engine: Engine, saved: Saved) -> None:
        if saved.get("optimizer") is not None:
            state = dict(saved.part("optimizer"))
            attributes = state.pop("attributes", {})
            state = from_plain(state)
            kept = engine.state.optimizer_attributes
            if type(engine.optimizer).state_dict is Optimizer.state_dict:
                load_optimizer_state(engine.optimizer, engine.model, state)
                kept.restore(attributes)
                return
            with kept.completing(attributes):
                load_optimizer_state(engine.optimizer, engine.model, state)

    def differences(self, engine: Engine, saved: Saved) -> Iterator[Difference]:
        if saved.get("optimizer") is not None and saved.same_torch:
            now = optimizer_state(engine.optimizer, engine.model)
            state = {key: value for key, value in saved.part("optimizer").items() if key != "attributes"}
            # An option that an older torch lacks exists in memory only, with its default.
            if "param_groups" in now and "param_groups" in state:  # else its format is custom
                now["param_groups"] = [
                    {key: value for key, value in group.items() if key in before}
                    for group, before in zip(now["param_groups"], state["param_groups"], strict=True)
                ]
            yield from unlike(by_position(state), by_position(now), "optimizer")


class ScalerPart(StatePart):
    """State of the fp16 gradient scaler."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        tree["scaler"] = engine.precision.scaler.state_dict() if engine.precision.scaled else None

    def check(self, engine: Engine, saved: Saved) -> None:
        state = saved.get("scaler")
        if not (engine.precision.scaled and state):
            return
        live = engine.precision.scaler.state_dict()
        wrong = [key for key in live if not (isinstance(state, Mapping) and isinstance(state.get(key), (int, float)))]
        if wrong:
            raise CheckpointError(
                f"scaler: the checkpoint's gradient-scaler state has no number for {', '.join(wrong)}; remove it "
                "from the file to start with a fresh scale"
            )

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        if engine.precision.scaled and not saved.get("scaler"):
            yield Notice("the checkpoint has no gradient-scaler state: the fp16 scale starts fresh")
        elif saved.get("scaler") and not engine.precision.scaled:
            yield Notice("the checkpoint's gradient-scaler state is ignored: this run does not use fp16")

    def load(self, engine: Engine, saved: Saved) -> None:
        if engine.precision.scaled and saved.get("scaler"):
            engine.precision.scaler.load_state_dict(dict(saved.get("scaler")))


def _checkpoint_wins(what: str, settings: list[str]) -> Iterator[Notice]:
    if settings:
        yield Notice(
            f"the {what} continues with the checkpoint's {', '.join(settings)}; to change a setting, set it in a "
            "hook's on_before_train, or start a new run from load_weights(...)"
        )
