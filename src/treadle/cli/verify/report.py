"""Terminal output of a verification."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from treadle.cli.console import print_named, print_table
from treadle.runs.report import wrapped
from treadle.runs.verify.describe import describe_difference, verdict_reason
from treadle.runs.verify.recorder import PARTS
from treadle.runs.verify.runs import Verification

_STYLES = {"EXACT": "bold green", "NOT EXACT": "bold red", "NOT CHECKED": "bold yellow"}


def print_report(result: Verification, console: Console) -> None:
    """Print a table of what was compared, the verdict and its explanation."""
    if result.parts:
        print_table(_table(result), console)
    if result.difference is not None:
        _line(console, "first difference", describe_difference(result.difference))
    if result.cause is not None:
        _line(console, "likely cause", result.cause.rule)
        _line(console, "fix", result.cause.fix)
    for name, texts in (("note", result.notes), ("arranged", result.arranged), ("warning", result.warnings)):
        for text in texts:
            _line(console, name, text)
    where = f"kept in {result.folder}" if result.verdict != "EXACT" else f"output and records are in {result.folder}"
    _line(console, "files", f"the runs wrote to a separate folder, and stopped at step {result.last_step}; {where}")
    verdict = Text(wrapped(f"{result.verdict}: {verdict_reason(result)}", console, indent=2))
    verdict.stylize(_STYLES[result.verdict], 0, len(result.verdict))
    console.print(verdict, soft_wrap=True)


def _table(result: Verification) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("what", "records", "result"):
        table.add_column(heading, justify="right" if heading == "records" else "left", no_wrap=heading == "what")
    for part in PARTS:
        if (counted := result.parts.get(part)) is not None:
            text = Text("equal", style="green")
            if counted.differing:
                text = Text(f"differs in {counted.differing}, first at step {counted.first_step}", style="red")
            table.add_row(part, str(counted.records), text)
    return table


def _line(console: Console, name: str, text: str) -> None:
    print_named(f"{name}: ", text, console)
