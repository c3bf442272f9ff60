"""CsvHook: log points as rows of a CSV table."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.checkpoint.store import write_text
from treadle.errors.arguments import checked
from treadle.hooks.files import append_lines, file_in_workspace, in_workspace, set_aside
from treadle.hooks.tracking import TrackerHook

if TYPE_CHECKING:
    from treadle.engine import Engine


class CsvHook(TrackerHook):
    """CSV table with one row per log point and one column per key.

    The first column is ``step``. A new key adds a column, empty in earlier rows. A resumed run first truncates the rows
    after its step, so the table has no gaps or duplicates. A fresh run renames an existing file to ``<stem>.1.csv``
    (next free number).

    Args:
        path: the file; relative to the trainer's workspace.

    Example:
        >>> hook = CsvHook("metrics.csv")
    """

    @checked
    def __init__(self, path: str | Path = "metrics.csv"):
        super().__init__()
        self.path = Path(path)
        self._columns: list[str] = []
        self._last_keys: set[str] = set()
        self._file = self.path

    def check(self, trainer: Engine) -> None:
        """Check the path."""
        file_in_workspace(trainer, self.path)

    def open(self, trainer: Engine) -> None:
        """Rename the file of another run, or truncate the rows that a resumed run will rewrite."""
        self._file = path = in_workspace(trainer, self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.sent_through = trainer.step
        if trainer.step == 0:
            set_aside(trainer, path)
        rows = [row for row in _rows(path) if row["step"].isdigit() and int(row["step"]) <= trainer.step]
        self._columns = ["step", *dict.fromkeys(key for row in rows for key in row if key != "step")]
        at_step = [row for row in rows if int(row["step"]) == trainer.step]
        self._last_keys = {key for row in at_step for key, value in row.items() if value}
        self._rewrite(rows)

    def was_sent(self, key: str, step: int) -> bool:
        """Check the rows of the step resumed from."""
        return key in self._last_keys

    def write(self, trainer: Engine, values: dict[str, Any]) -> None:
        """Append a row and flush it, so that a killed process loses none."""
        plain = {key: value for key, value in values.items() if isinstance(value, (bool, int, float, str))}
        plain.pop("step", None)
        self.name_skipped(trainer, [key for key in values if key not in plain and key != "step"])
        new = [key for key in plain if key not in self._columns]
        if new:
            rows = _rows(self._file)
            self._columns += new
            self._rewrite(rows)
        row = {"step": trainer.step, **plain}
        append_lines(self._file, [_line([row.get(key, "") for key in self._columns])])

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        lines = [_line(self._columns), *(_line([row.get(key, "") for key in self._columns]) for row in rows)]
        write_text("".join(f"{line}\n" for line in lines), self._file)


def _rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table as strings by column, without a row partially written by a killed process."""
    if not path.exists():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if None not in row and None not in row.values() and "step" in row]


def _line(values: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue().replace("\n", " ")
