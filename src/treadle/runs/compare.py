"""Comparison of a replayed step with the record of its run, with likely causes of a difference."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.checkpoint.find_step import nearest_state
from treadle.checkpoint.schema import versions
from treadle.errors import ConfigError
from treadle.hooks.steplog import read_steps
from treadle.runs.pack import Pack
from treadle.runs.packs import find_pack, pack_names, pack_of_folder
from treadle.runs.record import recorded_config
from treadle.runs.replay import Replayed, checkpoints_of, refuse_run_of_ranks, replay_run
from treadle.runs.script import run_as_main, train_from
from treadle.runs.target import PackRun, resolve

if TYPE_CHECKING:
    from rich.console import Console

_COMPARED = ("loss", "losses", "grad_norm", "lr", "applied")


@dataclass(frozen=True)
class Replay:
    """Replayed step of a run.

    Attributes:
        equal: whether the step equals its record to the bit; None without a record.
        step: 1-based.
        loss: mean loss of the step.
        grad_norm: total norm of its gradient, before clipping.
        lr: learning rate of each parameter group.
        start_step: step of the checkpoint that the replay started from; 0 for the beginning of the run.
        differences: the values that differ, as ``name -> [recorded, replayed]``.
        first_difference: the first replayed step that differs from its record; None if all are equal.
        likely_causes: possible causes of the difference, most likely first.
        batches: the micro-batches of the step.
        values: all of the above except the batches, and more, as plain values.
    """

    equal: bool | None
    step: int
    loss: float
    grad_norm: float | None
    lr: list[float]
    start_step: int
    differences: dict[str, list[Any]]
    first_difference: int | None
    likely_causes: list[str]
    batches: Sequence[Any]
    values: dict[str, Any]


def replay_and_compare(
    run: Path,
    step: int,
    *,
    script: Path | None,
    arguments: Sequence[str],
    device: str | None,
    debug: bool,
    messages: Console,
) -> Replay:
    """Replay a step and compare it with the record of the run.

    Raises:
        ConfigError: the arguments contradict each other, or the run has no such step.
    """
    if script is None and arguments:
        raise ConfigError(f"{arguments[0]!r}: only a script takes arguments; name it with --script")
    config = recorded_config(run, step) if script is None else _config_of(script, arguments)
    own = script is not None or config is not None
    if own and device is not None:
        what = "script" if script is not None else "configuration"
        raise ConfigError(f"--device={device}: the {what} decides where it runs")
    if config is not None:
        replayed = replay_run(lambda scratch: train_from(*config), run, step, debug=debug)
    elif script is not None:
        if not script.is_file():
            raise ConfigError(f"--script={str(script)!r}: no such file")
        if not run.is_dir():
            raise ConfigError("no such folder; give the workspace of the run", argument="RUN", value=str(run))
        replayed = replay_run(lambda scratch: run_as_main(script, arguments), run, step, debug=debug)
    else:
        refuse_run_of_ranks(run)
        replayed = _pack_of(run).replay(run, step, device=device, debug=debug, messages=messages)
    values = as_values(replayed, read_steps(run / "steps.jsonl"), own=own)
    names = ("equal", "step", "loss", "grad_norm", "lr", "start_step", "differences", "first_difference")
    known = {name: values[name] for name in (*names, "likely_causes")}
    return Replay(**known, batches=replayed.batches, values=values)


def _pack_of(run: Path) -> Pack[Any, Any, Any]:
    """Return the pack of a run, found by its folder or its newest checkpoint."""
    if not run.is_dir():
        raise ConfigError("no such folder; give the folder of a run", argument="RUN", value=str(run))
    pack = pack_of_folder(run)
    newest = None if pack is not None else nearest_state(checkpoints_of(run), sys.maxsize)
    face = None if newest is None else newest[1]["format"].get("face")
    if pack is None and face not in pack_names():
        raise ConfigError(
            "neither run.json nor config.json identifies its run; give the folder of a run of 'treadle train', "
            "or your own script with --script",
            argument="RUN",
            value=str(run),
        )
    return find_pack(str(face)) if pack is None else pack


def _config_of(script: Path, arguments: Sequence[str]) -> tuple[dict[str, Any], Path] | None:
    """Return the configuration in a file with the file's folder; None if it is a script."""
    found = resolve(str(script), arguments)
    if isinstance(found, PackRun):
        raise ConfigError(f"--script={str(script)!r}: names a pack; a run of a pack is replayed without --script")
    return None if found is None else (found, script.parent)


