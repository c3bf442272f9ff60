"""Epoch driver whose best rule is set by each training call and continues from the known best."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from treadle.engine import Engine
from treadle.engine.best import BestRule
from treadle.engine.session import resume_from_hooks
from treadle.errors import ConfigError
from treadle.faces.epochs import EpochTrainer


class SelectingEpochs(EpochTrainer):
    """Epoch driver that keeps its selection between calls, also through calls that select nothing.

    Args:
        engine: runs the steps.
        prefix: prefix of the names of evaluation results in a record.
    """

    def __init__(self, engine: Engine, *, prefix: str = "val_"):
        super().__init__(engine, prefix=prefix)
        self._make_rule: Callable[[], BestRule] | None = None
        self._kept: dict[str, Any] | None = None  # state of an inactive rule

    @property
    def selection(self) -> dict[str, Any] | None:
        """State of the best rule, even if inactive; None before there was any."""
        return self._kept if self.best is None else self.best.state_dict()

    def select_by(self, make_rule: Callable[[], BestRule] | None) -> None:
        """Activate a rule that continues from the known best, or none."""
        self._kept = self.selection
        self._make_rule = make_rule
        self.best = None if make_rule is None else self._informed(make_rule())
        self.improved = False

    def prepare_alone(self) -> None:
        """Prepare for a single epoch, without selection or early stopping.

        Hooks load their checkpoint here, before the target is set, which is one epoch beyond it.
        """
        self.select_by(None)
        self.engine.prepare()
        resume_from_hooks(self.engine)

    def _informed(self, rule: BestRule) -> BestRule:
        known = self._kept
        if known is not None and (known["metric"], known["mode"]) == (rule.metric, rule.mode):
            rule.load_state_dict(known)
            return rule
        if known is not None:
            self.engine.logger.warning(
                "best metric %r (%s): until now this run selected by %r (%s); the best epoch is selected anew from "
                "its history", rule.metric, rule.mode, known["metric"], known["mode"],
            )  # fmt: skip
        for record in self.history:
            with contextlib.suppress(ConfigError):  # no evaluation in this epoch
                rule.update(record["epoch"], rule.value_in(record))
        return rule

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint entries of the epoch driver."""
        known = self.selection
        return {
            **super().state_dict(),
            "best_metric": None if known is None else known["best"],
            "best_epoch": None if known is None else known["best_epoch"],
            "selection": known,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the entries from a checkpoint tree; an active rule takes over the tree's state."""
        self.best, self._kept = None, state_dict.get("selection")
        super().load_state_dict(state_dict)
        if self._make_rule is not None:
            self.best = self._informed(self._make_rule())
