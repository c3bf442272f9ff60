"""Collection of training outputs for the metrics of an epoch record, exact across a resume.

Memory is bounded regardless of epoch length: older outputs of a regression are stored as sums, those of other tasks and
metrics are discarded, so such metrics cover the latest values of the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle import distributed
from treadle.engine.hook import BaseHook
from treadle.graphs.metrics import MOST_KEPT, GraphMetrics
from treadle.graphs.task import EpochMetrics, FedMetrics, GraphTask, Outputs
from treadle.nested import map_nested_tensor

if TYPE_CHECKING:
    from treadle.engine import Engine


class TrainOutputsHook(BaseHook):
    """Hook that keeps the latest outputs of an epoch's steps on the device, for the metrics of its record.

    Args:
        task: the task whose outputs are kept.
        metrics: metrics of the task.
    """

    def __init__(self, task: GraphTask, metrics: EpochMetrics):
        self._task = task
        self._outputs: list[Outputs] = []
        self._num_kept = 0
        self._metrics = metrics
        self._older = metrics.like() if isinstance(metrics, GraphMetrics) and metrics.adds_up else None
        self._left_out = False

    def on_before_step(self, trainer: Engine) -> None:
        """Discard outputs that no step has counted."""
        self._task.step_outputs.clear()

    def on_after_step(self, trainer: Engine) -> None:
        """Keep the outputs of the step; for a retried step, those of the last attempt."""
        taken = list(self._task.step_outputs)
        self._task.step_outputs.clear()
        counted = len(trainer.attempt.outputs)
        for outputs in taken[len(taken) - counted :] if counted else []:
            self._outputs.append(outputs)
            self._num_kept += outputs[0].numel()
        if self._num_kept > MOST_KEPT:
            self._forget_oldest(trainer)

    def _forget_oldest(self, trainer: Engine) -> None:
        """Enforce the bound: sum older outputs if the metrics are sums, otherwise discard them."""
        if self._older is not None:
            older = FedMetrics(self._older)
            for outputs in self._outputs[:-1]:
                older.update(outputs)
            self._older.fold()
            self._outputs = self._outputs[-1:]
        elif not self._left_out:
            self._left_out = True
            trainer.logger.warning(
                "training metrics use only the latest %s values of each epoch; those of an "
                "evaluation use all", f"{MOST_KEPT:,}",
            )  # fmt: skip
        while len(self._outputs) > 1 and self._total() > MOST_KEPT:
            del self._outputs[0]
        if self._older is None:
            self._outputs[0] = _latest(self._outputs[0], MOST_KEPT)
        self._num_kept = self._total()

    def _total(self) -> int:
        return sum(outputs[0].numel() for outputs in self._outputs)

    def on_after_epoch(self, trainer: Engine) -> None:
        """Discard the outputs of the epoch."""
        self._clear()

    def _clear(self) -> None:
        self._outputs, self._num_kept = [], 0
        if self._older is not None:
            self._older.reset()

    def measure(self) -> dict[str, float]:
        """Return the task's metrics of the kept outputs."""
        metrics = self._task.new_metrics()
        packed = _packed(self._outputs)
        at_once = packed["sizes"] is not None and isinstance(self._metrics, GraphMetrics)
        for outputs in [packed["parts"]] if at_once else self._outputs:
            metrics.update(outputs)
        if self._older is not None and isinstance(self._metrics, GraphMetrics):
            self._metrics.add_sums(self._older.sums())
        return {name: float(value) for name, value in metrics.compute().items()}

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Store the outputs of every rank."""
        packed = map_nested_tensor(Tensor.cpu, _packed(self._outputs))
        if self._older is not None and any(older := self._older.sums()):  # few epochs have more than the limit
            packed["older"] = older
        state_dict["hooks"][self.state_key] = {"ranks": distributed.gather_objects(packed)}

    def on_load_state_dict(self, trainer: Engine, state_dict: Mapping[str, Any]) -> None:
        """Restore the outputs; with a different number of ranks, rank 0 takes all, since metrics are over all ranks."""
        self._task.step_outputs.clear()
        self._clear()
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
            if self._older is not None and packed.get("older") is not None:  # older files have none
                self._older.add_sums(packed["older"])
        self._num_kept = self._total()


def _latest(outputs: Outputs, most: int) -> Outputs:
    """Return the last rows of an output with more values than the limit."""
    rows = max(1, most * len(outputs[0]) // max(1, outputs[0].numel()))
    if outputs[0].numel() <= most or not all(part is None or len(part) == len(outputs[0]) for part in outputs):
        return outputs
    pred, target, mask = outputs
    return pred[-rows:].clone(), target[-rows:].clone(), None if mask is None else mask[-rows:].clone()


def _packed(outputs: Sequence[Sequence[Tensor | None]]) -> dict[str, Any]:
    """Concatenate outputs of the same kind into a few tensors: thousands of small ones are slow to write and read."""
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
