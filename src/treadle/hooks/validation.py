"""ValidationHook: validation during training, best checkpoint and early stopping."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from treadle import distributed
from treadle.checkpoint.files import link_in_folder
from treadle.checkpoint.introspection import is_user_class
from treadle.checkpoint.ranks import on_rank_0
from treadle.checkpoint.store import save_checkpoint
from treadle.data.amount import FirstBatches
from treadle.data.sources import refuse_dataset
from treadle.engine.best import BestRule, Mode
from treadle.engine.evaluation import EvaluationAbandoned, restored_closure, try_override
from treadle.engine.hook import BaseHook
from treadle.engine.metrics import EpochMetrics
from treadle.engine.predictions import scored_weights
from treadle.engine.preflight import try_evaluation
from treadle.engine.signal_exit import exit_on_signal
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked
from treadle.hooks.files import append_lines, continue_lines, to_json
from treadle.hooks.tracking import Guard
from treadle.nested import flatten_nested_dict
from treadle.task import Rng, StepOutput, TakesMetrics, Task, Totals, as_step_output

if TYPE_CHECKING:
    from treadle.engine import Engine

EvalStep = Callable[[Any, Any], Any]
_LINES = "validation.jsonl"


class ValidationHook(BaseHook):
    """Hook that evaluates every ``interval`` steps or after each epoch, without affecting training.

    The averaged weights are evaluated if the run keeps an average. Results are named ``val_loss`` and ``val_<record>``;
    they go to the log, to trackers under ``val/...``, to ``history`` and to ``validation.jsonl`` in the workspace,
    which ``treadle report`` plots. History, best value and patience are part of the checkpoint, so a run stopped at any
    point, even inside an evaluation, ends like an uninterrupted one.

    Args:
        loader: batches for evaluation, or a dict of named loaders, whose results are named ``val_<name>_loss``.
        interval: steps between evaluations, >= 1; None evaluates after each epoch. The last step is evaluated too.
        eval_step: ``eval_step(trainer, batch)`` with the return value of ``forward``; None uses the trainer's own.
        metric: metric that selects the best state; None takes the loss of the first loader.
        mode: ``"min"``, ``"max"``, or None for the direction implied by the metric's name.
        patience: evaluations without an improvement until training stops; None never stops.
        min_delta: smallest improvement that counts.
        best: file of the best state, in the workspace if it is relative; None keeps none.
        name: prefix of the names of results; two hooks of one trainer need different names.
        metrics: names such as ``["accuracy"]``, functions ``fn(outputs, targets)`` of the whole set, torchmetrics
            objects, or a dict of these by name; results are named ``val_<name>``. In a BaseTrainer, ``forward`` then
            returns a StepOutput with ``outputs=(outputs, targets)``.

    Attributes:
        history: one record per evaluation, with ``step`` and ``epoch``.
        best_rule: rule with the best value so far; its ``best_epoch`` is a step.

    Raises:
        ConfigError: a value is outside its range, or a data set is given in place of a loader.

    Example:
        >>> hook = ValidationHook([[0.5, 1.5]], interval=100, patience=5)
        >>> hook.metric
        'val_loss'
    """

    writes = True
    writes_in_workspace_alone = True
    _on_all_ranks = True

    @checked
    def __init__(
        self,
        loader: Iterable[Any] | Mapping[str, Iterable[Any]],
        *,
        interval: int | None = None,
        eval_step: EvalStep | None = None,
        metric: str | None = None,
        mode: Mode | None = None,
        patience: int | None = None,
        min_delta: float = 0.0,
        best: str | Path | None = "best_model.pt",
        name: str = "val",
        metrics: Any = None,
    ):
        check_least(1, interval=interval)
        self.loaders = dict(loader) if isinstance(loader, Mapping) else {"": loader}
        if not self.loaders:
            raise ConfigError("it is an empty dict, so there is nothing to evaluate", argument="loader")
        for one in self.loaders.values():
            if one is None or isinstance(one, (str, bytes)):
                raise ConfigError("must be a DataLoader or another iterable of batches", argument="loader", value=one)
            refuse_dataset(one)
        first = next(iter(self.loaders))
        self.interval = interval
        self.eval_step = eval_step
        self.metric = metric or f"{name}_{first}_loss".replace("__", "_")
        self.best_rule = BestRule(self.metric, mode, min_delta, patience)
        self.best = None if best is None else Path(best)
        self.name = name
        self.metrics = metrics
        self.history: list[dict[str, Any]] = []
        self._due = False
        self._guard = Guard()
        self._file: Path | None = None
        EpochMetrics(metrics, torch.device("cpu"))  # raises now for an unknown name or a wrong function
        self._metrics: EpochMetrics | None = None

    @property
    def state_key(self) -> str:
        """Key of this hook's state in a checkpoint."""
        return "ValidationHook" if self.name == "val" else f"ValidationHook {self.name}"

    # -- events ---------------------------------------------------------------------------------------------------

    def on_before_train(self, trainer: Engine) -> None:
        """Prepare for writing; repeat an evaluation abandoned on a signal, and stop a run that had stopped early."""
        self._file = None
        if self.metrics is not None:
            loss_fn = trainer.task.loss_fn if isinstance(trainer.task, TakesMetrics) else None
            self._metrics = EpochMetrics(self.metrics, trainer.device, loss_fn=loss_fn)
        if trainer.step == 0 and not trainer.state.loaded:
            trainer.state.isolated(trainer, lambda: self._try_first_batches(trainer))
        if distributed.rank() == 0 and trainer.workspace is not None:
            with self._guard(trainer, self, "opening the file"):
                path = trainer.workspace / (_LINES if self.name == "val" else f"validation_{self.name}.jsonl")
                continue_lines(trainer, path)
                self._file = path
        if trainer.step == 0 and self.best is not None:
            trainer.state.origin.watch(self._best_path(trainer).parent, lambda folder: [self._best_path(trainer)])
        if self._due:
            self._evaluate(trainer)
        elif trainer.step == 0 and trainer.settings.limits.num_sanity_eval_steps:
            trainer.state.isolated(trainer, lambda: self._try(trainer))
        self._stop_if_patience_is_over(trainer)

    def on_after_step(self, trainer: Engine) -> None:
        """Evaluate if due."""
        if self.interval is not None and (trainer.step % self.interval == 0 or trainer.is_last_step):
            self._evaluate(trainer)

    def steps_ahead(self, trainer: Engine) -> int | None:
        """Allow steps up to the next evaluation."""
        return None if self.interval is None else self.interval - trainer.step % self.interval

    def on_after_epoch(self, trainer: Engine) -> None:
        """Evaluate after an epoch if no interval is given."""
        if self.interval is None:
            self._evaluate(trainer)

    def on_after_train(self, trainer: Engine) -> None:
        """Evaluate the last step, unless already done."""
        if not self.history or self.history[-1]["step"] != trainer.step:
            self._evaluate(trainer)

    def on_state_dict(self, trainer: Engine, state_dict: dict[str, Any]) -> None:
        """Save history, best value, patience, and whether an evaluation abandoned on a signal is due."""
        state_dict["hooks"][self.state_key] = {
            "history": [dict(record) for record in self.history],
            "best": self.best_rule.state_dict(),
            "due": self._due,
        }

    def on_load_state_dict(self, trainer: Engine, state_dict: Mapping[str, Any]) -> None:
        """Restore the state."""
        saved = (state_dict.get("hooks") or {}).get(self.state_key)
        if saved is not None:
            self.history = [dict(record) for record in saved["history"]]
            self.best_rule.load_state_dict(saved["best"])
            self._due = bool(saved["due"])

    # -- the evaluation -------------------------------------------------------------------------------------------

    def _evaluate(self, trainer: Engine) -> None:
        self._due = True
        try:
            values = self._results(trainer)
        except EvaluationAbandoned:
            exit_on_signal(trainer)
            raise
        self._due = False
        record = {f"{self.name}_{key}": float(value) for key, value in values.items() if _is_number(value)}
        improved = self.best_rule.update(trainer.step, self.best_rule.value_in(record))
        self.history.append({"step": trainer.step, "epoch": trainer.epoch, **record})
        self._report(trainer, record, values, improved=improved)
        writes = self.best is not None and (self.best.is_absolute() or trainer.workspace is not None)
        if improved and writes and not trainer.settings.limits.fast_dev_run:
            trainer.request_write(lambda: self._write_best(trainer))
        self._stop_if_patience_is_over(trainer)

    def _try(self, trainer: Engine) -> None:
        """Evaluate a few batches before step 1, log the results and discard them."""
        with trainer.evaluations_limited_to(trainer.settings.limits.sanity):
            values = self._results(trainer)
        if distributed.rank() == 0:
            shown = " ".join(f"{self.name}_{key} {value:.4g}" for key, value in values.items() if _is_number(value))
            trainer.logger.info("evaluated before step 1: %s", shown, extra={"topic": "sanity"})

    def _results(self, trainer: Engine) -> dict[str, Any]:
        """Evaluate every loader; return the results by flat name."""
        task = self._task(trainer)
        with scored_weights(trainer):
            results = {name: trainer.evaluate(loader, task) for name, loader in self.loaders.items()}
        return {
            "_".join((name, *path)) if name else "_".join(path): value
            for name, result in results.items()
            for path, value in flatten_nested_dict(result).items()
        }

    def _task(self, trainer: Engine) -> Task | None:
        task = trainer.task if self.eval_step is None else _EvalTask(trainer, self.eval_step)
        if self._metrics is None:
            return None if self.eval_step is None else task
        return task.with_metrics(self._metrics) if isinstance(task, TakesMetrics) else _MetricTask(task, self._metrics)

    def _try_first_batches(self, trainer: Engine) -> None:
        """Evaluate one batch of each loader before step 1; for an overridden ``evaluate``, check the results too.

        Raises:
            ConfigError: the metric to select by is not among the results.
        """
        owner = next(kind for kind in type(trainer).__mro__ if "evaluate" in vars(kind))
        own, task, known = is_user_class(owner), self._task(trainer), set[str]()
        with scored_weights(trainer), restored_closure(self.eval_step or trainer.task.step):
            for name, loader in self.loaders.items():
                found = try_evaluation(trainer, loader, None if own else task or trainer.task)
                if own and not isinstance(loader, Iterator):
                    first = FirstBatches(loader, 1, "limit_eval_batches")
                    with trainer.evaluations_limited_to(None):
                        try_override(partial(trainer.evaluate, first, task), trainer.logger)
                if found is None:
                    return
                before = f"{self.name}_{name}_" if name else f"{self.name}_"
                known |= {before + one.replace("/", "_") for one in ("loss", *found)}
        if self.metric not in known:
            raise ConfigError(
                f"no evaluation will report it, only {', '.join(sorted(known))}", argument="metric",
                value=self.metric,
            )  # fmt: skip

    def _report(
        self, trainer: Engine, record: Mapping[str, float], values: Mapping[str, Any], *, improved: bool
    ) -> None:
        if distributed.rank() == 0:
            shown = " ".join(f"{key} {value:.4g}" for key, value in record.items())
            text = "Step %d: %s%s"
            trainer.logger.info(text, trainer.step, shown, " (best)" if improved else "", extra={"topic": "epoch"})
        if self._file is not None:
            line = to_json({"step": trainer.step, **record})
            with self._guard(trainer, self, f"writing at step {trainer.step}"):
                append_lines(self._file, [json.dumps(line, allow_nan=False)])
        trainer.log({self.name: dict(values)})

    def _best_path(self, trainer: Engine) -> Path:
        assert self.best is not None
        return self.best if trainer.workspace is None else trainer.workspace / self.best

    def _write_best(self, trainer: Engine) -> None:
        path = self._best_path(trainer)
        trainer.state.origin.clear()
        tree = trainer.state_dict()
        written = on_rank_0(lambda: save_checkpoint(tree, path))
        if trainer.workspace is not None and written.parent == trainer.workspace:
            # The same name for every front end.
            on_rank_0(lambda: link_in_folder(written, written.parent / "checkpoints" / "best.pt"))

    def _stop_if_patience_is_over(self, trainer: Engine) -> None:
        if self.best_rule.should_stop:
            trainer.should_stop = True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


class _EvalTask:
    """Task that calls a user's function for each batch."""

    def __init__(self, trainer: Engine, eval_step: EvalStep):
        self._trainer = trainer
        self._eval_step = eval_step

    def step(self, model: nn.Module, batch: Any, totals: Totals = None, generator: Rng = None) -> StepOutput:
        return as_step_output(self._eval_step(self._trainer, batch), training=False)


class _MetricTask:
    """Evaluation task whose outputs are passed to metrics.

    Raises:
        ConfigError: the task returns no outputs.
    """

    def __init__(self, task: Task, metrics: EpochMetrics):
        self._task = task
        self._metrics = metrics

    def step(self, model: nn.Module, batch: Any, totals: Totals = None, generator: Rng = None) -> StepOutput:
        output = as_step_output(self._task.step(model, batch), training=False)
        if not (isinstance(output.outputs, tuple) and len(output.outputs) == 2):
            raise ConfigError(
                "there are no outputs to score: let forward, or eval_step, return "
                "StepOutput(loss, records, outputs=(outputs, targets))",
                argument="metrics",
            )
        return output

    def new_metrics(self) -> EpochMetrics:
        self._metrics.reset()
        return self._metrics
