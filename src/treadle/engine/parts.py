"""Parts of a checkpoint: each collects its keys, refuses what does not fit, warns of changes, and loads."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle import distributed
from treadle.checkpoint.attributes import beside
from treadle.checkpoint.base_fingerprints import without
from treadle.checkpoint.files import FORMAT_NAME
from treadle.checkpoint.plain_values import digest, unequal
from treadle.checkpoint.schema import (
    FORMAT_VERSION,
    KEYS,
    OPTIONAL_KEYS,
    from_plain,
    is_encoded,
    to_plain,
    versions,
)
from treadle.distributed import is_dtensor
from treadle.distributed.shards import placed_like, placed_state
from treadle.distributed.state_names import check_model_state, load_model_state, model_state, without_wrappers
from treadle.engine.hook import BaseHook
from treadle.engine.module_state import ModulesPart
from treadle.engine.own_objects import ObjectsPart, is_ours
from treadle.engine.state_part import Difference, Notice, Saved, StatePart
from treadle.errors import CheckpointError
from treadle.optim.ema import Ema
from treadle.optim.evaluation_point import NAME as POINT
from treadle.optim.evaluation_point import at_evaluation_point, has_modes
from treadle.optim.optimizer import (
    aligned_groups,
    load_optimizer_state,
    optimizer_state,
    overruled_settings,
)
from treadle.optim.optimizer_state import OWN, by_position
from treadle.optim.saved_schedule import as_built, jump_of_the_rate, overruled_schedule, refuse_another_schedule
from treadle.optim.schedules import scheduler_state
from treadle.seed import RngState, mix_seed

if TYPE_CHECKING:
    from treadle.engine.loop import Engine

_OF_PARTS = {*KEYS, *OPTIONAL_KEYS}
_OWN_DATA = ("opening", "generators", "loader", "objects")


class FormatPart(StatePart):
    """Format, configuration and versions: nothing of them is loaded but which weights were scored."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        tree["format"] = {
            "name": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "face": engine.face,
            "scored": engine.state.scored,
        }
        tree["config"] = engine.config
        tree["versions"] = versions()

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        missing = [key for key in ("optimizer", "global_step", "progress", "rng", "data") if saved.get(key) is None]
        if engine.lr_scheduler is not None and saved.get("scheduler") is None and "progress" not in saved.tree:
            missing.append("scheduler")  # of a checkpoint of treadle the scheduler's part warns
        written = {key for driver in engine.state.drivers for key in driver.state_dict()}
        missing += [key for key in ("selection", "history") if key in written and key not in saved.tree]
        if missing:
            yield Notice(
                f"nothing is loaded for {', '.join(missing)}, which the checkpoint lacks or which was left out: these "
                "start fresh and the resume is not exact"
            )
        before = saved.part("versions")
        for name, now in versions().items():
            if name in ("torch", "numpy") and before.get(name) not in (None, now):
                yield Notice(
                    f"the checkpoint was written with {name} {before[name]} and this is {now}: kernels may round "
                    "differently"
                )
        yield from _device_notices(saved.part("progress").get("device"), engine.device.type)

    def load(self, engine: Engine, saved: Saved) -> None:
        described = saved.get("format")
        engine.state.record_scored(described.get("scored") if isinstance(described, Mapping) else None)


def _device_notices(before: str | None, now: str) -> Iterator[Notice]:
    """Yield a warning of another kind of device, or of one whose kernels may vary from run to run."""
    if before not in (None, now):
        yield Notice(
            f"the checkpoint was written on {before} and this run is on {now}: kernels round differently, and what is "
            "drawn at random on the device is something else"
        )
    elif now != "cpu" and not torch.are_deterministic_algorithms_enabled():
        yield Notice(
            f"the resume is exact only if the kernels of this model are deterministic: on {now}, those that add with "
            "atomics round otherwise each time; set_seed(seed, deterministic=True) chooses others"
        )


