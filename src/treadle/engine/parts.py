"""Checkpoint parts: each collects its keys, refuses what does not fit, warns about changes, and loads."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from treadle import distributed
from treadle.checkpoint.base_fingerprints import without
from treadle.checkpoint.comparison import digest
from treadle.checkpoint.files import FORMAT_NAME
from treadle.checkpoint.schema import FORMAT_VERSION, from_plain, to_plain, versions
from treadle.data.batch_sizes import other_accumulation, sizes_between_epochs
from treadle.distributed.state_names import check_model_state, load_model_state, model_state, without_wrappers
from treadle.engine.hooks_part import HooksPart
from treadle.engine.modules_part import ModulesPart
from treadle.engine.objects_part import ObjectsPart, attributes_in
from treadle.engine.optimizer_parts import OptimizerPart, ScalerPart, SchedulerPart
from treadle.engine.settings import holds_accumulation
from treadle.engine.state_part import Difference, Notice, Saved, StatePart, unlike
from treadle.errors import number_of
from treadle.optim.ema import Ema
from treadle.optim.evaluation_point import NAME as POINT
from treadle.optim.evaluation_point import at_evaluation_point, has_modes
from treadle.seed import RngState, mix_seed

if TYPE_CHECKING:
    from treadle.engine.loop import Engine


_OWN_DATA = ("opening", "generators", "loader", "objects", "built")


class FormatPart(StatePart):
    """Format, configuration and versions; only the record of which weights were scored is loaded."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        tree["format"] = {
            "name": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "face": engine.face,
            "scored": engine.state.scored,
        }
        tree["config"] = engine._recorded_config
        tree["versions"] = versions()

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        missing = [key for key in ("optimizer", "global_step", "progress", "rng", "data") if saved.get(key) is None]
        if engine.lr_scheduler is not None and saved.get("scheduler") is None and "progress" not in saved.tree:
            missing.append("scheduler")  # for a checkpoint of treadle the scheduler's part warns
        written = {key for driver in engine.state.drivers for key in driver.state_dict()}
        missing += [key for key in ("selection", "history") if key in written and key not in saved.tree]
        if missing:
            yield Notice(
                f"nothing was loaded for {', '.join(missing)}, missing from the checkpoint or left out: these start "
                "fresh, so the resume is not exact"
            )
        before = saved.part("versions")
        for name, now in versions().items():
            if name in ("torch", "numpy") and before.get(name) not in (None, now):
                yield Notice(
                    f"the checkpoint was written with {name} {before[name]} and this run has {now}: kernels may "
                    "round differently"
                )
        yield from _device_notices(saved.part("progress").get("device"), engine.device.type)

    def load(self, engine: Engine, saved: Saved) -> None:
        described = saved.get("format")
        engine.state.record_scored(described.get("scored") if isinstance(described, Mapping) else None)


def _device_notices(before: str | None, now: str) -> Iterator[Notice]:
    """Yield a warning about another kind of device, or one whose kernels may vary from run to run."""
    if before not in (None, now):
        yield Notice(
            f"the checkpoint was written on {before} and this run is on {now}: kernels round differently, and the "
            "device draws other random numbers"
        )
    elif now != "cpu" and not torch.are_deterministic_algorithms_enabled():
        yield Notice(
            f"the resume is exact only if this model's kernels are deterministic: on {now}, those that add with "
            "atomics round differently each time; set_seed(seed, deterministic=True) selects others"
        )


