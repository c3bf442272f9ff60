"""Terminal output of a replay: the step compared with the record of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from treadle.cli.console import print_named, print_table
from treadle.hooks.files import to_json
from treadle.runs.compare import replay_and_compare
from treadle.runs.replay import save_batch


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
    """Rerun a step, save its batch if requested, and print it with its record.

    Returns:
        Whether the step equals its record; None if there is no record.

    Raises:
        ConfigError: the arguments contradict each other, or the run has no such step.
    """
    replay = replay_and_compare(
        run, step, script=script, arguments=arguments, device=device, debug=debug, messages=messages
    )
    if save is not None:
        save_batch(replay.batches, save)
    values = {**replay.values, "saved": None if save is None else str(save)}
    if as_json:
        results.print(json.dumps(to_json(values), allow_nan=False), soft_wrap=True, markup=False)
    else:
        print_step(values, results)
    return replay.equal


def print_step(values: Mapping[str, Any], console: Console) -> None:
    """Print a result in readable form."""
    first, last = values["position"] - max(len(values["sample_ids"]), 1) + 1, values["position"]
    where = f"batch {last}" if first >= last else f"batches {first} to {last}"
    what = "applied" if values["applied"] else f"not applied: {values['reason']}"
    retries = f", after {values['retries']} retries" if values["retries"] else ""
    _line(console, "step", f"{values['step']}: epoch {values['epoch']}, {where}; {what}{retries}")
    _line(console, "start", f"{values['start']} (step {values['start_step']}), on {values['device']}")
    for number, ids in enumerate(values["sample_ids"]):
        name = "samples" if len(values["sample_ids"]) == 1 else f"samples {number}"
        _line(console, name, "not reported by the loader" if ids is None else ", ".join(map(str, _flat(ids))))
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
            _line(console, "", f"but step {values['first_difference']} before it differs from its record")
    else:
        _line(console, "record", "DIFFERS", style="bold red")
        for name, (then, now) in values["differences"].items():
            _line(console, "", f"{name}: recorded {then!r}, replayed {now!r}")
        _line(console, "", f"first step that differs: {values['first_difference']}")
        for cause in values["likely_causes"]:
            _line(console, "", f"likely: {cause}")


def _line(console: Console, name: str, text: str, *, style: str = "") -> None:
    print_named(f"{name:<10}", text, console, styles=("bold", style), indent=10)


def _flat(ids: Any) -> list[Any]:
    return [item for part in ids for item in _flat(part)] if isinstance(ids, list) else [ids]
