"""StepLogHook: one JSON line per step, for comparison by ``treadle replay``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from treadle import distributed
from treadle.device.host_transfer import HostTransfer, read_scalars
from treadle.engine.hook import BaseHook
from treadle.errors import NonFiniteError
from treadle.errors.arguments import check_least, checked
from treadle.hooks.files import append_lines, continue_lines, file_in_workspace, to_json
from treadle.hooks.tracking import Guard
from treadle.optim.nonfinite import SCALE_LOWERED

if TYPE_CHECKING:
    from treadle.engine import Engine
    from treadle.engine.block import StepBlock

_encode = json.JSONEncoder(allow_nan=False).encode  # json.dumps creates one per call


class StepRows:
    """Rows of steps whose numbers stay on the device until they are all read with one transfer.

    Example:
        >>> rows = StepRows()
        >>> rows.read()
        []
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._blocks: list[tuple[int, BlockRows]] = []  # with the number of earlier rows
        self._latest: BlockRows | None = None

    def __len__(self) -> int:
        return len(self._rows) + len(self._blocks)

    def add(self, trainer: Engine) -> None:
        """Record the current step."""
        info = trainer.step_info
        self._rows.append({
            "step": trainer.step, "epoch": trainer.epoch + 1, "position": trainer.cursor.position,
            "loss": list(info["loss"]), "weight": list(info["weight"]),
            "sums": [output.reduction == "sum" for output in trainer.attempt.outputs][:1],
            "grad_norm": info.get("grad_norm"), "lr": list(info["lr"]), "applied": info["applied"],
            "retries": info["retries"], "reason": info["reason"], "may_skip": trainer.guard.skips is not None,
        })  # fmt: skip

    def add_block(self, block: StepBlock) -> None:
        """Record the steps of a block, and start copying their numbers to the host."""
        self._latest = BlockRows(block, self._latest)
        self._blocks.append((len(self._rows), self._latest))

    def lines(self) -> list[str]:
        """Return and clear the rows, as JSON lines."""
        single, blocks = [_line(row) for row in self.read()], self._blocks
        self._blocks = []
        lines, at = [], 0
        for before, block in blocks:
            lines += single[at:before]
            lines += block.lines()
            at = before
        return lines + single[at:]

    def read(self) -> list[dict[str, Any]]:
        """Return and clear the rows of single steps, as plain values."""
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


class BlockRows:
    """Rows of the steps of a block, whose numbers are copied to the host during training.

    Args:
        block: block of steps.
        before: rows of an earlier block; unchanged learning rates are not copied again.
    """

    def __init__(self, block: StepBlock, before: BlockRows | None = None):
        self._block = block
        self._numbers = HostTransfer(block.numbers)
        self._rates: list[HostTransfer | float]
        if before is not None and before._block.rates is block.rates:
            self._rates = before._rates
        else:
            self._rates = [HostTransfer(rate.double()) if isinstance(rate, Tensor) else rate for rate in block.rates]

    def lines(self) -> list[str]:
        """Return the rows as JSON lines, like those of single steps."""
        numbers, block = self._numbers.result(), self._block
        rates: list[float] = [rate.tolist() if isinstance(rate, HostTransfer) else rate for rate in self._rates]
        steps = range(block.first_step, block.first_step + len(block))
        positions = range(block.first_position, block.first_position + len(block))
        norms, losses = numbers[:, 0].tolist(), (numbers[:, 1] + 0).tolist()  # a sum has no -0.0
        rows = zip(steps, positions, losses, norms, strict=True)
        if bool(numbers.isfinite().all()) and all(map(math.isfinite, rates)):
            line = (
                f'{{"step": %d, "epoch": {block.epoch + 1}, "position": %d, "loss": %r, "grad_norm": %r, '
                f'"lr": {_encode(rates)}, "applied": true, "retries": 0, "reason": null}}'
            )
            return [line % row for row in rows]
        return [
            _line({
                "step": step, "epoch": block.epoch + 1, "position": position, "loss": loss, "grad_norm": norm,
                "lr": rates, "applied": not skipped, "retries": 0, "reason": SCALE_LOWERED if skipped else None,
            })
            for step, position, loss, norm in rows
            for skipped in [block.may_skip and not math.isfinite(norm)]
        ]  # fmt: skip


