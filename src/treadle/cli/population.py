"""Many runs of one command: ``--seeds`` and settings with several values, ``key=a,b,c``."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from treadle.cli.console import ConsoleHandler
from treadle.config.grammar import alternatives, kind_of, parse
from treadle.errors import ConfigError
from treadle.runs.folder import refuse_unwritable
from treadle.runs.launch import launched

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from treadle.population.search import SuccessiveHalving

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_HALVING = re.compile(r"((?P<mode>min|max):)?(?P<metric>[^:]+):(?P<rungs>\d+(,\d+)*)(:(?P<eta>\d+))?")


class Several(NamedTuple):
    """Runs requested by a command line that asks for several.

    Attributes:
        fixed: the settings shared by all runs.
        members: the other settings of each run, as strings.
    """

    fixed: list[str]
    members: list[dict[str, str]]


def read_seeds(text: str | None) -> list[int] | None:
    """Parse ``--seeds``: ``0..7``, ``0,3,5``, or both.

    Raises:
        ConfigError: there is no seed, or a duplicate.

    Example:
        >>> read_seeds("0..2,7")
        [0, 1, 2, 7]
    """
    if text is None:
        return None
    seeds: list[int] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is not None:
            seeds += range(int(found[1]), int(found[2]) + 1)
        elif part.strip().isdigit():
            seeds.append(int(part))
        else:
            raise ConfigError(f"--seeds {text}: {part!r} is not a seed; write 0..7 or 0,3,5")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: {'one is named twice' if seeds else 'names none'}; write 0..7 or 0,3,5")
    return seeds


def read_halving(text: str | None) -> SuccessiveHalving | None:
    """Parse ``--halving``: ``val_loss:1,3,9``, optionally with a prefix ``max:`` and a suffix ``:2``.

    Raises:
        ConfigError: it is not such a rule.

    Example:
        >>> read_halving("max:accuracy:1,3:2")
        SuccessiveHalving(metric='accuracy', rungs=[1, 3], eta=2, mode='max', unit='epochs')
    """
    if text is None:
        return None
    from treadle.population.search import SuccessiveHalving

    found = _HALVING.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--halving {text}: is not a metric with epochs; write val_loss:1,3,9, with max: before it if more is "
            "better, and :2 after it to keep a half instead of a third"
        )
    rungs = [int(rung) for rung in found["rungs"].split(",")]
    mode: Literal["min", "max"] = "max" if found["mode"] == "max" else "min"
    return SuccessiveHalving(found["metric"], rungs, eta=int(found["eta"] or 3), mode=mode)


def several(settings: Sequence[str], seeds: str | None, current: Callable[[str], Any]) -> Several | None:
    """Return the runs that a command line asks for, in every combination; None if it asks for a single one.

    Args:
        settings: strings ``key=value``.
        seeds: the option ``--seeds``.
        current: returns the current value of a key, or None; commas in a value for a list belong to the list.

    Raises:
        ConfigError: the seeds are invalid or given twice, or a key is set twice and once to several values.
    """
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    keys: list[str] = []
    for text in settings:
        found = parse(text) if "=" in text else None
        options = [] if found is None or found.sign != "=" else alternatives(found.raw)
        if found is None or len(options) < 2 or kind_of(current(found.key)) == "list":
            fixed.append(text)
            continue
        if len(set(options)) < len(options):
            raise found.error("names a value twice")
        swept[("+" if found.new else "") + found.key] = options
        keys.append(found.key)
    keys += {parse(text).key for text in fixed if "=" in text}
    for text in settings:
        if "=" in text and keys.count(parse(text).key) > 1:
            raise parse(text).error("the key is set twice, and to several values; set it once")
    numbers = read_seeds(seeds)
    if numbers is not None:
        if "seed" in swept or any(text.lstrip("+").startswith("seed=") for text in fixed):
            raise ConfigError(f"--seeds {seeds}: the settings have a seed too; give only one")
        swept["seed"] = [str(seed) for seed in numbers]
    if not swept:
        return None
    from treadle.population.sweeps import grid

    return Several(fixed, grid(**swept))


def refuse_idle(found: Several | None, *, workers: int | None, halving: str | None) -> None:
    """Raise for an option of several runs where a command line asks for a single one.

    Raises:
        ConfigError: ``--workers`` or ``--halving`` would have no effect.

    Example:
        >>> refuse_idle(None, workers=None, halving=None)
    """
    for option, value in (("--workers", workers), ("--halving", halving)):
        if found is None and value is not None:
            raise ConfigError(
                f"{option} {value}: has no effect, as the settings ask for one run; leave it out, or ask for several "
                "with --seeds 0..7 or KEY=A,B,C"
            )


@dataclass(frozen=True)
class PackMember:
    """Factory of the runs of a pack, for a population.

    Attributes:
        face: the pack.
        settings: the settings shared by all runs.
        device: None takes CUDA, then MPS, then the CPU.
        resume: load the folder's checkpoint and continue.
        trackers: the trackers of the runs.
    """

    face: str
    settings: tuple[str, ...]
    device: str | None = None
    resume: bool = True
    trackers: str | None = None

    def __call__(self, *, workspace: Path, **settings: str) -> Callable[[], Any]:
        """Return the function that trains a run."""
        return partial(self.train, workspace, [*self.settings, *as_texts(settings)])

    def train(self, out: Path, settings: Sequence[str]) -> Mapping[str, Any]:
        """Train a run as ``treadle train PACK`` does, and return its metrics."""
        from treadle.engine.observers import observing
        from treadle.population.member import is_paused
        from treadle.runs.packs import find_pack
        from treadle.runs.record_hooks import SessionKeeper
        from treadle.runs.tracking import tracked

        pack = find_pack(self.face)
        values = partial(_values, pack, settings, self.device)
        with observing(SessionKeeper()), tracked(self.trackers, values) as tracking:
            metrics = pack.train(
                settings, out=out, device=self.device, resume=self.resume, messages=silent_console(), paused=is_paused
            )
            if not is_paused():
                tracking.final(metrics)
        return metrics or {}


def _values(pack: Any, settings: Sequence[str], device: str | None) -> Any:
    return pack.values(pack.read_settings(settings, device))


def as_texts(settings: Mapping[str, str]) -> list[str]:
    """Format settings as on the command line.

    Example:
        >>> as_texts({"optimizer.lr": "1e-3"})
        ['optimizer.lr=1e-3']
    """
    return [f"{key}={value}" for key, value in settings.items()]


def silent_console() -> Console:
    """Return a console that prints nothing."""
    from rich.console import Console

    return Console(stderr=True, quiet=True)


def train_several(
    make: Callable[..., Any],
    found: Several,
    *,
    out: Path,
    device: str | None,
    workers: int | None,
    halving: str | None,
    console: Console,
) -> None:
    """Train the runs of a command line and print means and deviations.

    Args:
        make: the factory of runs.
        found: the runs.
        out: the folder of the population.
        device: None takes CUDA, then MPS, then the CPU.
        workers: number of processes; None takes one per core on the CPU, and only this process on a GPU.
        halving: the option ``--halving``.
        console: the console for results.

    Raises:
        ConfigError: torchrun launched this process, or a value is invalid.
        SystemExit: 1 if a run failed.
    """
    if launched():
        raise ConfigError("torchrun starts the ranks of one run; for several runs use --workers without torchrun")
    refuse_unwritable(out)
    from treadle.device import get_device
    from treadle.population import Population

    if workers is None:
        workers = 0 if get_device(device).type != "cpu" else min(len(found.members), os.cpu_count() or 1)
    names = [{key.lstrip("+"): value for key, value in member.items()} for member in found.members]
    population = Population(
        _Renamed(make, found), names, out=out, workers=workers, halving=read_halving(halving), progress=False
    )
    with members_named():
        results = population.run()
    for line in results.lines():
        console.print(line, markup=False, soft_wrap=True)
    console.print(
        f"Files in {population.out}: population.json population.csv, and a folder for each run", soft_wrap=True
    )
    if results.failed:
        raise SystemExit(1)


@dataclass(frozen=True)
class _Renamed:
    """Factory called with setting names without the ``+`` of new keys, which it adds again."""

    make: Callable[..., Callable[[], Any]]
    found: Several

    seeds_itself: ClassVar[bool] = True  # a command seeds its run, from a string

    def __call__(self, *, workspace: Path, **settings: str) -> Callable[[], Any]:
        new = {key.lstrip("+"): key for key in self.found.members[0]}
        return self.make(workspace=workspace, **{new[key]: value for key, value in settings.items()})


@contextlib.contextmanager
def members_named() -> Iterator[None]:
    """Show only the warnings of interleaved runs, each with the name of its run."""
    from treadle.engine.run_log import RUN_LOG

    def name(record: logging.LogRecord) -> bool:
        if RUN_LOG.member is not None and record.levelno >= logging.WARNING:
            record.msg = f"{RUN_LOG.member}: {record.msg}"
        return RUN_LOG.member is None or record.levelno >= logging.WARNING

    handlers = [each for each in logging.getLogger("treadle").handlers if isinstance(each, ConsoleHandler)]
    for handler in handlers:
        handler.addFilter(name)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(name)
