"""JsonlHook: log points as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from treadle.errors.arguments import checked
from treadle.hooks.files import continue_lines, file_in_workspace, in_workspace, to_json
from treadle.hooks.tracking import TrackerHook

if TYPE_CHECKING:
    from treadle.engine import Engine


class JsonlHook(TrackerHook):
    """JSON lines file with one line per log point: ``{"step": 10, "train/loss": 0.5, ...}``; NaN and infinities are
    null.

    A resumed run first truncates the lines after its step, so the curve has no gaps or duplicates. A fresh run renames
    an existing file to ``<stem>.1.jsonl`` (next free number).

    Args:
        path: the file; relative to the trainer's workspace.

    Example:
        >>> hook = JsonlHook("metrics.jsonl")
    """

    @checked
    def __init__(self, path: str | Path = "metrics.jsonl"):
        super().__init__()
        self.path = Path(path)
        self._file: IO[str] | None = None
        self._last_keys: set[str] = set()

    def check(self, trainer: Engine) -> None:
        """Check the path."""
        file_in_workspace(trainer, self.path)

    def open(self, trainer: Engine) -> None:
        """Rename the file of another run, or truncate what a resumed run will rewrite."""
        path = in_workspace(trainer, self.path)
        self.sent_through = trainer.step
        self._last_keys = continue_lines(trainer, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (closed in close)

    def was_sent(self, key: str, step: int) -> bool:
        """Check the lines of the step resumed from."""
        return key in self._last_keys

    def write(self, trainer: Engine, values: dict[str, Any]) -> None:
        """Append a line and flush it, so that a killed process loses none."""
        assert self._file is not None
        plain = {key: value for key, value in values.items() if key != "step" and _is_plain(value)}
        self.name_skipped(trainer, [key for key in values if key not in plain])
        line = json.dumps(to_json({"step": trainer.step, **plain}), allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()

    def close(self, trainer: Engine, error: BaseException | None) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
