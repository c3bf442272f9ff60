"""The command ``treadle inspect``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from treadle.cli.console import errors_as_one_line, message_console, result_console
from treadle.cli.pack_options import AsJson
from treadle.cli.runpage.words import size
from treadle.errors import ConfigError
from treadle.runs.report import wrapped

_MOST_ROWS = 40


def inspect(
    target: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A checkpoint (file or folder of shards), or a folder of checkpoints."),
    ],
    as_json: AsJson = False,
    everything: Annotated[bool, typer.Option("--all", help="List every tensor and value, not only the first.")] = False,
) -> None:
    """Show the contents of a checkpoint without executing anything in it.

    Reads checkpoints of treadle and Lightning, plain torch files and safetensors; of a pickle it lists the names that
    it would import. The exit code is 1 if the file is damaged or must not be loaded.

    \b
    Examples:
      treadle inspect runs/spectra/checkpoints/last.pt
      treadle inspect runs/spectra/checkpoints
      treadle inspect run/checkpoints/checkpoint_step_1000
      treadle inspect model.safetensors --json
    """
    console = result_console()
    with errors_as_one_line(message_console()):
        from treadle.checkpoint.safe.inspect import inspect_path

        if not target.exists():
            raise ConfigError("no such file or folder", argument="FILE", value=str(target))
        report = inspect_path(target)
        if as_json:
            console.print(json.dumps(report, indent=1), markup=False, soft_wrap=True)
        elif "checkpoints" in report:
            _show_folder(report, console)
        else:
            _show_file(report, console, everything=everything)
        raise SystemExit(1 if report.get("problems") else 0)


def _line(console: Console, text: str) -> None:
    console.print(wrapped(text, console, indent=10), markup=False, soft_wrap=True)


def _state(problems: list[str]) -> str:
    return "; ".join(problems) if problems else "intact"


def _show_folder(report: Mapping[str, Any], console: Console) -> None:
    if not report["checkpoints"]:
        _line(console, f"{report['path']}: no checkpoints; give a run's folder, or one with checkpoints")
    names = [
        entry["name"] if entry["link"] is None else f"{entry['name']} -> {entry['link']}"
        for entry in report["checkpoints"]
    ]
    steps = ["" if entry["step"] is None else f"step {entry['step']:,}" for entry in report["checkpoints"]]
    sizes = [size(entry["size"]) for entry in report["checkpoints"]]
    wide, of_steps, of_sizes = (max(map(len, column), default=0) for column in (names, steps, sizes))
    for name, step, amount, entry in zip(names, steps, sizes, report["checkpoints"], strict=True):
        _line(console, f"{name:<{wide}}  {step:<{of_steps}}  {amount:>{of_sizes}}  {_state(entry['problems'])}")


def _show_file(report: Mapping[str, Any], console: Console, *, everything: bool) -> None:
    most = len(report["tensors"]) + len(report["values"]) if everything else _MOST_ROWS
    _line(console, f"{report['kind']}, {report['size']:,} bytes: {_state(report['problems'])}")
    for key in ("step", "epoch", "format", "versions", "shards", "ranks"):
        found = report.get(key)
        if isinstance(found, dict):
            found = ", ".join(f"{name} {value}" for name, value in found.items())
        if found is not None:
            _line(console, f"{key:<10}{found}")
    if report.get("keys"):
        _line(console, f"keys      {', '.join(str(key) for key in report['keys'][:_MOST_ROWS])}")
    if report["globals"]:
        _line(console, f"imports   {', '.join(report['globals'])}")
    _show_tensors(report["tensors"], console, most)
    base = [name for name in report["values"] if name.startswith("base.")]
    if base:
        _line(console, f"base      {len(base):,} frozen weights are not in the file, only their fingerprints")
    values = [(name, value) for name, value in report["values"].items() if everything or name not in base]
    for name, value in values[:most]:
        _line(console, f"  {name} = {value}")
    if len(values) > most:
        _line(console, f"  and {len(values) - most:,} more values; --all shows them")


def _show_tensors(tensors: list[dict[str, Any]], console: Console, most: int) -> None:
    if not tensors:
        return
    _line(console, f"tensors   {len(tensors):,}, {sum(entry['bytes'] for entry in tensors):,} bytes")
    for entry in tensors[:most]:
        _line(console, f"  {entry['name']:<48} {entry['dtype']:<10} {entry['shape']}")
    if len(tensors) > most:
        _line(console, f"  and {len(tensors) - most:,} more; --all shows them")
