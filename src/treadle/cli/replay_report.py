"""What a replay shows: the step, what the run's record said of it, and why the two may differ."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from treadle.checkpoint.find_step import nearest_state
from treadle.checkpoint.schema import versions
from treadle.cli.console import print_table
from treadle.errors import ConfigError
from treadle.hooks.files import to_json
from treadle.hooks.steplog import read_steps
from treadle.runs.pack import Pack
from treadle.runs.packs import find_pack, pack_names, pack_of_folder
from treadle.runs.record import recorded_config
from treadle.runs.replay import (
    Replayed,
    checkpoints_of,
    refuse_run_of_ranks,
    replay_config,
    replay_script,
    save_batch,
)
from treadle.runs.target import PackRun, resolve

_COMPARED = ("loss", "losses", "grad_norm", "lr", "applied")


def replay_and_report(
    run: Path,
    step: int,
    *,
    script: Path | None,
    arguments: Sequence[str],
    save: Path | None,
    device: str | None,
    debug: bool,
    as_json: bool,
    results: Console,
    messages: Console,
) -> bool | None:
    """Runs a step again, saves its batch if asked to, and shows it beside its record.

    Returns:
        Whether the step is what its record says; None without a record.

    Raises:
        ConfigError: an argument does not fit the others, or the run has no such step.
    """
    if script is None and arguments:
        raise ConfigError(f"{arguments[0]!r}: only a script takes arguments; name it with --script")
    config = recorded_config(run, step) if script is None else _config_of(script, arguments)
    own = script is not None or config is not None
    if own and device is not None:
        what = "script" if script is not None else "configuration"
        raise ConfigError(f"--device={device}: the {what} decides where it runs")
    if config is not None:
        replayed = replay_config(run, step, config=config[0], folder=config[1], debug=debug)
    elif script is not None:
        replayed = replay_script(run, step, script=script, arguments=arguments, debug=debug)
    else:
        refuse_run_of_ranks(run)
        replayed = _pack_of(run).replay(run, step, device=device, debug=debug, messages=messages)
    if save is not None:
        save_batch(replayed.batches, save)
    saved = None if save is None else str(save)
    values = as_values(replayed, read_steps(run / "steps.jsonl"), own=own, saved=saved)
    if as_json:
        results.print(json.dumps(to_json(values), allow_nan=False), soft_wrap=True, markup=False)
    else:
        print_step(values, results)
    equal: bool | None = values["equal"]
    return equal


def _pack_of(run: Path) -> Pack[Any, Any, Any]:
    """Returns the pack of a run, by what its folder or its newest checkpoint says."""
    if not run.is_dir():
        raise ConfigError("no such folder; give the folder of a run", argument="RUN", value=str(run))
    pack = pack_of_folder(run)
    newest = None if pack is not None else nearest_state(checkpoints_of(run), sys.maxsize)
    face = None if newest is None else newest[1]["format"].get("face")
    if pack is None and face not in pack_names():
        raise ConfigError(
            "neither run.json nor config.json says what run it is of; give the folder of a run of "
            "'treadle train', or your own script with --script",
            argument="RUN",
            value=str(run),
        )
    return find_pack(str(face)) if pack is None else pack


def _config_of(script: Path, arguments: Sequence[str]) -> tuple[dict[str, Any], Path] | None:
    """Returns the configuration in a file and the file's folder; None if it is a script."""
    found = resolve(str(script), arguments)
    if isinstance(found, PackRun):
        raise ConfigError(f"--script={str(script)!r}: names a pack; a run of a pack is replayed without --script")
    return None if found is None else (found, script.parent)


