"""Graph trainer: epoch-based training of graph models, with best and last checkpoints and a history."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle.capture.compile import Compile
from treadle.checkpoint.buffers import LiveTensors
from treadle.checkpoint.comparison import same
from treadle.checkpoint.ranks import on_rank_0
from treadle.checkpoint.schema import to_plain
from treadle.checkpoint.store import copy_checkpoint, load_checkpoint, save_checkpoint
from treadle.distributed import unwrap
from treadle.engine.hook import BaseHook
from treadle.engine.limits import Limits
from treadle.engine.movable_state import movable_state
from treadle.engine.run_log import run_log_shown
from treadle.engine.settings import Capture
from treadle.errors.arguments import checked, suggesting
from treadle.faces.build import EngineArguments, build_engine, place
from treadle.faces.epoch_face import EpochFace
from treadle.faces.folder import CheckpointFolder, loss_name, write_best_and_last
from treadle.faces.loaders import EvalLoaders, check_eval_loaders, check_loader
from treadle.faces.parallel import ParallelConfig
from treadle.graphs.checks import (
    best_rule,
    check_epochs,
    check_log_every,
    loss_and_metrics,
    on_device,
    precision_named,
)
from treadle.graphs.epoch_records import (
    GraphEpochs,
    GraphHistoryFile,
    LogHook,
    LogHooks,
    as_history,
    described,
    train_part,
    val_part,
)
from treadle.graphs.masks import MaskName, check_mask_name
from treadle.graphs.padding import Padding, PaddingHook, PadTo
from treadle.graphs.task import EpochMetrics, GraphTask, LossFn, raw_outputs
from treadle.graphs.train_outputs import TrainOutputsHook
from treadle.hooks.trackers import TrackerChoice

_log = logging.getLogger("treadle.graphs")
_epoch_log = logging.getLogger("treadle.graphs.epochs")  # separate, for callers that display epochs differently


class GraphTrainer(EpochFace):
    """Trainer of models on batches of graphs; see ``treadle.hooks.base`` for the loop.

    Args:
        model: called with each batch; moved to the device in place.
        optimizer: optimizer of its parameters.
        scheduler: advanced at each ``scheduler_interval``.
        loss_fn: a loss from `get_loss_fn`, or any function (prediction, target) -> mean; None: the task's default.
        metrics: an object with ``reset``, ``update`` and ``compute``; None: the task's defaults.
        device: None selects CUDA, then MPS, then the CPU.
        task_type: ``"regression"``, ``"classification"``, ``"multilabel"`` or ``"edge_prediction"``.
        num_classes: number of model outputs. None: any; for classification ``model.num_classes`` if defined, else 2.
        grad_clip: maximum gradient norm; None or 0 disables clipping.
        mixed_precision: False, True (bf16), ``"bf16"`` or ``"fp16"``.
        log_every: steps between reports; None or 0 disables them.
        checkpoint_dir: folder for ``last.pt``, ``best.pt`` and ``history.json``; None writes nothing.
        experiment_name: name of the run in log lines and checkpoints.
        accumulation_steps: micro-batches per optimizer step.
        scheduler_interval: ``"epoch"`` or ``"step"`` (applied steps).
        max_non_finite_grad_retries: retries with fresh micro-batches before NonFiniteError; None: no retries.
        hooks: additional hooks.
        trackers: experiment trackers, such as ``["tensorboard", "wandb"]``; see :func:`treadle.with_trackers`.
        progress: False shows no progress unless you configure a log handler, like ``TREADLE_PROGRESS=0``.
        limits: limits of time and batches, and short trials: a :class:`treadle.Limits` or a mapping of its fields.
        eval_seed: seed of the random numbers of every evaluation.
        parallel: ``"ddp"``, ``"fsdp"`` or a ParallelConfig distributes the model over the ranks started by torchrun.
        capture: whether to replay the step as one CUDA graph; ``"auto"`` warns if that is impossible, True raises.
        pad_to: number of buckets to choose from the training data, or the buckets themselves; each training batch is
            padded to the smallest that holds it. None: no padding.
        compile: True compiles the model in place, ``"blocks"`` each of its repeated blocks; see
            ``treadle.compile_model``.

    Attributes:
        config: plain values stored in every checkpoint; more may be added before training.

    Raises:
        ConfigError: a value is unknown or out of range, the loss and the metrics disagree on whether predictions are
            logits, or a device is not available.

    Example:
        >>> from types import SimpleNamespace
        >>> from treadle.graphs import get_model, get_optimizer
        >>> path = torch.tensor([[0, 1], [1, 0]])
        >>> graph = SimpleNamespace(x=torch.tensor([0, 1]), edge_index=path, y=torch.ones(1, 1), num_graphs=1)
        >>> model = get_model(num_features=2, hidden_dim=8, num_layers=1, num_heads=2)
        >>> trainer = GraphTrainer(model, get_optimizer(model), device="cpu")
        >>> history = trainer.fit([graph] * 3, [graph], epochs=2)
        >>> [record["epoch"] for record in history["train"]], list(history["val"][0])
        ([1, 2], ['epoch', 'loss', 'mse', 'mae', 'rmse'])
    """

    config: dict[str, Any]

    _epochs: GraphEpochs
    _folder: BestAndLast

    @checked
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        loss_fn: LossFn | None = None,
        metrics: EpochMetrics | None = None,
        device: torch.device | str | int | None = None,
        task_type: str = "regression",
        num_classes: int | None = None,
        grad_clip: float | None = None,
        mixed_precision: bool | str | None = False,
        log_every: int | None = 50,
        checkpoint_dir: str | Path | None = None,
        *,
        experiment_name: str = "experiment",
        accumulation_steps: int = 1,
        scheduler_interval: Literal["step", "epoch"] = "epoch",
        max_non_finite_grad_retries: int | None = None,
        hooks: Sequence[BaseHook] = (),
        trackers: str | Sequence[TrackerChoice] = (),
        eval_seed: int = 0,
        parallel: ParallelConfig | str | None = None,
        capture: Capture = False,
        pad_to: PadTo = None,
        compile: Compile = False,
        progress: bool = True,
        limits: Limits | Mapping[str, Any] | None = None,
    ):
        self.model, self.optimizer, self.device = place(
            model, optimizer, device=device, scheduler=scheduler, compile=compile, parallel=parallel
        )
        check_log_every(log_every)
        self.scheduler = scheduler
        self.task_type, self.experiment_name = task_type, experiment_name
        self.num_classes, self.loss_fn, self.metrics = loss_and_metrics(
            self.model, task_type, num_classes, on_device(loss_fn, self.device), on_device(metrics, self.device)
        )
        padding = Padding(pad_to, level=getattr(unwrap(model), "level", None), loss_fn=self.loss_fn)
        task = GraphTask(self.device, task_type, loss_fn=self.loss_fn, metrics=self.metrics, padding=padding)
        self._outputs, self._log_hooks = TrainOutputsHook(task, self.metrics), LogHooks(log_every)
        self._padding_hook = PaddingHook(padding)
        self.config = {
            "experiment_name": experiment_name, "task_type": task_type, "num_classes": self.num_classes,
            "loss": loss_name(self.loss_fn), "grad_clip": grad_clip, "mixed_precision": mixed_precision,
            "accumulation_steps": accumulation_steps, "scheduler_interval": scheduler_interval, "eval_seed": eval_seed,
        }  # fmt: skip
        arguments: EngineArguments = {
            "scheduler": scheduler, "scheduler_interval": scheduler_interval, "device": device, "capture": capture,
            "precision": precision_named(mixed_precision), "grad_clip": grad_clip, "eval_seed": eval_seed,
            "accumulation_steps": accumulation_steps, "max_non_finite_grad_retries": max_non_finite_grad_retries,
            "config": self.config, "limits": limits,
        }  # fmt: skip
        self._engine = build_engine(
            "graphs", self.model, optimizer, task, arguments, own_hooks=self._own_hooks(checkpoint_dir), hooks=hooks,
            trackers=trackers, progress=progress, log_every=log_every,
        )  # fmt: skip
        self._epochs = GraphEpochs(self._engine, task, self._outputs)
        self._folder = BestAndLast(self._engine, "checkpoint_dir")
        self._folder.use(checkpoint_dir)

    def _own_hooks(self, checkpoint_dir: str | Path | None) -> list[BaseHook]:
        own: list[BaseHook] = [self._outputs, self._padding_hook, self._log_hooks]
        if checkpoint_dir is not None:
            own.append(GraphHistoryFile(Path(checkpoint_dir) / "history.json", lambda: self._epochs.history))
        return own

    # -- what happened so far -------------------------------------------------------------------------------------

    @property
    def history(self) -> dict[str, list[dict[str, Any]]]:
        """``{"train": [...], "val": [...]}``, one record per epoch."""
        return as_history(self._epochs.history)

    @property
    def current_epoch(self) -> int:
        """Completed epochs; alias of ``epoch``."""
        return self.epoch

    @property
    def best_metric(self) -> float | None:
        """Best value so far; None before the first improvement."""
        known = self._epochs.selection
        return None if known is None or known["best_epoch"] is None else known["best"]

    @property
    def best_epoch(self) -> int | None:
        """1-based epoch of the best value; None before the first improvement."""
        known = self._epochs.selection
        return None if known is None else known["best_epoch"]

    @property
    def checkpoint_dir(self) -> Path | None:
        """Checkpoint folder, or None."""
        return self._folder.path

    # -- training -------------------------------------------------------------------------------------------------

    @suggesting
    def fit(
        self,
        train_loader: Iterable[Any],
        val_loader: EvalLoaders | None = None,
        epochs: int = 100,
        metric_for_best: str = "loss",
        minimize_metric: bool | None = None,
        early_stopping: int | None = None,
        *,
        min_delta: float = 0.0,
        resume_from: str | Path | None = None,
    ) -> dict[str, list[dict[str, Any]]]:
        """Train until ``epochs`` epochs are complete or early stopping ends the run.

        Args:
            train_loader: batches; re-iterated for each epoch.
            val_loader: batches to evaluate after each epoch, or None; a dict is evaluated loader by loader, as
                ``<name>_loss`` and so on in the validation record.
            epochs: absolute target; a run that has reached it returns its history immediately.
            metric_for_best: a key of the validation record, or without ``val_loader`` of the training record. It
                selects ``best.pt`` and controls early stopping and plateau schedulers. With several loaders
                ``"far_mae"`` is that of the loader ``far``, and ``"mae"`` that of the first.
            minimize_metric: direction of the metric; None infers it from the name.
            early_stopping: epochs without improvement before training stops; None disables early stopping.
            min_delta: minimum change that counts as an improvement.
            resume_from: None, ``"auto"`` (the furthest intact checkpoint in ``checkpoint_dir`` and the folders of hooks
                that load the latest), or a path, which may be relative to ``checkpoint_dir``.

        Returns:
            ``{"train": [...], "val": [...]}``. A training record has ``epoch`` (1-based), ``loss``, the metrics of the
            outputs in training mode, ``lr`` and ``time`` (seconds); a validation record ``epoch``, ``loss``, metrics.

        Raises:
            ConfigError: an argument is out of range, or the metric is not in the record.
            CheckpointError: another process is training in ``checkpoint_dir``, or no checkpoint is intact.
        """
        check_epochs(epochs)
        check_loader(train_loader, "train_loader")
        check_eval_loaders(val_loader, "val_loader")
        make_rule = best_rule(
            metric_for_best, minimize_metric, early_stopping, min_delta,
            loaders=val_loader, metrics=self.metrics,
        )  # fmt: skip
        with run_log_shown(self._engine), self._folder.training():
            self._engine.prepare()
            self._engine.state.objects.add("log_hooks", self._log_hooks.hooks)
            self._folder.resume(resume_from)
            self._epochs.select_by(make_rule)
            self._epochs.fit(train_loader, val_loader, epochs, after_epoch=self._end_epoch)
        return self.history

    def _end_epoch(self, record: Mapping[str, Any]) -> None:
        if self._folder.path is not None:
            self._folder.write_epoch(improved=self._epochs.improved)
        before = movable_state(self._engine) if self._log_hooks.hooks else None
        train, val = train_part(record), val_part(record)
        _epoch_log.info("%s: epoch %d", self.experiment_name, self.epoch)
        for prefix, part in (("train", train), ("val", val)):
            if part:
                _epoch_log.info("  %-5s %s", prefix, described(part))
                self._log_hooks.tell(part, self.global_step, prefix)
        changed = before is not None and not same(before, movable_state(self._engine))
        if changed and self._folder.path is not None:  # the state of functions is in the file, too
            self._folder.write_epoch(improved=self._epochs.improved)

    def train_epoch(self, train_loader: Iterable[Any]) -> dict[str, Any]:
        """Train one epoch without evaluating, selecting or writing anything.

        Returns:
            ``loss``, the metrics of the outputs in training mode, ``lr`` and ``time`` (seconds).
        """
        return self._epochs.train_epoch(train_loader)

    def eval_epoch(self, val_loader: Iterable[Any], *, mask: MaskName = "val_mask") -> dict[str, Any]:
        """Return ``loss`` and the metrics over a loader, with averaged weights if there are any.

        Args:
            val_loader: batches.
            mask: for batches with ``train_mask``, ``val_mask`` and ``test_mask``, the one whose rows count. `fit`
                trains on the rows of the first and validates on those of the second.

        Raises:
            ConfigError: the loader is empty, or its batches have masks but not this one.
        """
        check_mask_name(mask)
        return self._epochs.evaluate(val_loader, mask=mask)

    def test(self, loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Any]:
        """Return ``loss`` and the metrics over a whole loader; for batches with masks, over the rows of ``test_mask``.

        Raises:
            ConfigError: a loader is empty, or its batches have masks but not this one.
        """
        with self._engine.evaluations_limited_to(None):
            return self._epochs.evaluate_each(loader, mask="test_mask")

    def predict(self, loader: Iterable[Any]) -> Any:
        """Return the model's raw outputs (logits) for a loader, in eval mode, in the loader's order.

        Returns:
            The outputs of all batches concatenated along dimension 0: float32 tensors (N, ...) on the CPU, nested as
            the model returns them. Padding is removed.

        Raises:
            ConfigError: the loader is empty, or the batches' outputs differ in more than dimension 0.
        """
        return self._epochs.predict(loader, partial(raw_outputs, self.model, self.device))

    def add_log_hook(self, hook: LogHook) -> None:
        """Add a function ``hook(metrics, step, prefix)``; ``step`` is always :attr:`global_step`.

        ``prefix`` is ``"step"`` every ``log_every`` steps, with the means since the last call, and ``"train"``, then
        ``"val"``, at the end of every epoch. In distributed runs rank 0 calls it. Its exceptions propagate out of
        `fit`.
        """
        self._log_hooks.hooks.append(hook)

    # -- files ----------------------------------------------------------------------------------------------------

    def save_checkpoint(self, filename: str | Path, metrics: Mapping[str, Any] | None = None) -> Path:
        """Write everything needed to resume the run exactly; a collective call.

        Args:
            filename: relative to ``checkpoint_dir``.
            metrics: stored under ``metrics``; None stores those of the last evaluation.

        Returns:
            The file.
        """
        path = Path(filename) if self._folder.path is None else self._folder.path / filename
        self._folder.before_write()
        tree = self._engine.state_dict()
        if metrics is not None:
            tree["metrics"] = to_plain(dict(metrics), "metrics")
        return on_rank_0(lambda: save_checkpoint(tree, path))

    def load_checkpoint(self, path: str | Path, load_optimizer: bool = True) -> dict[str, Any]:
        """Restore a checkpoint in place.

        Args:
            path: used as given; if there is no such file, looked up in ``checkpoint_dir``.
            load_optimizer: False loads only the weights; scheduler, scaler and counters also start fresh.

        Returns:
            The metrics stored in it.

        Raises:
            CheckpointError: the file is missing, damaged, or of a different model.
        """
        path = self._folder.find(path)
        tree = load_checkpoint(path)
        kept = ("format", "model", "base", "ema")
        self._folder.restore({key: value for key, value in tree.items() if load_optimizer or key in kept}, path)
        return dict(tree.get("metrics") or {})


class BestAndLast(CheckpointFolder):
    """Folder of ``best.pt`` and ``last.pt``."""

    loss_settings = ("task_type", "num_classes", "loss")

    def candidates(self, folder: Path) -> Iterable[Path]:
        """Return both, even if they are not finite."""
        names = (f"{stem}{aside}.pt" for stem in ("last", "best") for aside in ("", ".nonfinite"))
        return [folder / name for name in names]

    def complete(self, tree: Mapping[str, Any], source: Path) -> None:
        """Write ``last.pt``, if the run was killed after ``best.pt``."""
        if self.path is not None and source == self.path / "best.pt":
            copy_checkpoint(source, self.path / "last.pt")

    def write_epoch(self, *, improved: bool) -> None:
        """Write ``best.pt`` if it is the best, then ``last.pt``; a collective call."""
        folder = self.path
        assert folder is not None
        self.before_write()
        tree = self.engine.state_dict(buffers=LiveTensors())
        on_rank_0(lambda: write_best_and_last(tree, folder, is_best=improved))
        on_rank_0(lambda: self.name_best_and_last(folder / "best.pt", folder / "last.pt"))
        self.engine.state.record_saved(folder / "last.pt", self.engine.step)
        self.record_written()

    def write_last(self) -> None:
        """Write ``last.pt``; a collective call."""
        self.write_epoch(improved=False)