class DriversPart(StatePart):
    """Keys of the engine's drivers: history, metrics and the best rule of an epoch driver."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        for driver in engine.state.drivers:
            tree.update(driver.state_dict())

    def load(self, engine: Engine, saved: Saved) -> None:
        for driver in engine.state.drivers:
            driver.load_state_dict(saved.tree)


class ModelPart(StatePart):
    """Weights and buffers, except unchanged frozen weights."""

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
                    f"the checkpoint has no average {name!r}: it starts from the loaded weights, not from the "
                    "initial ones"
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
        if engine.lr_scheduler is None and any(built := engine.state.built.moved_groups(engine)):
            tree["progress"]["built"] = built
        if begun := engine.state.beginning.state_dict():
            tree["progress"]["begun"] = begun

    def load(self, engine: Engine, saved: Saved) -> None:
        step = int(saved.get("global_step") or 0)
        engine.progress.load_state_dict(saved.part("progress"), step=step, device=engine.device)
        engine.settings = dataclasses.replace(engine.settings, **engine.progress.moved_settings)
        engine.state.beginning.load_state_dict(saved.part("progress").get("begun") or {})


class DataPart(StatePart):
    """Position in the data, with this rank's random state under which the epoch is reopened."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        between, target = engine.cursor.between_epochs, engine.target
        reads_on = between and not (target.reached(engine) or target.is_last_step(engine))
        tree["data"] = engine.cursor.state_dict() | engine.cursor.built.entry(reads_on=reads_on)
        if between:  # else the counters show it
            tree["data"] |= sizes_between_epochs(engine.cursor.loader, engine.settings.accumulation_steps)

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        if not holds_accumulation(saved.get("config")):  # else it is compared with the other settings
            yield from map(Notice, other_accumulation(saved.tree, engine.settings.accumulation_steps))

    def load(self, engine: Engine, saved: Saved) -> None:
        engine.cursor.restart(epoch=int(saved.get("epoch") or 0))
        if saved.get("data") is not None:
            engine.cursor.load_state_dict(saved.get("data"), rng=_rng_of_rank(engine, saved))


class RngPart(StatePart):
    """Random state of every rank; collected after everything that may draw numbers, and loaded last."""

    def collect(self, engine: Engine, tree: dict[str, Any]) -> None:
        """Add what differs between ranks to a tree whose other entries are the same on all ranks."""
        own = {
            "rng": RngState.capture().to_plain(),
            "data": {key: tree["data"][key] for key in _OWN_DATA if key in tree["data"]},
            "epoch_means": tree["progress"]["epoch_means"],
            "attributes": {name: digest(value) for name, value in attributes_in(tree)},
        }
        if distributed.world_size() == 1:
            tree["rng"] = [own["rng"]]
            return
        everyone = distributed.gather_objects(to_plain(own, "rank", encoding="exact"))
        tree["rng"] = [each["rng"] for each in everyone]
        for name in {name: None for each in everyone for name in each["attributes"]}:
            if distributed.rank() == 0 and len({each["attributes"].get(name) for each in everyone}) > 1:
                engine.state.warn_once(
                    engine,
                    f"{name} differs between ranks, but all load what rank 0 saves: a resume is exact only if "
                    "nothing depends on it. Keep it equal, or in the data set, whose attributes each rank saves for "
                    "itself",
                )
        tree["data"]["ranks"] = [each["data"] for each in everyone]
        tree["progress"]["epoch_means"] = {
            **tree["progress"]["epoch_means"], "ranks": [each["epoch_means"] for each in everyone],
        }  # fmt: skip

    def notices(self, engine: Engine, saved: Saved) -> Iterator[Notice]:
        states, ranks = saved.get("rng"), distributed.world_size()
        if states and len(states) != ranks:
            yield Notice(
                f"the checkpoint was written by {number_of(len(states), 'rank')} and this run has {ranks}: all random "
                "generators start fresh",
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

WITHOUT_WEIGHTS = tuple(part for part in PARTS if isinstance(part, (ObjectsPart, ModulesPart, RngPart)))
"""The state of the user's objects and modules, and the random state."""


def _rng_of_rank(engine: Engine, saved: Saved) -> RngState | None:
    """Return this rank's random state from a checkpoint; for another number of ranks, fresh streams derived from it."""
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
    return {**entry, "shadow": without(entry["shadow"], base)}  # the average of a constant is itself
