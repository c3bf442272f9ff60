"""HistoryHook: epoch records as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle import distributed
from treadle.checkpoint.store import write_text
from treadle.device.handover import run_off_turn
from treadle.engine.hook import BaseHook
from treadle.errors.arguments import checked
from treadle.hooks.files import file_in_workspace, set_aside
from treadle.hooks.files import to_json as to_json

if TYPE_CHECKING:
    from treadle.engine import Engine


def dump_records(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as a JSON list with one record per line."""
    lines = [json.dumps(to_json(record), allow_nan=False) for record in records]
    return "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"


class HistoryHook(BaseHook):
    """JSON file of the history, written atomically after every epoch from the history in the checkpoint.

    So no epoch appears twice after a resume. A fresh run renames an existing file to ``<stem>.1.json`` (next free
    number).

    Args:
        path: the JSON file.
        history: returns the records.
        keep: keys of a record to write, in this order; a missing one is null. None writes all.

    Example:
        >>> hook = HistoryHook("training_history.json", lambda: [])
    """

    writes = True

    @checked
    def __init__(
        self,
        path: str | Path,
        history: Callable[[], Sequence[Mapping[str, Any]]],
        *,
        keep: Sequence[str] | None = None,
    ):
        self.path = Path(path).absolute()  # training may change the working directory
        self.history = history
        self.keep = keep

    def on_before_train(self, trainer: Engine) -> None:
        """Rename the file of another run if this run starts fresh, or resumes within its first epoch."""
        file_in_workspace(trainer, self.path)
        if trainer.step > 0 and self.history():
            self._write()  # drops epochs recorded after the checkpoint
        elif distributed.rank() == 0:
            set_aside(trainer, self.path)

    def on_after_epoch(self, trainer: Engine) -> None:
        """Write the file."""
        self._write()

    def _write(self) -> None:
        if distributed.rank() == 0:
            self._write_text(dump_records([self._kept(record) for record in self.history()]))

    def _write_text(self, text: str) -> None:
        """Write the file while other members of a population work."""
        run_off_turn(lambda: write_text(text, self.path))

    def _kept(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        return record if self.keep is None else {key: record.get(key) for key in self.keep}