def _finished(row: dict[str, Any]) -> dict[str, Any]:
    """Combine the losses of micro-batches into one; keep them too if there are several."""
    losses, weights, sums = row["loss"], row.pop("weight"), row.pop("sums")
    if row.pop("may_skip") and row["applied"] and not math.isfinite(row["grad_norm"]):
        row |= {"applied": False, "reason": SCALE_LOWERED}
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
    """Hook that writes a line ``{"step", "epoch", "position", "loss", "grad_norm", "lr", "applied", "retries",
    "reason"}`` per step.

    ``epoch`` is 1-based, ``position`` counts the micro-batches of the epoch consumed, ``loss`` is the step's loss to
    the last bit (with accumulation, the weighted mean; ``losses`` holds all); NaN and infinities are null. The lines of
    ``interval`` steps are written together, with one read of the device, and before every checkpoint. A resumed run
    first truncates the lines after its step; a fresh run renames an existing file. Lines that cannot be written, for
    example on a full disk, are dropped with a warning and do not end training.

    Args:
        path: the file; relative to the trainer's workspace.
        interval: steps between writes, >= 1.

    Raises:
        ConfigError: ``interval`` is below 1.

    Example:
        >>> hook = StepLogHook("steps.jsonl")
    """

    writes = True

    @checked
    def __init__(self, path: str | Path = "steps.jsonl", interval: int = 100):
        check_least(1, interval=interval)
        self.path = Path(path)
        self.interval = interval
        self._rows = StepRows()
        self._guard = Guard()
        self._file: Path | None = None

    def on_before_train(self, trainer: Engine) -> None:
        """Rename the file of another run, or truncate what a resumed run will rewrite."""
        path = file_in_workspace(trainer, self.path)
        self._rows = StepRows()
        if distributed.rank() == 0:
            continue_lines(trainer, path)
            self._file = path

    def on_after_step(self, trainer: Engine) -> None:
        """Record the step and write if due."""
        if self._file is None:
            return
        self._rows.add(trainer)
        if trainer.step % self.interval == 0 or trainer.is_last_step:
            self.flush(trainer)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow any number of steps."""
        return None

    def on_after_steps(self, trainer: Engine, block: StepBlock) -> None:
        """Record the steps of a block and write if due."""
        if self._file is None:
            return
        if trainer.step // self.interval > (block.first_step - 1) // self.interval:
            self.flush(trainer)  # steps before the block; the block's own numbers would have to be waited for
        self._rows.add_block(block)
        if trainer.is_last_step:
            self.flush(trainer)

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Write the rows that a run resumed from this state would not repeat."""
        self.flush(trainer)
        state_dict["hooks"][self.state_key] = {"through": trainer.step}

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Write the remaining rows, and the non-finite step that ended training."""
        if self._file is not None and isinstance(error, NonFiniteError) and error.step == trainer.step:
            self._rows.add(trainer)
        self.flush(trainer)
        self._file = None

    def flush(self, trainer: Engine) -> None:
        """Write the collected rows."""
        if self._file is None or not len(self._rows):
            return
        lines = self._rows.lines()
        with self._guard(trainer, self, f"writing at step {trainer.step}"):
            append_lines(self._file, lines)


def _line(row: Mapping[str, Any]) -> str:
    """Return a row as JSON, replacing non-finite numbers only if there are any."""
    try:
        return _encode(row)
    except ValueError:
        return _encode(to_json(row))


def read_steps(path: Path) -> Mapping[int, dict[str, Any]]:
    """Return the rows of a StepLogHook file by step, without damaged lines.

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