def differences(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values that are not equal to the bit, as ``name -> (recorded, replayed)``.

    Example:
        >>> differences({"loss": 0.5, "applied": True}, {"loss": 0.25, "applied": True})
        {'loss': (0.5, 0.25)}
    """
    names = [name for name in _COMPARED if name in recorded and name in replayed]
    return {name: (recorded[name], replayed[name]) for name in names if not same(recorded[name], replayed[name])}


def same(recorded: Any, replayed: Any) -> bool:
    """Return whether two values are equal to the bit; non-finite values are null in the record.

    Example:
        >>> same([0.5, None], [0.5, float("nan")]), same(0.0, -0.0)
        (True, False)
    """
    if isinstance(recorded, list) and isinstance(replayed, list):
        return len(recorded) == len(replayed) and all(map(same, recorded, replayed))
    if isinstance(replayed, float) and not math.isfinite(replayed):
        return recorded is None
    return repr(recorded) == repr(replayed)


def first_difference(records: Mapping[int, Mapping[str, Any]], replayed: Replayed) -> int | None:
    """Return the first step of the replay that differs from its record."""
    for row in replayed.rows:
        if row["step"] in records and differences(records[row["step"]], row):
            return int(row["step"])
    return None


def likely_causes(replayed: Replayed, found: Mapping[str, Any], first: int, *, own: bool) -> list[str]:
    """Return the likely causes of a difference, most likely first."""
    causes = []
    if "lr" in found:
        causes.append("the learning rate differs: settings such as the number of epochs were changed during the run")
    now = versions()
    changed = [
        f"{name} {replayed.versions[name]} then, {now[name]} now"
        for name in ("torch", "numpy", "python", "treadle")
        if replayed.versions.get(name) not in (None, now[name])
    ]
    if changed:
        causes.append(f"other versions round differently: {'; '.join(changed)}")
    if replayed.device.startswith("cuda"):
        causes.append(
            "CUDA kernels that add with atomics; set_seed(seed, deterministic=True) selects deterministic ones"
        )
    if own and replayed.start_step == 0:
        causes.append(
            "nothing is seeded before the model is built: call treadle.set_seed first, or write seed: 0 in a "
            "configuration"
        )
    if first == replayed.start_step + 1:
        causes.append(
            "it differs from the first step on: other code, data, device, number of threads, or an edited record"
        )
    else:
        causes.append(
            f"steps {replayed.start_step + 1} to {first - 1} are equal, so code and settings are the same: a data set "
            "or hook that keeps state or draws from its own unseeded generator, or an edited record"
        )
    return causes


def as_values(replayed: Replayed, records: Mapping[int, Mapping[str, Any]], *, own: bool) -> dict[str, Any]:
    """Return the whole result as plain values; ``equal`` is None if there is nothing to compare with."""
    row = replayed.row
    recorded = records.get(row["step"])
    found = {} if recorded is None else differences(recorded, row)
    first = first_difference(records, replayed)
    return {
        **row,
        "start": replayed.start, "start_step": replayed.start_step, "device": replayed.device,
        "sample_ids": replayed.sample_ids, "layer_norms": replayed.layer_norms,
        "recorded": None if recorded is None else dict(recorded),
        "equal": None if recorded is None else not found,
        "differences": {name: list(pair) for name, pair in found.items()},
        "first_difference": first,
        "likely_causes": likely_causes(replayed, found, first, own=own) if found and first else [],
        "left_out_hooks": replayed.left_out,
    }  # fmt: skip
