"""The outputs of the training steps of an epoch, kept for the metrics of its record; exact over a resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle import distributed
from treadle.engine.hook import BaseHook
from treadle.graphs.task import GraphTask, Outputs

if TYPE_CHECKING:
    from treadle.engine import Engine


class TrainOutputsHook(BaseHook):
    """Keeps the outputs of an epoch's steps, on the device, for the metrics of its record.

    Args:
        task: whose outputs.

    Example:
        >>> # hook = TrainOutputsHook(task)
    """

    def __init__(self, task: GraphTask):
        self._task = task
        self._outputs: list[Outputs] = []

    def on_before_step(self, trainer: Engine) -> None:
        """Forgets what no step has counted."""
        self._task.step_outputs = []

    def on_after_step(self, trainer: Engine) -> None:
        """Keeps what the step counted: of a step that was tried again, the last try."""
        taken, self._task.step_outputs = self._task.step_outputs, []
        counted = len(trainer.attempt.outputs)
        self._outputs += taken[len(taken) - counted :] if counted else []

    def on_after_epoch(self, trainer: Engine) -> None:
        """Starts anew."""
        self._outputs = []

    def measure(self) -> dict[str, float]:
        """Returns the task's metrics of what was kept."""
        metrics = self._task.new_metrics()
        for outputs in self._outputs:
            metrics.update(outputs)
        return {name: float(value) for name, value in metrics.compute().items()}

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Stores the outputs of every rank."""
        own = [[None if part is None else part.cpu() for part in outputs] for outputs in self._outputs]
        state_dict["hooks"][self.state_key] = {"ranks": distributed.gather_objects(_packed(own))}

    def on_load_state_dict(self, trainer: Engine, state_dict: Mapping[str, Any]) -> None:
        """Restores them; on another number of ranks, the first one takes all, since metrics are over all ranks."""
        self._outputs, self._task.step_outputs = [], []
        saved = ((state_dict.get("hooks") or {}).get(self.state_key) or {}).get("ranks", [])
        if len(saved) == distributed.world_size():
            saved = [saved[distributed.rank()]]
        elif distributed.rank() != 0:
            saved = []
        for packed in saved:
            self._outputs += [
                tuple(None if part is None else part.to(trainer.device) for part in outputs)  # type: ignore[misc]
                for outputs in _unpacked(packed)
            ]


def _packed(outputs: Sequence[Sequence[Tensor | None]]) -> dict[str, Any]:
    """Joins outputs of equal kinds into few tensors: thousands of small ones are slow to write and to read."""
    kinds = {tuple(None if part is None else (part.dtype, part.shape[1:]) for part in parts) for parts in outputs}
    if len(kinds) != 1:
        return {"parts": [list(parts) for parts in outputs], "sizes": None}
    columns = list(zip(*outputs, strict=True))
    joined = [None if column[0] is None else torch.cat(column) for column in columns]
    return {"parts": joined, "sizes": [[0 if part is None else len(part) for part in parts] for parts in outputs]}


def _unpacked(packed: Mapping[str, Any]) -> list[list[Tensor | None]]:
    if packed["sizes"] is None:
        return list(packed["parts"])
    columns = [
        [None] * len(packed["sizes"]) if part is None else list(part.split(list(sizes)))
        for part, sizes in zip(packed["parts"], zip(*packed["sizes"], strict=True), strict=True)
    ]
    return [list(parts) for parts in zip(*columns, strict=True)]
