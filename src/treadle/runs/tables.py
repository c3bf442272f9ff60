"""Tables on a terminal that never lose the end of a cell."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

_WIDEST = 10_000


def print_table(table: Table, console: Console) -> None:
    """Prints a table as wide as it is: a terminal that is narrower breaks its lines, and no cell loses its end.

    Args:
        table: the table.
        console: where it goes.
    """
    console.print(_Whole(table), crop=False)


class _Whole:
    def __init__(self, table: Table):
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = Measurement.get(console, options.update_width(_WIDEST), self.table).maximum
        yield from console.render(self.table, options.update_width(max(needed, options.max_width)))
