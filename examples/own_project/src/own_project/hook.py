"""A custom hook: it observes the run, keeps its state in the checkpoint, and writes a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from treadle import BaseHook, Engine


class HardSamplesHook(BaseHook):
    """Hook that writes the steps with the largest loss of a sample to ``hard.json``.

    Nothing is read from the device before the end of an epoch. The records go into the checkpoint, so that an
    interrupted run writes the same file as an uninterrupted one.

    Args:
        count: the number of steps kept.
    """

    def __init__(self, count: int = 5):
        self.count = count
        self._waiting: list[tuple[int, Tensor]] = []
        self._hardest: list[tuple[float, int]] = []

    def on_after_step(self, trainer: Engine) -> None:
        """Keep the record of the step, on its device."""
        for records in trainer.step_info["records"]:
            self._waiting.append((trainer.step, records["losses"]))

    def on_after_train(self, trainer: Engine) -> None:
        """Write the file."""
        self._read()
        if trainer.workspace is not None:
            hardest = [{"step": step, "loss": loss} for loss, step in self._hardest]
            (trainer.workspace / "hard.json").write_text(json.dumps(hardest, indent=1) + "\n", encoding="utf-8")

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Add the records to the checkpoint."""
        self._read()
        state_dict["hooks"][self.state_key] = {"hardest": self._hardest}

    def on_load_state_dict(self, trainer: Engine, state_dict: Mapping[str, Any]) -> None:
        """Restore the records."""
        found = state_dict["hooks"].get(self.state_key, {"hardest": []})
        self._hardest = [(float(loss), int(step)) for loss, step in found["hardest"]]

    def _read(self) -> None:
        seen = [(float(loss), step) for step, loss in self._waiting]
        self._hardest = sorted([*self._hardest, *seen], reverse=True)[: self.count]
        self._waiting = []
