"""Execution of ``treadle train FILE``: load the configuration, record the run, train."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from treadle import distributed
from treadle.checkpoint.files import why_unwritable
from treadle.cli.console import result_console, show_report
from treadle.cli.population import (
    PackMember,
    Several,
    as_texts,
    read_halving,
    refuse_idle,
    several,
    silent_console,
    train_several,
)
from treadle.cli.settings_command import warn_of_repeats
from treadle.cli.train_pack import check_each, show_settings
from treadle.config import format_config
from treadle.engine import Engine
from treadle.engine.hook import BaseHook
from treadle.engine.observers import observing
from treadle.errors import ConfigError, number_of
from treadle.runs.packs import find_pack
from treadle.runs.record_hooks import RunRecordHook, SessionKeeper
from treadle.runs.script import train_from
from treadle.runs.setting_names import settings_placed
from treadle.runs.settings import flat
from treadle.runs.target import PackRun, read_target
from treadle.runs.tracking import tracked

_log = logging.getLogger("treadle.cli")


@dataclass(frozen=True)
class FileMember:
    """Factory of the runs of a configuration file, for a population.

    Attributes:
        file: the configuration.
        settings: the settings shared by all runs.
        trackers: the trackers of the runs.
    """

    file: Path
    settings: tuple[str, ...]
    trackers: str | None = None

    def __call__(self, *, workspace: Path, **settings: str) -> Callable[[], Any]:
        """Return the function that trains a run."""
        given = [*self.settings, *as_texts(settings), f"+trainer.workspace={str(workspace)!r}"]
        return partial(self.train, given)

    def train(self, settings: Sequence[str]) -> None:
        """Train a run as ``treadle train FILE`` does."""
        with observing(SessionKeeper()):
            run_config(self.file, settings, messages=silent_console(), trackers=self.trackers)


def run_config(file: Path, settings: Sequence[str], *, messages: Console, trackers: str | None = None) -> None:
    """Train what a configuration file describes.

    Args:
        file: the configuration.
        settings: overrides such as ``model.width=64``.
        messages: console for progress.
        trackers: trackers of the run, in addition to those of the trainer's own section.

    Raises:
        ConfigError: the file or a setting is invalid.
        TreadleError: the run failed.
    """
    with settings_placed(file, settings):
        _run(file, settings, messages=messages, trackers=trackers)


def _run(file: Path, settings: Sequence[str], *, messages: Console, trackers: str | None) -> None:
    target = read_target(file, settings)
    if isinstance(target, PackRun):
        pack = find_pack(target.face)
        settings = pack.read_settings(target.settings, target.device)
        with tracked(trackers or target.trackers, lambda: pack.values(settings)) as tracking:
            tracking.final(pack.train(
                target.settings, out=target.out, device=target.device, resume=target.resume, messages=messages,
                show=show_report,
            ))  # fmt: skip
        return
    if target.get("seed") is None:
        _log.info(
            "%s sets no seed, so each new run starts from different weights; add seed: 0 for reproducible ones", file
        )
    record = RunRecordHook(file, settings, target)
    with tracked(trackers, lambda: target), observing(_Keeper(record)):
        started = time.perf_counter()
        trainer = train_from(target, file.parent)
        if isinstance(trainer, Engine):
            record.warn_of_unused(trainer)
        if distributed.rank() == 0:
            _log.info("%s", _end_block(trainer, seconds=time.perf_counter() - started))


def run_several(
    file: Path,
    settings: Sequence[str],
    seeds: str | None,
    *,
    workers: int | None,
    halving: str | None,
    trackers: str | None,
) -> bool:
    """Train several runs of a configuration file if the command line asks for them; return whether it does.

    Args:
        file: the configuration.
        settings: overrides, some of which may have several values.
        seeds: the option ``--seeds``.
        workers: number of processes, or None.
        halving: the option ``--halving``.
        trackers: the trackers of the runs.

    Raises:
        ConfigError: the file, a setting or a seed is invalid.
    """
    read_halving(halving)  # an invalid one is rejected before anything is read
    found = _several(file, settings, seeds)
    refuse_idle(found, workers=workers, halving=halving)
    if found is None:
        return False
    fixed = read_target(file, found.fixed)
    make: PackMember | FileMember
    if isinstance(fixed, PackRun):
        check_each(find_pack(fixed.face), Several(fixed.settings, found.members), fixed.device)
        make = PackMember(fixed.face, tuple(fixed.settings), fixed.device, fixed.resume, trackers or fixed.trackers)
        out, device = fixed.out, fixed.device
    else:
        for member in found.members:
            read_target(file, [*found.fixed, *as_texts(member)])
        make = FileMember(file.resolve(), tuple(found.fixed), trackers)
        trainer = fixed.get("trainer", {})
        out, device = Path(trainer.get("workspace") or Path("runs", file.stem)), trainer.get("device")
    train_several(make, found, out=out, device=device, workers=workers, halving=halving, console=result_console())
    return True


def _several(file: Path, settings: Sequence[str], seeds: str | None) -> Several | None:
    """Return the runs that the command line asks for, or None if it asks for a single one."""
    found = None
    if seeds is not None or any("," in text for text in settings):
        base = read_target(file, [])
        known = flat_of_pack(base) if isinstance(base, PackRun) else flat(base)
        found = several(settings, seeds, known.get)
    warn_of_repeats(settings if found is None else found.fixed)
    return found


def flat_of_pack(run: PackRun) -> dict[str, Any]:
    """Return every setting of a pack's run with its value."""
    pack = find_pack(run.face)
    return dict(pack.shown(pack.read_settings(run.settings, run.device)))