class DriversPart(StatePart):
    """Keys of the objects around the engine: history, metrics and the best rule of an epoch driver."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        for driver in engine.state.drivers:
            tree.update(driver.state_dict())

    def load(self, engine: Engine, saved: Saved) -> None:
        for driver in engine.state.drivers:
            driver.load_state_dict(saved.tree)


class ModelPart(StatePart):
    """Weights and buffers, but for frozen weights that are as they were at the start."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        base = engine.state.base.unchanged(engine.model)
        tree["model"] = without(model_state(engine.model), base)
        tree["base"] = base or None

    def check(self, engine: Engine, saved: Saved) -> None:
        check_model_state(engine.model, saved.tree["model"], kept=saved.kept)

    def load(self, engine: Engine, saved: Saved) -> None:
        load_model_state(engine.model, from_plain(saved.tree["model"]), kept=saved.kept)

    def differences(self, engine: Engine, saved: Saved) -> Iterator[Difference]:
        live = model_state(engine.model)
        loaded = without_wrappers(saved.tree["model"], live)
        yield from unlike(loaded, {name: value for name, value in live.items() if name in loaded}, "model")


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
            yield from _checkpoint_wins("schedule", overruled_schedule(scheduler, state))
            if not any(path.startswith("scheduler.lr_lambdas") for path in saved.part("objects")):
                jump = jump_of_the_rate(scheduler, state)
                yield from [Notice(jump)] if jump is not None else []
        elif scheduler is not None and "progress" in saved.tree:
            yield Notice("no scheduler state is loaded: the scheduler starts fresh and the resume is not exact")
        elif state is not None:
            yield Notice("the checkpoint's scheduler state is ignored: this run has no scheduler")

    def load(self, engine: Engine, saved: Saved) -> None:
        state = saved.get("scheduler")
        if engine.lr_scheduler is None or state is None:
            return
        engine.lr_scheduler.load_state_dict(as_built(engine.lr_scheduler, from_plain(state)))
        if saved.part("progress").get("applied_steps"):
            # The optimizer did step, in another process; torch would warn of a wrong order at an epoch's end.
            engine.optimizer._opt_called = True  # type: ignore[attr-defined]

    def differences(self, engine: Engine, saved: Saved) -> Iterator[Difference]:
        state = saved.get("scheduler")
        if engine.lr_scheduler is not None and state is not None and saved.same_torch:
            now = to_plain(scheduler_state(engine.lr_scheduler), "scheduler", encoding="odd")
            yield from unlike(to_plain(from_plain(state), encoding="odd"), now, "scheduler")


class OptimizerPart(StatePart):
    """State of the optimizer, by parameter."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        tree["optimizer"] = optimizer_state(engine.optimizer, engine.model)
        if changed := beside(tree["optimizer"].get(OWN), engine.state.optimizer_attributes.changed()):
            tree["optimizer"]["attributes"] = changed
        own = type(engine.optimizer).state_dict is not Optimizer.state_dict
        for name in () if own else engine.state.optimizer_attributes.lost():
            _warn_of_lost(engine, f"optimizer: {name}", "Give the class state_dict() and load_state_dict()")

    def check(self, engine: Engine, saved: Saved) -> None:
        if saved.get("optimizer") is not None:
            aligned_groups(engine.optimizer, engine.model, saved.get("optimizer"))

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        if saved.get("optimizer") is not None:
            scheduled = engine.lr_scheduler is not None
            settings = overruled_settings(engine.optimizer, saved.get("optimizer"), scheduled=scheduled)
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
            # A switch that an older torch did not have is in memory alone, with its default.
            if "param_groups" in now and "param_groups" in state:  # else it has its own format
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
                f"scaler: the checkpoint's state of the gradient scaler has no number for {', '.join(wrong)}; take it "
                "out of the file to start with a fresh scale"
            )

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        if engine.precision.scaled and not saved.get("scaler"):
            yield Notice("the checkpoint has no gradient-scaler state: the fp16 scale starts fresh")
        elif saved.get("scaler") and not engine.precision.scaled:
            yield Notice("the checkpoint's gradient-scaler state is ignored: this run does not use fp16")

    def load(self, engine: Engine, saved: Saved) -> None:
        if engine.precision.scaled and saved.get("scaler"):
            engine.precision.scaler.load_state_dict(dict(saved.get("scaler")))


class AveragesPart(StatePart):
    """Averaged weights that hooks keep, by name."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        base = tree["base"] or ()
        tree["ema"] = {name: _average_state(ema, base) for name, ema in engine.averages.items()} or None
        if not engine.averages and has_modes(engine.optimizer):
            tree["ema"] = {POINT: {"shadow": without(_weights_at_evaluation_point(engine), base)}}

    def check(self, engine: Engine, saved: Saved) -> None:
        for name, entry in saved.part("ema").items():
            if name in engine.averages:
                module = engine.averages[name].module
                check_model_state(module, entry["shadow"], what="average", kept=saved.kept)

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        known, live = saved.part("ema"), engine.averages
        for name in live:
            if name not in known:
                yield Notice(
                    f"the checkpoint has no average {name!r}: it starts from the loaded weights, not from the initial "
                    "ones"
                )
        for name in known:
            if name not in (*live, POINT):
                yield Notice(f"the checkpoint's average {name!r} is ignored: this run keeps no such average")

    def load(self, engine: Engine, saved: Saved) -> None:
        known = saved.part("ema")
        for name, ema in engine.averages.items():
            if name in known:
                ema.restore(from_plain(known[name]), kept=saved.kept)
            else:
                ema.restart_from(engine.model)

    def differences(self, engine: Engine, saved: Saved) -> Iterator[Difference]:
        for name, entry in saved.part("ema").items():
            if name in engine.averages:
                now = engine.averages[name].snapshot()["shadow"]
                loaded = without_wrappers(entry["shadow"], now)
                yield from unlike(loaded, {key: now[key] for key in now if key in loaded}, f"ema.{name}")


