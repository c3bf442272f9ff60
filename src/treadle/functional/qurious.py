"""Trainer with the names, arguments and return values of ``qurious.llms.trainer``, which differ from its document.

:class:`treadle.Trainer` follows the document. This class follows the package, for scripts written for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from treadle.engine.best import Mode
from treadle.errors import ConfigError
from treadle.errors.arguments import suggesting
from treadle.exchange.foreign import is_own
from treadle.exchange.loading import take_over
from treadle.functional import trainer as ours
from treadle.functional.callbacks import Callback
from treadle.functional.files import as_columns
from treadle.functional.settings import EVERY_EPOCH, read_settings

_EXTRAS = ("best_epoch", "best_metric_value", "runtime_secs")


class Result(dict[str, list[Any]]):
    """Result of :meth:`Trainer.train`: the epochs of the call, by key.

    The package returned the history at first and a dict around it later: ``result["history"]``,
    ``result["best_epoch"]``, ``result["best_metric_value"]`` and ``result["runtime_secs"]`` work too.

    Args:
        columns: one list per key.
        best_epoch: the best epoch, -1 for none.
        best_metric_value: its value, or None.
        runtime_secs: duration of the call in seconds.

    Example:
        >>> result = Result({"train_loss": [0.5]}, best_epoch=1, best_metric_value=0.5, runtime_secs=2.0)
        >>> result["history"], result["best_epoch"], list(result)
        ({'train_loss': [0.5]}, 1, ['train_loss'])
    """

    def __init__(
        self, columns: dict[str, list[Any]], *, best_epoch: int, best_metric_value: float | None, runtime_secs: float
    ):
        super().__init__(columns)
        self.best_epoch = best_epoch
        self.best_metric_value = best_metric_value
        self.runtime_secs = runtime_secs

    def __missing__(self, key: str) -> Any:
        if key == "history":
            return dict(self)
        if key in _EXTRAS:
            return getattr(self, key)
        raise KeyError(key)


class Trainer(ours.Trainer):
    """Trainer with the argument order, keys and counting of the package.

    A step returns ``train_loss``, an evaluation ``eval_loss``; ``train`` trains ``num_epochs`` more epochs and returns
    only those; files go to ``checkpoint_dir`` of the config's ``paths`` or ``training``, every ``save_interval``
    epochs.

    Args:
        model: as in :class:`treadle.Trainer`.
        loss_fn: ``loss_fn(outputs, targets)``, or None if the model returns its loss.
        optimizer: None takes the result of :meth:`_get_default_optimizer`.
        device: None or ``"auto"`` takes CUDA, then MPS, then the CPU.
        config: config with ``training`` and ``paths``.
        scheduler: as in :class:`treadle.Trainer`.
        run: an object with ``log_metrics(metrics)``, called with the record of each epoch.
        rest: any other argument of :class:`treadle.Trainer`, by name.

    Example:
        >>> trainer = Trainer(nn.Linear(2, 1), nn.MSELoss(), device="cpu")
        >>> batches = [(torch.ones(4, 2), torch.ones(4, 1))]
        >>> len(trainer.train(batches, 2)["train_loss"]), len(trainer.train(batches, 1)["train_loss"]), trainer.epoch
        (2, 1, 3)
    """

    _face: ClassVar[type[ours.Trainer]]
    _first_epoch = 1

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: Optimizer | None = None,
        device: torch.device | str | int | None = None,
        config: Any = None,
        scheduler: Any = None,
        run: Any = None,
        **rest: Any,
    ):
        if run is not None and not callable(getattr(run, "log_metrics", None)):
            raise ConfigError("must have a method log_metrics(metrics)", argument="run", value=run)
        self.model = model
        self.run = run
        if optimizer is None:
            rate = read_settings(config).learning_rate
            optimizer = self._get_default_optimizer(1e-4 if rate is None else rate)
        super().__init__(model, optimizer, loss_fn, config, None if device == "auto" else device, scheduler, **rest)

    def _other_names(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of a checkpoint that the package reads, under its names."""
        parts = {"model_state_dict": "model", "optimizer_state_dict": "optimizer", "step": "global_step"}
        optional = {"scheduler_state_dict": "scheduler", "metric_value": "best_metric"}
        given = {name: key for name, key in optional.items() if tree[key] is not None}
        return {name: tree[key] for name, key in {**parts, **given}.items()}

    def _get_default_optimizer(self, learning_rate: float) -> Optimizer:
        """Return AdamW of all parameters."""
        return torch.optim.AdamW(self.model.parameters(), lr=learning_rate)

    @property
    def epoch(self) -> int:
        """Epochs completed. May be assigned between two calls of :meth:`train`."""
        return self._engine.epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._engine.cursor.restart(epoch=value)

    def train_step(self, batch: Any) -> dict[str, float]:
        """Run one optimizer step.

        Returns:
            ``train_loss``, ``lr``, and ``grad_norm`` if there was a gradient.
        """
        return {_prefixed(name, "train_"): value for name, value in super().train_step(batch).items()}

    def eval_step(self, batch: Any) -> dict[str, float]:
        """Return the ``eval_loss`` of one batch."""
        return {_prefixed(name, "eval_"): value for name, value in super().eval_step(batch).items()}

    def evaluate(self, dataloader: Iterable[Any]) -> dict[str, Any]:
        """Return the weighted means over a loader: ``eval_loss``, then the metrics, and ``epoch``."""
        means = {f"eval_{name}": value for name, value in super().evaluate(dataloader).items()}
        return {**means, "epoch": self.epoch}

    @suggesting
    def train(  # type: ignore[override]  # the package's own order
        self,
        train_dataloader: Iterable[Any],
        num_epochs: int,
        eval_dataloader: Iterable[Any] | None = None,
        best_model_metric: str | None = "eval_loss",
        early_stopping_patience: int | None = None,
        callbacks: Sequence[Callback] | None = None,
        *,
        save_dir: str | Path | None = None,
        save_freq: int | None = EVERY_EPOCH,
        best_mode: Mode | None = None,
        resume_from: str | Path | None = None,
    ) -> Result:
        """Train ``num_epochs`` more epochs; the best epoch and the patience carry over from call to call.

        Args:
            train_dataloader: micro-batches.
            num_epochs: more epochs; with ``resume_from`` the target of the whole run, so that the same call resumes
                after a kill.
            eval_dataloader: loader to evaluate after each epoch.
            best_model_metric: as in :meth:`treadle.Trainer.train`.
            early_stopping_patience: epochs without improvement until training stops.
            callbacks: called as ``callback(trainer, epoch, metrics)``, ``epoch`` counted from 1.
            save_dir: None takes ``checkpoint_dir`` of the config, inside ``run.run_path`` if the run has one.
            save_freq: ``save_interval`` of the config by default.
            best_mode: as in :meth:`treadle.Trainer.train`.
            resume_from: as in :meth:`treadle.Trainer.train`.

        Returns:
            The epochs of this call, by key.
        """
        started, before = time.perf_counter(), len(self._epochs.history)
        if save_dir is None:
            save_dir = self._run_defaults.checkpoint_dir or _paths_of(self.config, self.run)
        target = num_epochs if resume_from is not None else self.epoch + num_epochs
        super().train(
            train_dataloader, target, eval_dataloader, save_dir, save_freq, best_model_metric,
            early_stopping_patience, [*([self._log_record] if self.run is not None else []), *(callbacks or ())],
            best_mode=best_mode, resume_from=resume_from,
        )  # fmt: skip
        records = self._epochs.history[0 if resume_from is not None else before :]
        return Result(
            as_columns(records), best_epoch=self.best_epoch, best_metric_value=self.best_metric,
            runtime_secs=time.perf_counter() - started,
        )  # fmt: skip

    def _log_record(self, trainer: Any, epoch: int, metrics: dict[str, Any]) -> None:
        self._log_metrics(metrics)

    def _log_metrics(self, metrics: dict[str, Any]) -> None:
        """Pass the record of an epoch to ``run``."""
        self.run.log_metrics(metrics)

    def _save_checkpoint(self, path: str | Path, epoch: float | None = None, metric_value: float | None = None) -> None:
        """Write a full checkpoint that the package can read too.

        Args:
            path: the file.
            epoch: epochs completed, as in the package's first versions; later ones have the metric in its place, which
                is a float.
            metric_value: stored as ``best_metric``.
        """
        if isinstance(epoch, float):
            epoch, metric_value = None, epoch
        if epoch is not None and epoch != self.epoch:
            self.epoch = int(epoch)
        super()._save_checkpoint(path, self.epoch, metric_value)

    def load_checkpoint(  # type: ignore[override]  # the package returns the epoch
        self, path: str | Path, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> int:
        """Restore everything from a checkpoint of this library, or what is available from one of the package.

        Returns:
            The epochs completed.

        Raises:
            CheckpointError: the file is missing, damaged, or belongs to another model.
        """
        where = self._folder.find(path)
        if not where.exists() or is_own(tree := torch.load(where, map_location="cpu", weights_only=True)):
            return int(super().load_checkpoint(path, load_optimizer, load_scheduler)["epoch"])
        found = take_over(self.model, where, optimizer=self.optimizer if load_optimizer else None)
        left = found.not_taken
        if load_scheduler and self.scheduler is not None and "scheduler_state_dict" in tree:
            self.scheduler.load_state_dict(tree["scheduler_state_dict"])
            left = [reason for reason in left if not reason.startswith("scheduler_state_dict:")]
        if left:
            self._engine.logger.warning("%s: not taken over: %s", where, "; ".join(left))
        self._engine.progress.load_state_dict({}, step=found.step or 0, device=self.device)
        self.epoch = int(found.epoch or 0)
        return self.epoch


def _prefixed(name: str, prefix: str) -> str:
    return f"{prefix}{name}" if name == "loss" else name


def _paths_of(config: Any, run: Any) -> Path | None:
    """Return ``config.paths.checkpoint_dir``, of a mapping or an object, inside the run's folder if any; or None."""
    part = config.get("paths") if isinstance(config, dict) else getattr(config, "paths", None)
    found = part.get("checkpoint_dir") if isinstance(part, dict) else getattr(part, "checkpoint_dir", None)
    return Path(getattr(run, "run_path", None) or "", found) if isinstance(found, (str, Path)) else None


Trainer._face = Trainer