def _end_block(trainer: Any, *, seconds: float) -> str:
    """Return the progress of a run and the paths of its files, one per line."""
    if not isinstance(trainer, Engine):
        return "trained"
    took = timedelta(seconds=round(seconds))
    lines = [f"trained to step {trainer.step}, {number_of(trainer.epoch, 'whole epoch')}; this took {took}"]
    if distributed.world_size() == 1 and (loss := trainer.train_means().get("loss")) is not None:
        lines.append(f"  loss       {loss:.4g} (mean of the running epoch)")
    if trainer.workspace is not None:
        lines.append(f"  files      {trainer.workspace}")
        lines.append(f"  see also   treadle report {trainer.workspace}")
    return "\n".join(lines)


def show_config(file: Path, settings: Sequence[str], seeds: str | None, console: Console) -> None:
    """Print the configuration that would be used; for several runs, that of the first."""
    found = _several(file, settings, seeds)
    if found is not None:
        settings = [*found.fixed, *as_texts(found.members[0])]
    with settings_placed(file, settings):
        target = read_target(file, settings)
        if isinstance(target, PackRun):
            show_settings(find_pack(target.face), target.settings, target.device, console)
            return
    console.print(format_config(target), markup=False, soft_wrap=True)


class _Keeper:
    """Observer of the trainer: rejects an unwritable folder, adds the record, warns if the run cannot resume."""

    def __init__(self, record: RunRecordHook):
        self.record = record

    def before_building(self, engine: Engine) -> None:
        """Raise ConfigError for an unwritable workspace, before data is read and a model is built."""
        if engine.workspace is not None and distributed.rank() == 0:
            reason = why_unwritable(engine.workspace)
            if reason is not None:
                raise ConfigError(f"{reason}; choose another folder", argument="workspace", value=str(engine.workspace))

    def before_running(self, engine: Engine) -> None:
        """Append the hook that writes the record."""
        if all(type(hook).checkpoint_to_resume is BaseHook.checkpoint_to_resume for hook in engine.hooks):
            _log.warning("no hook saves checkpoints, so this run cannot resume after a stop; add a CheckpointingHook")
        engine.hooks = [*engine.hooks, self.record]