class ProgressPart(StatePart):
    """Counters of the run and the sums of the running epoch."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        tree["epoch"] = engine.epoch
        tree["global_step"] = engine.progress.step
        engine.state.record_moved_settings(engine)
        tree["progress"] = {**engine.progress.state_dict(), "device": engine.device.type}

    def load(self, engine: Engine, saved: Saved) -> None:
        step = int(saved.get("global_step") or 0)
        engine.progress.load_state_dict(saved.part("progress"), step=step, device=engine.device)
        engine.settings = dataclasses.replace(engine.settings, **engine.progress.moved_settings)


class DataPart(StatePart):
    """Position in the data, with the random state of this rank, which an epoch is opened again under."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        tree["data"] = engine.cursor.state_dict()

    def load(self, engine: Engine, saved: Saved) -> None:
        engine.cursor.restart(epoch=int(saved.get("epoch") or 0))
        if saved.get("data") is not None:
            engine.cursor.load_state_dict(saved.get("data"), rng=_rng_of_rank(engine, saved))


class HooksPart(StatePart):
    """State of the hooks, by their keys or under their own."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        tree["hooks"] = {}
        for hook in engine.hooks:
            before = {key: id(value) for key, value in tree.items()}
            others = dict(tree["hooks"])
            hook.on_state_dict(engine, tree)
            self._add_attributes(engine, hook.state_key, tree)
            changed = [key for key, identity in before.items() if key not in tree or id(tree[key]) != identity]
            kept = tree.get("hooks") or {}
            changed += [f"hooks.{key}" for key, value in others.items() if kept.get(key) is not value]
            if changed:
                raise CheckpointError(
                    f"{type(hook).__name__}.on_state_dict overwrites {changed[0]!r}, which belongs to another part; "
                    'write to state_dict["hooks"][self.state_key]'
                )

        for key, attributes in engine.state.hook_attributes.items():
            if changed_here := beside(tree["hooks"].get(key), attributes.changed()):
                tree.setdefault("objects", {})[_of_hook(key)] = {"attributes": changed_here}

    def _add_attributes(self, engine: Engine, key: str, tree: dict[str, Any]) -> None:
        """Add what a hook holds that keeps no state itself."""
        objects = engine.state.hook_objects.get(key)
        if objects is None:
            return
        if states := objects.collect():
            tree["hooks"][key] = {"objects": states}
        for name in objects.lost():
            advice = "Make it in __init__, as plain values, or give the hook on_state_dict and on_load_state_dict"
            _warn_of_lost(engine, f"hook {key}: {name}", advice)

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        kept, known = saved.part("hooks"), {hook.state_key for hook in engine.hooks}
        unknown = [key for key in kept if key not in known]
        stateful = [
            hook
            for hook in engine.hooks
            if type(hook).on_state_dict is not BaseHook.on_state_dict and not hook.implicit
        ]
        without = [hook for hook in stateful if "hooks" in saved.tree and hook.state_key not in kept]
        # A user's hook may keep its state under a key of its own, beside the hooks' or among them.
        own_keys = set(saved.tree) - _OF_PARTS
        if unknown and any(not is_ours(hook) for hook in without):
            return
        for key in unknown:
            text = f"the checkpoint's state of hook {key!r} is ignored: this run has no such hook"
            yield Notice(text, topic="ignored hook state")
        for hook in without if not own_keys else ():
            yield Notice(f"the checkpoint has no state of hook {hook.state_key!r}: it starts fresh")

    def check(self, engine: Engine, saved: Saved) -> None:
        if engine.state.options.strict:
            for key, objects in engine.state.hook_objects.items():
                objects.check(_objects_of(saved, key))

    def load(self, engine: Engine, saved: Saved) -> None:
        own = {key: from_plain(value) for key, value in saved.tree.items() if key == "hooks" or key not in _OF_PARTS}
        tree = {**saved.tree, **own}
        for hook in engine.hooks:
            attributes = engine.state.hook_attributes.get(hook.state_key)
            entry = saved.part("objects").get(_of_hook(hook.state_key)) or {}
            with contextlib.nullcontext() if attributes is None else attributes.completing(entry.get("attributes", {})):
                hook.on_load_state_dict(engine, tree)
        for key, objects in engine.state.hook_objects.items():
            objects.restore(_objects_of(saved, key))

    def differences(self, engine: Engine, saved: Saved) -> Iterator[Difference]:
        for key, objects in engine.state.hook_objects.items():
            for path, how in objects.differences(_objects_of(saved, key)):
                yield f"hooks.{key}.{path}", how


class RngPart(StatePart):
    """Random state of every rank; collected after all that may draw, and loaded last."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        """Add what each rank has to itself to a tree whose other entries are alike on all ranks."""
        own = {
            "rng": RngState.capture().to_plain(),
            "data": {key: tree["data"][key] for key in _OWN_DATA if key in tree["data"]},
            "epoch_means": tree["progress"]["epoch_means"],
            "attributes": {name: digest(value) for name, value in _attributes_in(tree)},
        }
        if distributed.world_size() == 1:
            tree["rng"] = [own["rng"]]
            return
        everyone = distributed.gather_objects(to_plain(own, "rank", encoding="exact"))
        tree["rng"] = [each["rng"] for each in everyone]
        for name in {name: None for each in everyone for name in each["attributes"]}:
            if len({each["attributes"].get(name) for each in everyone}) > 1:
                engine.state.warn_once(
                    engine,
                    f"{name} differs between ranks, and all of them load what rank 0 saves: a resume is exact only if "
                    "nothing depends on it. Keep it equal, or in the data set, whose attributes each rank keeps",
                )
        tree["data"]["ranks"] = [each["data"] for each in everyone]
        tree["progress"]["epoch_means"] = {
            **tree["progress"]["epoch_means"], "ranks": [each["epoch_means"] for each in everyone],
        }  # fmt: skip

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        states, ranks = saved.get("rng"), distributed.world_size()
        if states and len(states) != ranks:
            yield Notice(
                f"the checkpoint was written by {len(states)} ranks and this run has {ranks}: the random streams start "
                "fresh",
                topic="number of ranks",
            )

    def load(self, engine: Engine, saved: Saved) -> None:
        rng = _rng_of_rank(engine, saved)
        if rng is not None:
            rng.restore()


PARTS: tuple[StatePart, ...] = (
    FormatPart(), DriversPart(), ModelPart(), SchedulerPart(), OptimizerPart(), ScalerPart(), AveragesPart(),
    ProgressPart(), ObjectsPart(), ModulesPart(), DataPart(), HooksPart(), RngPart(),
)  # fmt: skip
"""All parts, in the order in which they are collected and loaded."""

MOVED_BY_STEPS = tuple(
    part
    for part in PARTS
    if isinstance(part, (ModelPart, SchedulerPart, OptimizerPart, ScalerPart, AveragesPart, ObjectsPart, ModulesPart))
)
"""The parts that a step changes."""


def _attributes_in(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of the user's objects, which rank 0 writes for all ranks, by name."""
    groups = {f"hook {key}: ": (entry or {}).get("objects", {}) if isinstance(entry, Mapping) else {}
              for key, entry in tree["hooks"].items()}  # fmt: skip
    for prefix, objects in {"": tree.get("objects", {}), **groups}.items():
        for path, entry in objects.items():
            for name, value in entry.get("attributes", {}).items():
                yield prefix + f"{path}.{name}".lstrip("."), value
    for path, attributes in tree.get("modules", {}).get("attributes", {}).items():
        yield from ((f"model.{path}.{name}".replace("..", "."), value) for name, value in attributes.items())


