"""StepLogHook: one line of JSON for every step, which ``treadle replay`` compares with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from treadle import distributed
from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError, NonFiniteError
from treadle.hooks.files import append_lines, continue_lines, in_workspace, to_json
from treadle.hooks.tracking import Guard
from treadle.means import read_scalars

if TYPE_CHECKING:
    from treadle.engine import Engine


class StepRows:
    """Rows about steps whose numbers stay on the device until all are read with one transfer.

    Example:
        >>> rows = StepRows()
        >>> rows.read()
        []
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, trainer: Engine) -> None:
        """Notes the present step."""
        info = trainer.step_info
        self._rows.append({
            "step": trainer.step, "epoch": trainer.epoch + 1, "position": trainer.cursor.position,
            "loss": list(info["loss"]), "weight": list(info["weight"]),
            "sums": [output.reduction == "sum" for output in trainer.attempt.outputs][:1],
            "grad_norm": info.get("grad_norm"), "lr": list(info["lr"]), "applied": info["applied"],
            "retries": info["retries"], "reason": info["reason"],
        })  # fmt: skip

    def read(self) -> list[dict[str, Any]]:
        """Returns the rows as plain values and forgets them."""
        rows, self._rows = self._rows, []
        places: list[tuple[Any, Any]] = []
        for row in rows:
            places += [(row, "grad_norm")] if isinstance(row["grad_norm"], Tensor) else []
            for values in (row["loss"], row["weight"], row["lr"]):
                places += [(values, index) for index, value in enumerate(values) if isinstance(value, Tensor)]
        numbers = read_scalars(values[key] for values, key in places).tolist()
        for (values, key), number in zip(places, numbers, strict=True):
            values[key] = number
        return [_finished(row) for row in rows]


def _finished(row: dict[str, Any]) -> dict[str, Any]:
    """Makes one loss of those of the micro-batches, which are kept beside it where there are several."""
    losses, weights, sums = row["loss"], row.pop("weight"), row.pop("sums")
    counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if loss is not None]
    if len(losses) > 1:
        row["losses"] = losses
    if len(counted) <= 1 or any(sums):
        row["loss"] = sum(loss for loss, _ in counted) if counted else None
    else:
        total = sum(weight for _, weight in counted)
        row["loss"] = sum(loss * weight for loss, weight in counted) / total if total else math.nan
    return row


class StepLogHook(BaseHook):
    """Writes ``{"step", "epoch", "position", "loss", "grad_norm", "lr", "applied", "retries", "reason"}`` per step.

    ``epoch`` is 1-based, ``position`` counts the micro-batches of the epoch consumed, ``loss`` is the step's loss to
    the last bit (with accumulation the weighted mean, and ``losses`` holds each); NaN and infinities are null. The
    lines of ``interval`` steps are written at once, with one read of the device, and before every checkpoint. A
    resumed run first cuts the lines after its step; a run that starts from nothing renames the file it finds. Lines
    that cannot be written, on a full disk say, are left out with a warning and do not end the training.

    Args:
        path: the file; relative to the trainer's workspace.
        interval: steps between writes, >= 1.

    Raises:
        ConfigError: ``interval`` is below 1.

    Example:
        >>> hook = StepLogHook("steps.jsonl")
    """

    writes = True

    def __init__(self, path: str | Path = "steps.jsonl", interval: int = 100):
        if interval < 1:
            raise ConfigError("must be at least 1 step", argument="interval", value=interval)
        self.path = Path(path)
        self.interval = interval
        self._rows = StepRows()
        self._guard = Guard()
        self._file: Path | None = None

    def on_before_train(self, trainer: Engine) -> None:
        """Sets the file of another run aside, or cuts what a resumed run will write again."""
        path = in_workspace(trainer, self.path)
        self._rows = StepRows()
        if distributed.rank() == 0:
            continue_lines(trainer, path)
            self._file = path

    def on_after_step(self, trainer: Engine) -> None:
        """Notes the step and writes when it is time."""
        if self._file is None:
            return
        self._rows.add(trainer)
        if trainer.step % self.interval == 0 or trainer.is_last_step:
            self.flush(trainer)

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Writes what a run that resumes from this state would not see again."""
        self.flush(trainer)
        state_dict["hooks"][self.state_key] = {"through": trainer.step}

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Writes the rest, and the step that ended training as non-finite."""
        if self._file is not None and isinstance(error, NonFiniteError) and error.step == trainer.step:
            self._rows.add(trainer)
        self.flush(trainer)
        self._file = None

    def flush(self, trainer: Engine) -> None:
        """Writes the rows that were collected."""
        if self._file is None or not len(self._rows):
            return
        lines = [json.dumps(to_json(row), allow_nan=False) for row in self._rows.read()]
        with self._guard(trainer, self, f"writing at step {trainer.step}"):
            append_lines(self._file, lines)


def read_steps(path: Path) -> Mapping[int, dict[str, Any]]:
    """Returns the rows of a file that StepLogHook wrote, by step; damaged lines are left out.

    Example:
        >>> read_steps(Path("no_such_file.jsonl"))
        {}
    """
    rows: dict[int, dict[str, Any]] = {}
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            rows[int(row["step"])] = row
        except (ValueError, KeyError, TypeError):
            continue
    return rows
