"""Trainer: takes ready-made parts, trains by epochs, manages a checkpoint folder, returns a history."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from treadle.capture.compile import Compile
from treadle.checkpoint.store import load_checkpoint
from treadle.device import to_device
from treadle.engine.best import Mode
from treadle.engine.hook import BaseHook
from treadle.engine.metrics import EpochMetrics
from treadle.engine.names import replaces, takes
from treadle.engine.run_log import run_log_shown
from treadle.engine.settings import Capture
from treadle.errors.arguments import suggesting
from treadle.faces.build import EngineArguments, build_engine, place
from treadle.faces.epoch_face import EpochFace
from treadle.faces.folder import loss_name
from treadle.faces.loaders import EvalLoaders, check_batches
from treadle.faces.parallel import ParallelConfig
from treadle.functional.batches import split_batch
from treadle.functional.callbacks import Callback, Callbacks
from treadle.functional.checks import check_call, log_early_stopping, warn_of_callbacks, warn_of_idle_files
from treadle.functional.construction import (
    check_loss_fn,
    in_argument_order,
    optimizer_for,
    scheduler_for,
    set_length,
    warn_of_idle_interval,
)
from treadle.functional.driver import FaceEpochs
from treadle.functional.files import HistoryFile, as_columns, in_order, log_epoch
from treadle.functional.folder import NumberedFolder
from treadle.functional.losses import explain_loss_error, loss_weight, missing_loss, model_loss
from treadle.functional.metric_rule import eval_losses, known_keys, rule_for
from treadle.functional.own_hooks import own_hooks
from treadle.functional.own_step import OwnStepEngine, engine_class, numbers_of
from treadle.functional.replaced import warn_of_replaced
from treadle.functional.settings import EVERY_EPOCH, read_run_defaults, read_settings
from treadle.functional.task import EvalTask, OverriddenEvalTask, TrainerTask
from treadle.functional.unused_settings import read_unused_settings
from treadle.hooks.trackers import TrackerChoice
from treadle.optim.precision import in_full_precision

_log = logging.getLogger("treadle.functional")


class Trainer(EpochFace):
    """Trainer of a model with an optimizer and a loss function; the loop is documented in ``treadle.hooks.base``.

    Args:
        model: any module; moved to the device in place.
        optimizer: optimizer of its parameters; None builds AdamW with the config's learning rate (default 1e-4) and
            weight decay (default 0.01).
        loss_fn: ``loss_fn(outputs, targets)``; None if the model returns its loss.
        config: None, a mapping or an object with a ``training`` part, see :class:`TrainingSettings`; not changed.
        device: None takes CUDA, then MPS, then the CPU.
        scheduler: stepped per epoch, or per applied step with ``training.scheduler_step_per_batch``. The setting
            ``lr_scheduler="cosine"`` builds one by name, with ``warmup_steps`` or ``warmup_ratio``.
        hooks: further hooks.
        trackers: experiment trackers, such as ``["tensorboard", "wandb"]``; see :func:`treadle.with_trackers`.
        settings: any of :class:`TrainingSettings` by name, such as ``max_grad_norm=1.0``; they override ``config``.
        progress: False keeps a run silent unless you configured a logging handler, like ``TREADLE_PROGRESS=0``.
        eval_seed: seeds the RNG of every evaluation.
        metrics: names such as ``["accuracy", "f1"]``, functions ``fn(outputs, targets)`` of the whole set, torchmetrics
            objects, or a dict of these by name; reported as ``eval_<name>``.
        parallel: ``"ddp"``, ``"fsdp"`` or a ParallelConfig replicates or shards the model over the ranks started by
            torchrun.
        capture: whether the step is replayed as one CUDA graph; ``"auto"`` warns if it cannot be, True raises.
        compile: True compiles the model in place, ``"blocks"`` each of its repeated blocks; see ``compile_model``.

    Raises:
        ConfigError: a setting is unknown or outside its range, or a device is not available.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = Trainer(model, optimizer, nn.MSELoss(), device="cpu")
        >>> history = trainer.train([(torch.ones(4, 2), torch.ones(4, 1))] * 3, num_epochs=2)
        >>> history["epoch"], trainer.step
        ([1, 2], 6)
    """

    _face: ClassVar[type[Trainer]]  # the library's class whose methods a subclass overrides
    _first_epoch: ClassVar[int] = 0  # number of the first epoch for callbacks
    _epochs: FaceEpochs
    _folder: NumberedFolder

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        loss_fn: Callable[..., Any] | None = None,
        config: Any = None,
        device: torch.device | str | int | None = None,
        scheduler: LRScheduler | ReduceLROnPlateau | None = None,
        *,
        hooks: Sequence[BaseHook] = (),
        trackers: str | Sequence[TrackerChoice] = (),
        eval_seed: int = 0,
        metrics: Any = None,
        parallel: ParallelConfig | str | None = None,
        capture: Capture = False,
        compile: Compile = False,
        progress: bool = True,
        **settings: Any,
    ):
        optimizer, loss_fn = in_argument_order(optimizer, loss_fn)
        self.config = config
        self.settings = read_settings(config, settings)
        self._run_defaults, self._unused_settings = read_run_defaults(config), read_unused_settings(config)
        self.model, self.optimizer, self.device = place(
            model, partial(optimizer_for, optimizer=optimizer, settings=self.settings), device=device,
            scheduler=scheduler, compile=compile, parallel=parallel,
            gradient_checkpointing=self.settings.gradient_checkpointing,
        )  # fmt: skip
        self.loss_fn = loss_fn.to(self.device) if isinstance(loss_fn, nn.Module) else loss_fn
        self.scheduler = scheduler_for(self.optimizer, scheduler, self.settings)
        warn_of_idle_interval(scheduler, self.settings)
        check_loss_fn(loss_fn, own_loss=self._overrides("_compute_loss"))
        self._warned_of_length = False
        self._counts_on_host = not (self._overrides("_prepare_batch") or self._overrides("_loss_weight"))
        own_eval = OverriddenEvalTask if self._overrides("eval_step") else EvalTask
        self._eval_task = own_eval(self, EpochMetrics(metrics, self.device, loss_fn=loss_fn))
        self._history_file = HistoryFile(lambda: self._epochs.history)
        task = TrainerTask(self)
        arguments: EngineArguments = {
            "scheduler": self.scheduler, "device": device, "eval_seed": eval_seed, "capture": capture,
            "config": {**self.settings.described(), "loss": loss_name(self.loss_fn)},
            **self.settings.engine_arguments(),
        }  # fmt: skip
        self._engine = build_engine(
            "functional", self.model, self.optimizer, task, arguments, hooks=hooks, trackers=trackers,
            own_hooks=own_hooks(self.settings, self._history_file, lambda: self._folder.save_and_log()),
            progress=progress, log_every=self.settings.log_interval, make=engine_class(self, task),
        )  # fmt: skip
        self._folder = NumberedFolder(
            self._engine, self._save_checkpoint, self._history_file,
            retention=self.settings.retention(), best_epochs=self._best_epochs, other_names=self._other_names,
        )  # fmt: skip
        self._epochs = FaceEpochs(
            self._engine, self._eval_task, evaluate=lambda: self.evaluate if self._is_own("evaluate") else None
        )
        warn_of_replaced(self._replaces, self.settings)

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(self._face, method)

    def _is_own(self, method: str) -> bool:
        """Return whether a method is the user's: of a subclass, or set on this instance."""
        return method in vars(self) or self._overrides(method)

    def _replaces(self, method: str) -> bool:
        """Return whether a user's method does not call the one that it overrides."""
        return method in vars(self) or replaces(type(self), self._face, method)

    # -- results so far -------------------------------------------------------------------------------------

    @property
    def history(self) -> dict[str, list[Any]]:
        """One list per key, as long as the epochs completed."""
        return as_columns(self._epochs.history)

    @property
    def best_metric(self) -> float | None:
        """Best value of the metric; None before the first improvement."""
        known = self._epochs.selection
        return None if known is None or known["best_epoch"] is None else known["best"]

    @property
    def best_epoch(self) -> int:
        """1-based epoch of the best value; -1 before the first improvement."""
        known = self._epochs.selection
        return -1 if known is None or known["best_epoch"] is None else known["best_epoch"]

    @property
    def should_stop(self) -> bool:
        """Flag to set in a callback or hook to end training cleanly after this epoch; it is not saved."""
        return self._engine.should_stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self._engine.should_stop = stop

    # -- to override ----------------------------------------------------------------------------------------------

    def _prepare_batch(self, batch: Any) -> tuple[Any, Any]:
        """Return ``(inputs, targets)`` on the device in new containers, without changing the batch."""
        inputs, targets = split_batch(batch)
        if isinstance(batch, (list, tuple)) and batch[0] is inputs and len(batch) > 2 and not self._warned_of_length:
            self._warned_of_length = True
            _log.warning(
                "a batch has %d items: the first is the input, the second the target, the others are ignored; "
                "override _prepare_batch to use them",
                len(batch),
            )
        return to_device(inputs, self.device), to_device(targets, self.device)

    def _forward_pass(self, inputs: Any) -> Any:
        """Return ``model(**inputs)`` for a mapping, else ``model(inputs)``."""
        return self.model(**inputs) if isinstance(inputs, Mapping) else self.model(inputs)

    def _compute_loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the model's own loss if it has one, else ``loss_fn(outputs, targets)`` in float32."""
        own = model_loss(outputs)
        if own is not None:
            return own.float()
        if self.loss_fn is None or targets is None:
            raise missing_loss(self.loss_fn, outputs)
        try:
            loss: Tensor = in_full_precision(self.loss_fn, outputs, targets, self.device)
        except Exception as error:
            explain_loss_error(error, self.loss_fn, outputs, targets)
            raise
        return loss

    def _loss_weight(self, inputs: Any, outputs: Any, targets: Any) -> float | Tensor:
        """Return the number of elements the loss averages over; see :func:`treadle.functional.losses.loss_weight`."""
        return loss_weight(self.model, self.loss_fn, inputs=inputs, outputs=outputs, targets=targets)

    # -- training -------------------------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> dict[str, float]:
        """Run one optimizer step on one micro-batch, with hooks, and return its results.

        An override may extend ``super().train_step(batch)``, or replace the step: then it runs forward, backward and
        the optimizer itself and returns a dict with ``loss``, as explained in a warning when the trainer is created.

        Returns:
            ``loss`` (NaN if the batch has weight 0), ``lr``, and ``grad_norm`` before clipping if there was a gradient.

        Raises:
            NonFiniteError: the gradient is not finite.
        """
        engine = self._engine
        if isinstance(engine, OwnStepEngine) and engine.inner_step(batch):
            return numbers_of(engine.step_info)
        self._epochs.train_step(batch)
        return numbers_of(engine.step_info)

    def train_epoch(
        self, train_dataloader: Iterable[Any], eval_dataloader: Iterable[Any] | None = None, epoch: int = 0
    ) -> dict[str, Any]:
        """Train one more epoch, evaluate, and step a per-epoch scheduler.

        When called directly, it selects no best epoch and writes no files. A subclass may override it to wrap
        ``super().train_epoch(...)`` and to add numbers to its result; ``train`` then calls it, and hooks see each epoch
        as a separate run. An override that does not call it replaces the loop: it gets the loader, the evaluation
        loader and the epoch, and returns a dict with ``train_loss``.

        Args:
            train_dataloader: micro-batches.
            eval_dataloader: micro-batches to evaluate, or None.
            epoch: epoch number, for the log only.

        Returns:
            ``train_loss``, ``lr``, then ``eval_…``.
        """
        record = in_order(self._epochs.one_epoch(train_dataloader, eval_dataloader))
        record.pop("epoch", None)
        log_epoch(epoch, record)
        return record

    @suggesting
    def train(
        self,
        train_dataloader: Iterable[Any],
        num_epochs: int,
        eval_dataloader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
        save_dir: str | Path | None = None,
        save_freq: int | None = EVERY_EPOCH,
        best_model_metric: str | None = "eval_loss",
        early_stopping_patience: int | None = None,
        callbacks: Sequence[Callback] | None = None,
        *,
        best_mode: Mode | None = None,
        resume_from: str | Path | None = None,
    ) -> dict[str, list[Any]]:
        """Train until ``num_epochs`` epochs are completed or early stopping ends the run.

        Args:
            train_dataloader: micro-batches; re-iterated for each epoch.
            num_epochs: absolute target; a finished run returns its history immediately.
            eval_dataloader: loader to evaluate after each epoch, or a dict of loaders, reported as ``eval_<name>_loss``
                and so on; a metric without a loader's name then refers to the first.
            save_dir: folder of ``checkpoint_epoch_{n}.pt``, ``best_model.pt``, ``history.json``, and ``pretrained``
                with the best weights of a model with ``save_pretrained``; None takes the config's ``checkpoint_dir``.
            save_freq: epochs between numbered checkpoints, else the config's ``save_interval``; None or 0 writes none.
                The final state of the call is always written: under the number of its epoch, or as ``last.pt``.
            best_model_metric: a key of the epoch's record, with or without ``eval_``, for selecting the best epoch,
                early stopping, and a plateau scheduler. Without ``eval_dataloader``, ``"eval_loss"`` refers to the
                training loss. None selects nothing.
            early_stopping_patience: epochs without improvement until training stops.
            callbacks: called as ``callback(trainer, epoch, metrics)`` after each epoch, ``epoch`` counted from 0.
            best_mode: ``"min"``, ``"max"``, or None for the direction implied by the metric's name.
            resume_from: None, ``"auto"`` (the furthest intact checkpoint in ``save_dir`` or a loading hook's folder),
                or a path, also in ``save_dir``.

        Returns:
            The history: lists by key, one entry per completed epoch.

        Raises:
            ConfigError: an argument is outside its range, or the metric is not in the record.
            CheckpointError: another process trains in ``save_dir``, or no checkpoint is intact.
        """
        check_call(
            self, num_epochs, save_freq, callbacks=callbacks, loaders=(train_dataloader, eval_dataloader),
            paths={"save_dir": save_dir, "resume_from": resume_from},
        )  # fmt: skip
        make_rule = rule_for(
            best_model_metric, best_mode, patience=early_stopping_patience, min_delta=self.settings.min_delta,
            loaders=eval_dataloader, known=self._known_keys(eval_dataloader),
        )  # fmt: skip
        set_length(self.scheduler, train_dataloader, num_epochs, settings=self.settings)
        self._use_folder(save_dir, save_freq, best_model_metric)
        saving = self._epochs.saving_if_evaluation_fails(self._folder.save_after_failed_evaluation)
        with run_log_shown(self._engine), self._folder.training(), saving:
            self._carry_callbacks(callbacks, self._known_keys(eval_dataloader))
            self._folder.resume(resume_from)
            self._epochs.select_by(make_rule)
            log_early_stopping(self._epochs)
            self._epochs_to(num_epochs, train_dataloader, eval_dataloader, callbacks or ())()
        return self.history

    def _carry_callbacks(self, callbacks: Sequence[Callback] | None, known: Sequence[str] | None) -> None:
        """Save the state of callbacks in checkpoints, and warn about names that they use in vain."""
        self._engine.prepare()
        self._engine.state.objects.add("callbacks", list(callbacks or ()))
        warn_of_callbacks(self, callbacks, known)

    def _use_folder(self, save_dir: str | Path | None, save_freq: int | None, metric: str | None) -> None:
        """Set the folder of a call of ``train``, and warn about settings of files that are not written."""
        folder, every = self._run_defaults.files(save_dir, save_freq)
        warn_of_idle_files(self.settings, folder, save_freq=save_freq, metric=metric)
        self._folder.use(folder, every)

    def _known_keys(self, loaders: EvalLoaders | None) -> list[str] | None:
        has_metrics = bool(self._eval_task.metrics)
        return known_keys(self._is_own, losses=eval_losses(loaders), has_metrics=has_metrics)

    def _epochs_to(
        self,
        num_epochs: int,
        train_loader: Iterable[Any],
        eval_loader: Iterable[Any] | None,
        callbacks: Sequence[Callback],
    ) -> Callable[[], Any]:
        """Return the function that trains, so that it adds no frame between the caller and the model."""
        own = Callbacks(self, self._engine, self._folder, callbacks=callbacks, first_epoch=self._first_epoch)
        if self._folder.callbacks_interrupted and own.call_again(train_loader):
            return lambda: None
        after_epoch = partial(self._end_epoch, own)
        if self._is_own("train_epoch"):
            users = self.train_epoch

            def train_epoch(batches: Iterable[Any], epoch: int) -> Any:
                return users(batches, eval_loader, epoch) if takes(users, 3) else users(batches, eval_loader)

            if self._replaces("train_epoch"):
                loaders = train_loader, eval_loader
                return partial(self._epochs.fit_replaced, train_epoch, loaders, num_epochs, after_epoch)
            return partial(self._epochs.fit_wrapped, train_epoch, train_loader, num_epochs, after_epoch)
        return partial(self._epochs.fit, train_loader, eval_loader, num_epochs, after_epoch=after_epoch)

    def _best_epochs(self, has_file: Callable[[int], bool]) -> list[int]:
        """Return the ``save_top_k`` best epochs with a numbered checkpoint, best first."""
        rule, count = self._epochs.best, self.settings.save_top_k
        if rule is None or count is None:
            return []
        return rule.ranked(record for record in self._epochs.history if has_file(record["epoch"]))[:count]

    def _end_epoch(self, callbacks: Callbacks, record: dict[str, Any]) -> None:
        improved = None if self._epochs.best is None else self._epochs.improved
        self._folder.write_epoch(
            improved=improved, best=self.best_metric, scored_weights=self._epochs.scored_weights,
            callbacks=bool(callbacks),
        )  # fmt: skip
        if not self._is_own("train_epoch") or self._replaces("train_epoch"):  # else train_epoch logs the line itself
            log_epoch(self.epoch - 1, record)
        if callbacks:
            callbacks.call(record)

    # -- evaluation -----------------------------------------------------------------------------------------------

    def eval_step(self, batch: Any) -> dict[str, float]:
        """Return the ``loss`` of one batch in eval mode, without gradients; NaN if its weight is 0."""
        return {"loss": self._epochs.loss_of(batch)}

    def evaluate(self, dataloader: Iterable[Any]) -> dict[str, Any]:
        """Return the weighted means over a loader, using averaged weights if there are any.

        Returns:
            ``loss``, then the metrics; unprefixed.

        Raises:
            ConfigError: the loader is empty.
        """
        check_batches(dataloader, "dataloader")
        return self._epochs.measure(dataloader)

    def predict(self, dataloader: Iterable[Any]) -> Any:
        """Return the model's outputs over a loader in eval mode, using averaged weights if there are any.

        Args:
            dataloader: batches as for training; targets in them are not used.

        Returns:
            The outputs of all batches concatenated along dimension 0 on the CPU: a tensor (N, ...), or tuples and dicts
            of tensors, as returned by the model. Other values are dropped; 0-d tensors are stacked, one per batch.

        Raises:
            ConfigError: the loader is empty, or the batches' outputs differ in more than dimension 0.
        """
        check_batches(dataloader, "dataloader")
        return self._epochs.predict(dataloader, lambda batch: self._forward_pass(self._prepare_batch(batch)[0]))

    # -- files ----------------------------------------------------------------------------------------------------

    def load_checkpoint(
        self, path: str | Path, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> dict[str, Any]:
        """Restore everything from a checkpoint, in place.

        Args:
            path: path of the file; if there is no such file, relative to the last ``save_dir``.
            load_optimizer: False leaves the optimizer unchanged.
            load_scheduler: False leaves the scheduler unchanged.

        Returns:
            The checkpoint's data.

        Raises:
            CheckpointError: the file is missing, damaged, or belongs to another model.
        """
        tree = load_checkpoint(path := self._folder.find(path))
        left_out = {key for key, load in (("optimizer", load_optimizer), ("scheduler", load_scheduler)) if not load}
        self._folder.restore({key: None if key in left_out else value for key, value in tree.items()}, path)
        return tree

    def _other_names(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return parts of a checkpoint that are stored under further names too."""
        return {}

    def _save_checkpoint(self, path: str | Path, epoch: int, metric_value: float | None = None) -> None:
        """Write one full checkpoint; every file of ``train`` goes through here, on every rank.

        Args:
            path: the file.
            epoch: epochs completed; the count in the state is saved.
            metric_value: stored as ``best_metric``; None stores the best value so far.
        """
        if epoch != self.epoch:
            _log.warning(
                "_save_checkpoint(epoch=%d): the state is that of epoch %d and is saved as such", epoch, self.epoch
            )
        self._folder.write(Path(path), metric_value)


Trainer._face = Trainer