def _of_hook(key: str) -> str:
    """Return the path under which the attributes of a hook are kept that its own state leaves out."""
    return f"hooks.{key}"


def _objects_of(saved: Saved, key: str) -> Mapping[str, Any]:
    entry = saved.part("hooks").get(key)
    found = entry.get("objects") if isinstance(entry, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _warn_of_lost(engine: Engine, name: str, advice: str) -> None:
    text = f"{name} has changed, and no checkpoint holds it: a resume is exact only if nothing depends on it. {advice}"
    engine.state.warn_once(engine, text)


def unlike(saved: Mapping[str, Any], now: Mapping[str, Any], path: str) -> Iterator[Difference]:
    """Yield where a state in memory differs from a saved one; of tensors over ranks, this rank's parts are "
    "compared."""
    for key, value in saved.items():
        if key not in now:
            yield f"{path}.{key}", "nothing there after loading"
            continue
        live = now[key]
        if is_encoded(value):
            yield from unequal(value, to_plain(live, path, encoding="exact"), f"{path}.{key}")
            continue
        if isinstance(value, Mapping) and isinstance(live, Mapping):
            yield from unlike(value, live, f"{path}.{key}")
            for extra in live.keys() - value.keys():
                yield f"{path}.{key}.{extra}", "nothing there in the file"
            continue
        if is_dtensor(live) and not is_dtensor(value):
            placed = placed_state(value, live)
            value, live = placed.to_local() if is_dtensor(placed) else placed, live.to_local()
        elif isinstance(live, torch.Tensor) and not isinstance(value, torch.Tensor):
            value = placed_like(value, None)  # stored in a folder of shards
        yield from unequal(value, live, f"{path}.{key}")


def _rng_of_rank(engine: Engine, saved: Saved) -> RngState | None:
    """Return this rank's random state of a checkpoint; for another number of ranks, fresh streams made from it."""
    states = saved.get("rng")
    if not states:
        return None
    ranks, rank = distributed.world_size(), distributed.rank()
    if len(states) == ranks:
        return RngState.from_plain(dict(states[rank]))
    digest = hashlib.blake2b(states[0]["torch"].cpu().numpy().tobytes(), digest_size=8).digest()
    of_first = int.from_bytes(digest, "little") >> 1
    return RngState.seeded(mix_seed(of_first, engine.progress.step, ranks, rank))


def _weights_at_evaluation_point(engine: Engine) -> dict[str, Any]:
    with at_evaluation_point(engine.optimizer):
        return {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in model_state(engine.model).items()
        }


def _average_state(ema: Ema, base: Collection[str]) -> dict[str, Any]:
    entry = ema.snapshot()
    return {**entry, "shadow": without(entry["shadow"], base)}  # the average of what does not move is itself


def _checkpoint_wins(what: str, settings: list[str]) -> Iterator[Notice]:
    if settings:
        yield Notice(
            f"the {what} continues with the checkpoint's {', '.join(settings)}; to change a setting, set it in "
            "on_before_train of a hook, or start a new run from load_weights(...)"
        )
