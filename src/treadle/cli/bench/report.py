"""Terminal output of a bench."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from treadle.cli.bench.advice import in_words
from treadle.cli.bench.result import BenchResult
from treadle.cli.console import print_named, print_table

_STYLES = {"switch on": "green", "look at": "yellow", "no gain": "dim", "not tried": "dim"}
_TITLES = {"switch on": "switch on", "look at": "look at", "no gain": "tried, no gain", "not tried": "not tried"}


def print_report(result: BenchResult, console: Console) -> None:
    """Print where a step's time goes, its floor, and the advice."""
    where = result.device if result.device != "cpu" else f"cpu, threads: {result.num_threads}"
    _line(console, "target", f"{result.target} ({result.face} face) on {where}, {result.precision or 'full precision'}")
    _line(console, "step", f"{in_words(result.step_seconds)}; typical of {result.steps} measured")
    print_table(_parts(result), console)
    _print_counts(result, console)
    _print_floor(result, console)
    for name in result.left_out:
        _line(console, "left out", f"{name}, which would upload this run")
    for advice in result.advice:
        _line(console, _TITLES[advice.kind], advice.text, style=_STYLES[advice.kind])


def _parts(result: BenchResult) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("part of a step", no_wrap=True)
    for heading in ("typical", "share", "mean of all"):
        table.add_column(heading, justify="right", no_wrap=True)
    for part, mean in result.means.items():
        seconds = result.parts.get(part, 0.0)
        table.add_row(part, in_words(seconds), f"{seconds / result.step_seconds:.1%}", in_words(mean))
    return table


def _print_counts(result: BenchResult, console: Console) -> None:
    launches = "" if result.launches is None else f", {result.launches:.0f} kernel launches"
    _line(console, "calls", f"{result.num_calls:.0f} operator calls{launches} a step")
    reads = sum(result.host_reads.values())
    _line(console, "host reads", f"{reads:.2g} a step" if reads else "none in the steps that were counted")
    for line, count in result.host_reads.items():
        console.print(Text(f"  {count:.2g} at {line}"), soft_wrap=True)


def _print_floor(result: BenchResult, console: Console) -> None:
    floor, ceilings = result.floor, result.ceilings
    if floor is None or ceilings is None:
        return
    _line(
        console, "floor",
        f"{in_words(floor.compute_seconds)} for {floor.flops / 1e9:.3g} GFLOP at {ceilings.flops_per_second / 1e9:.0f} "
        f"GFLOP/s, {in_words(floor.memory_seconds)} for {floor.bytes / 1e6:.3g} MB at "
        f"{ceilings.bytes_per_second / 1e9:.0f} GB/s (both measured in this run)",
    )  # fmt: skip
    if result.times_floor is not None:
        _line(console, "present step", f"{result.times_floor:.1f} x the floor")


def _line(console: Console, name: str, text: str, *, style: str = "bold") -> None:
    print_named(f"{name}: ", text, console, styles=(style, ""))
