"""OptunaPruningHook: reports a metric to an Optuna trial and ends pruned runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.hooks.tracking import epoch_records
from treadle.hooks.values import require
from treadle.nested import flatten_nested_dict

if TYPE_CHECKING:
    from treadle.engine import Engine


class OptunaPruningHook(BaseHook):
    """Hook that reports one metric to an Optuna trial, which may prune the run.

    The metric is a key of the epoch's record, such as ``"eval_loss"``, or of a ValidationHook, such as ``"val_loss"``;
    an epoch reports under its number, a ValidationHook under its step. A pruned run ends with ``optuna.TrialPruned``
    after the step or epoch is complete, as Optuna expects of an objective. On several ranks, pass Optuna's
    ``TorchDistributedTrial``, with which all ranks prune together.

    Args:
        trial: the objective's trial.
        metric: metric to report; the direction is the study's.

    Raises:
        ConfigError: the trial cannot report or prune.
        MissingExtraError: optuna is not installed.

    Example:
        >>> # def objective(trial):
        >>> #     rate = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        >>> #     trainer = Trainer(..., hooks=[OptunaPruningHook(trial, "eval_loss")])
        >>> #     return min(trainer.train(loader, 10, eval_loader)["eval_loss"])
    """

    @checked
    def __init__(self, trial: Any, metric: str):
        for method in ("report", "should_prune"):
            if not callable(getattr(trial, method, None)):
                raise ConfigError(f"has no {method}(); pass the trial of an objective", argument="trial", value=trial)
        self._pruned_error: type[Exception] = require("optuna", "OptunaPruningHook", extra="tune").TrialPruned
        self.trial = trial
        self.metric = metric
        self._reported: list[int] = []
        self._pruned_at: int | None = None

    def on_before_train(self, trainer: Engine) -> None:
        """Clear the decision of an earlier run."""
        self._pruned_at = None

    def on_log(self, trainer: Engine, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Report the metric when a ValidationHook logs it."""
        for path, value in {} if dry_run else flatten_nested_dict(records).items():
            if "_".join(path) == self.metric:
                self._report(float(value), trainer.step)

    def on_after_epoch(self, trainer: Engine) -> None:
        """Report the metric of the epoch's record, and end a pruned run.

        Raises:
            TrialPruned: raised by Optuna, if the trial is pruned.
            ConfigError: no record so far has the metric.
        """
        record = next(iter(epoch_records(trainer)[-1:]), None)
        if record is not None and self.metric in record:
            self._report(float(record[self.metric]), int(record["epoch"]))
        elif record is not None and not self._reported:
            known = [key for key, value in record.items() if isinstance(value, float)]
            raise ConfigError(f"the epoch's record has {', '.join(known)}", argument="metric", value=self.metric)
        self._leave_if_pruned()

    def on_before_step(self, trainer: Engine) -> None:
        """End a run that was pruned after this hook saw the previous step."""
        self._leave_if_pruned()

    def on_after_step(self, trainer: Engine) -> None:
        """End a run that was pruned in this step."""
        self._leave_if_pruned()

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow any number of steps until the trial is pruned."""
        return None if self._pruned_at is None else 1

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Save the reported epochs or steps, so that a resumed trial reports none twice."""
        state_dict["hooks"][self.state_key] = {"reported": list(self._reported)}

    def on_load_state_dict(self, trainer: Engine, state_dict: Mapping[str, Any]) -> None:
        """Restore the reported epochs or steps."""
        saved = (state_dict.get("hooks") or {}).get(self.state_key)
        if saved is not None:
            self._reported = [int(step) for step in saved["reported"]]

    def _report(self, value: float, step: int) -> None:
        if step in self._reported:
            return
        self.trial.report(value, step)
        self._reported.append(step)
        if self.trial.should_prune():
            self._pruned_at = step

    def _leave_if_pruned(self) -> None:
        if self._pruned_at is not None:
            raise self._pruned_error(f"pruned at {self._pruned_at}")