def differences(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns what differs by a bit or more, as ``name -> (recorded, replayed)``.

    Example:
        >>> differences({"loss": 0.5, "applied": True}, {"loss": 0.25, "applied": True})
        {'loss': (0.5, 0.25)}
    """
    names = [name for name in _COMPARED if name in recorded and name in replayed]
    return {name: (recorded[name], replayed[name]) for name in names if not same(recorded[name], replayed[name])}


def same(recorded: Any, replayed: Any) -> bool:
    """Returns whether two values are equal to the bit; the record holds null for what is not finite.

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
    """Returns the first step of the replay whose record says something else."""
    for row in replayed.rows:
        if row["step"] in records and differences(records[row["step"]], row):
            return int(row["step"])
    return None


def likely_causes(replayed: Replayed, found: Mapping[str, Any], first: int, *, own: bool) -> list[str]:
    """Names what may have made a replay differ, the likeliest first."""
    causes = []
    if "lr" in found:
        causes.append("the learning rate differs: the settings were changed on the way, such as the number of epochs")
    now = versions()
    changed = [
        f"{name} {replayed.versions[name]} then, {now[name]} now"
        for name in ("torch", "numpy", "python", "treadle")
        if replayed.versions.get(name) not in (None, now[name])
    ]
    if changed:
        causes.append(f"other versions round differently: {'; '.join(changed)}")
    if replayed.device.startswith("cuda"):
        causes.append("CUDA kernels that add with atomics; set_seed(seed, deterministic=True) chooses others")
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
            "or hook that keeps state or draws from an unseeded generator of its own, or an edited record"
        )
    return causes


def as_values(
    replayed: Replayed, records: Mapping[int, Mapping[str, Any]], *, own: bool, saved: str | None
) -> dict[str, Any]:
    """Returns the whole result as plain values; ``equal`` is None where there is nothing to compare with."""
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
        "left_out_hooks": replayed.left_out, "saved": saved,
    }  # fmt: skip


def print_step(values: Mapping[str, Any], console: Console) -> None:
    """Prints a result for people to read."""
    first, last = values["position"] - max(len(values["sample_ids"]), 1) + 1, values["position"]
    where = f"batch {last}" if first >= last else f"batches {first} to {last}"
    what = "applied" if values["applied"] else f"not applied: {values['reason']}"
    retries = f", after {values['retries']} retries" if values["retries"] else ""
    _line(console, "step", f"{values['step']}: epoch {values['epoch']}, {where}; {what}{retries}")
    _line(console, "start", f"{values['start']} (step {values['start_step']}), on {values['device']}")
    for number, ids in enumerate(values["sample_ids"]):
        name = "samples" if len(values["sample_ids"]) == 1 else f"samples {number}"
        _line(console, name, "the loader does not say" if ids is None else ", ".join(map(str, _flat(ids))))
    _line(console, "loss", repr(values["loss"]))
    if "losses" in values:
        _line(console, "losses", ", ".join(map(repr, values["losses"])))
    _line(console, "norm", repr(values["grad_norm"]))
    _line(console, "lr", ", ".join(map(repr, values["lr"])))
    if values["layer_norms"]:
        table = Table("layer", "gradient norm", box=None, pad_edge=False)
        for layer, norm in values["layer_norms"].items():
            table.add_row(Text(layer), f"{norm:.6g}")
        print_table(table, console)
    if values["saved"] is not None:
        _line(console, "saved", f"{values['saved']}: a list of micro-batches, torch.load(..., weights_only=True)")
    _print_comparison(values, console)


def _print_comparison(values: Mapping[str, Any], console: Console) -> None:
    if values["equal"] is None:
        _line(console, "record", "none of this step, so nothing can be compared; a StepLogHook keeps one")
    elif values["equal"]:
        count = "loss, norm, learning rate and outcome are equal to the bit"
        _line(console, "record", count)
        if values["first_difference"] is not None:
            _line(console, "", f"but step {values['first_difference']} before it is not what its record says")
    else:
        _line(console, "record", "DIFFERS", style="bold red")
        for name, (then, now) in values["differences"].items():
            _line(console, "", f"{name}: recorded {then!r}, replayed {now!r}")
        _line(console, "", f"first step that differs: {values['first_difference']}")
        for cause in values["likely_causes"]:
            _line(console, "", f"likely: {cause}")


def _line(console: Console, name: str, text: str, *, style: str = "") -> None:
    console.print(Text(f"{name:<10}", style="bold").append(Text(text, style=style)), soft_wrap=True)


def _flat(ids: Any) -> list[Any]:
    return [item for part in ids for item in _flat(part)] if isinstance(ids, list) else [ids]
