"""Spectra trainer: epoch-based training of masked autoencoders, and its run folder."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle import distributed
from treadle.capture.compile import check_compile
from treadle.checkpoint.rank_writer import RankWriter
from treadle.checkpoint.ranks import on_rank_0
from treadle.checkpoint.schema import to_plain
from treadle.checkpoint.store import load_checkpoint, save_checkpoint
from treadle.device import get_device, moved
from treadle.distributed.state_names import model_state
from treadle.engine import Engine
from treadle.engine.best import BestRule
from treadle.engine.hook import BaseHook
from treadle.engine.limits import Limits
from treadle.engine.run_log import run_log_shown
from treadle.engine.settings import check_capture
from treadle.errors import ConfigError
from treadle.errors.arguments import check_whole, checked, suggesting
from treadle.faces.build import EngineArguments, build_engine, place
from treadle.faces.epoch_face import EpochFace
from treadle.faces.epochs import EpochTrainer, numbers_of
from treadle.faces.loaders import EvalLoaders, check_eval_loaders, check_loader, results_by_name
from treadle.faces.parallel import ParallelConfig
from treadle.hooks.ema import EmaHook
from treadle.hooks.history import HistoryHook
from treadle.hooks.saving import BackgroundErrorHook
from treadle.hooks.trackers import TrackerChoice
from treadle.optim.ema import Ema
from treadle.optim.precision import PrecisionName, tf32
from treadle.spectra.config import TrainerConfig
from treadle.spectra.files import Selection, SpectraFolder
from treadle.spectra.task import Augmenter, SpectraTask, look_at_rows, spectra_of


class SpectraEpochs(EpochTrainer):
    """Epoch driver whose records always contain every validation loss; None, as in the file, until it is measured.

    Args:
        engine: runs the steps.
        best: selects the best epoch and stops early; None does neither.
        losses: keys of the validation losses in a record.
    """

    def __init__(self, engine: Engine, *, best: BestRule | None = None, losses: Sequence[str] = ("val_loss",)):
        super().__init__(engine, best=best)
        self._losses = losses

    def train_record(self, means: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``train_loss``, and None for each validation loss."""
        return {**super().train_record(means), **dict.fromkeys(self._losses)}


_log = logging.getLogger("treadle.spectra")
_epoch_log = logging.getLogger("treadle.spectra.epochs")


class SpectraTrainer(EpochFace):
    """Trainer of a model that returns ``(x_recon, z, visible_mask)`` on batches of spectra.

    Args:
        model: for example :class:`ChemoMAE`; moved to the device.
        optimizer: optimizer of its parameters.
        train_loader: batches (B, L), or tuples whose first item is one.
        val_loader: the same for validation, or None; a dict is evaluated loader by loader, as ``val_<name>_loss``.
        scheduler: advanced according to ``scheduler_interval``.
        cfg: settings; None uses the defaults. It is not modified.
        device: overrides ``cfg.device``.
        scheduler_interval: ``"step"`` (applied steps) or ``"epoch"``.
        hooks: additional hooks.
        trackers: experiment trackers, such as ``["tensorboard", "wandb"]``; see :func:`treadle.with_trackers`.
        progress: False shows no progress unless you configure a log handler, like ``TREADLE_PROGRESS=0``.
        limits: limits of time and batches, and short trials: a :class:`treadle.Limits` or a mapping of its fields.
        augmenter: augments the model's input in training, see :class:`SpectraAugmenter`.
        parallel: as ``cfg.parallel``, or a ParallelConfig; overrides it.
        best_model_metric: the validation loss to select by, such as ``"val_far_loss"``, if ``cfg.selection`` is
            ``"best"``; None uses that of the first loader.

    Raises:
        ConfigError: a loader or ``best_model_metric`` is invalid, ``device`` and ``cfg.device`` differ, a device is not
            available, or the scheduler was built for another optimizer.

    Example:
        >>> # trainer = SpectraTrainer(model, optimizer, train_loader, val_loader, cfg=TrainerConfig(out_dir="run"))
        >>> # trainer.fit(epochs=100)["best"]
    """

    _epochs: SpectraEpochs
    _folder: SpectraFolder

    @checked
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train_loader: Iterable[Any],
        val_loader: EvalLoaders | None = None,
        *,
        scheduler: LRScheduler | None = None,
        cfg: TrainerConfig | None = None,
        device: torch.device | str | int | None = None,
        scheduler_interval: Literal["step", "epoch"] = "step",
        hooks: Sequence[BaseHook] = (),
        augmenter: Augmenter | None = None,
        trackers: str | Sequence[TrackerChoice] = (),
        parallel: ParallelConfig | str | None = None,
        progress: bool = True,
        limits: Limits | Mapping[str, Any] | None = None,
        best_model_metric: str | None = None,
    ):
        check_loader(train_loader, "train_loader")
        check_eval_loaders(val_loader, "val_loader")
        if cfg is not None and not isinstance(cfg, TrainerConfig):
            raise ConfigError("must be a TrainerConfig(...), or None for its defaults", argument="cfg", value=cfg)
        self.cfg = TrainerConfig() if cfg is None else dataclasses.replace(cfg)
        self.model, self.optimizer, self.device = place(
            model, optimizer, device=_one_device(device, self.cfg.device), scheduler=scheduler,
            compile=check_compile(self.cfg.compile), parallel=parallel or self.cfg.parallel,
        )  # fmt: skip
        self.scheduler = scheduler
        self.train_loader = train_loader
        self.val_loader = val_loader
        out_dir = Path(self.cfg.out_dir).absolute()
        self._writer = RankWriter()
        self._selects = self._choose_selection()
        self._losses = [f"val_{name}" for name in results_by_name(["loss"], val_loader)] or ["val_loss"]
        selected = self._choose_metric(best_model_metric)
        arguments: EngineArguments = {
            "scheduler": scheduler, "scheduler_interval": scheduler_interval, "limits": limits,
            "device": self.cfg.device if device is None else device, "config": self._describe(),
            "workspace": out_dir, **_engine_arguments(self.cfg),
        }  # fmt: skip
        self._engine = build_engine(
            "spectra", self.model, self.optimizer, self._make_task(augmenter), arguments,
            own_hooks=self._own_hooks(out_dir), hooks=hooks, trackers=trackers, progress=progress,
        )  # fmt: skip
        rule = None
        if self._selects:
            delta, patience = self.cfg.early_stop_min_delta, self.cfg.early_stop_patience
            rule = BestRule(selected, "min", delta, patience)
        self._epochs = self._make_epochs(rule)
        self._folder = self._make_folder(out_dir, rule)

    def _choose_selection(self) -> bool:
        if self.cfg.selection == "best" and self.val_loader is None:
            _log.warning("selection='best' needs a val_loader; without one it is 'last': a fixed budget, no early stop")
            self.cfg = dataclasses.replace(self.cfg, selection="last")
        defaults = TrainerConfig()
        for name, why in self.cfg.idle():
            if (value := getattr(self.cfg, name)) != getattr(defaults, name):
                _log.warning("cfg.%s=%r has no effect, as %s", name, value, why)
        return self.cfg.selection == "best"

    def _choose_metric(self, asked: str | None) -> str:
        """Return the key of the validation loss used for selection."""
        if asked is None:
            return self._losses[0]
        name = f"val_{asked.removeprefix('val_')}"
        if not self._selects:
            raise ConfigError(
                "selects nothing where selection is 'last'; leave it out, or use selection='best' and a val_loader",
                argument="best_model_metric", value=asked,
            )  # fmt: skip
        if name not in self._losses:
            raise ConfigError(
                f"no epoch's record will have it, only {', '.join(self._losses)}",
                argument="best_model_metric", value=asked,
            )  # fmt: skip
        return name

    # Parts that a subclass may override: epochs, folder, task, settings in checkpoints, additional hooks.

    def _make_epochs(self, rule: BestRule | None) -> SpectraEpochs:
        return SpectraEpochs(self._engine, best=rule, losses=self._losses)

    def _make_folder(self, out_dir: Path, rule: BestRule | None) -> SpectraFolder:
        return SpectraFolder(self._engine, self._writer, out_dir, rule)

    def _make_task(self, augmenter: Augmenter | None) -> SpectraTask:
        cfg = self.cfg
        return SpectraTask(self.device, loss_type=cfg.loss_type, reduction=cfg.reduction, augmenter=augmenter)

    def _describe(self) -> dict[str, Any]:
        return self.cfg.to_dict()

    def _make_hooks(self, out_dir: Path) -> list[BaseHook]:
        keys = ("epoch", "train_loss", *self._losses, "lr")
        return [HistoryHook(out_dir / "training_history.json", lambda: self.history, keep=keys)]

    def _own_hooks(self, out_dir: Path) -> list[BaseHook]:
        cfg = self.cfg
        own: list[BaseHook] = [EmaHook(cfg.ema_decay, use_buffers=True)] if cfg.use_ema else []
        own += self._make_hooks(out_dir)
        return [*own, BackgroundErrorHook(self._writer)] if cfg.background_saves else own

    # -- what happened so far -------------------------------------------------------------------------------------

    @property
    def out_dir(self) -> Path:
        """Run folder; may be assigned between two calls."""
        return Path(self.cfg.out_dir).absolute() if self._folder.path is None else self._folder.path

    @out_dir.setter
    def out_dir(self, path: str | Path) -> None:
        self._folder.use(path)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record per epoch: ``epoch``, ``train_loss``, ``val_loss`` (None without validation) and ``lr``.

        With a dict of loaders there is a ``val_<name>_loss`` for each, and no ``val_loss``.
        """
        return self._epochs.history

    @property
    def best(self) -> dict[str, Any]:
        """Best epoch and its validation loss; -1 and infinity before there is one."""
        rule = self._epochs.best
        if rule is None or rule.best_epoch is None:
            return {"epoch": -1, "val_loss": math.inf}
        return {"epoch": rule.best_epoch, "val_loss": rule.best}

    @property
    def ema(self) -> Ema | None:
        """Averaged model, or None if averaging is disabled."""
        self._engine.prepare()
        return self._engine.averages.get("ema")

    # -- training -------------------------------------------------------------------------------------------------

    @suggesting
    def fit(self, epochs: int) -> dict[str, Any]:
        """Train until ``epochs`` epochs are complete or early stopping ends the run.

        Args:
            epochs: absolute target; a run that has reached it returns the stored result.

        Returns:
            ``{"best": {"epoch", "val_loss"}, "epochs": epochs completed}``.

        Raises:
            ConfigError: ``epochs`` is not an integer >= 0.
            CheckpointError: another process is training in ``out_dir``, or none of its checkpoints is intact.
        """
        check_whole(0, epochs=epochs)
        if self.epoch < epochs:
            skips = any(type(hook).refusal_plan is not BaseHook.refusal_plan for hook in self._engine.hooks)
            look_at_rows(self.train_loader, survives=skips or bool(self.cfg.max_non_finite_grad_retries))
        if self._epochs.best is not None:
            self._epochs.best.count_from(max(1, int(epochs * self.cfg.early_stop_start_ratio)))
        with run_log_shown(self._engine), self._folder.training(), self._writer, tf32(self.cfg.enable_tf32):
            self._resume()
            self._epochs.fit(self.train_loader, self.val_loader, epochs, after_epoch=self._write_epoch)
        return {"best": self.best, "epochs": self.epoch}

    def train_one_epoch(self) -> float:
        """Train one epoch and return its weighted mean loss."""
        with tf32(self.cfg.enable_tf32):
            return float(self._epochs.train_epoch(self.train_loader)["loss"])

    def validate(self, loader: EvalLoaders | None = None) -> Any:
        """Return the weighted mean loss of the evaluated weights under fixed masks; NaN without a ``val_loader``.

        Args:
            loader: batches; None takes ``val_loader``.

        Returns:
            A float, or for a dict of loaders a dict with ``<name>_loss`` for each.

        Raises:
            ConfigError: a loader is empty.
        """
        chosen = self.val_loader if loader is None else loader
        if chosen is None:
            return math.nan
        results = self._epochs.evaluate_each(chosen)
        return results if isinstance(chosen, Mapping) else float(results["loss"])

    def predict(self, loader: Iterable[Any]) -> Any:
        """Return ``(x_recon, z, visible_mask)`` of a loader's spectra, with the evaluated weights and fixed masks.

        Returns:
            Tensors (N, L), (N, D) and (N, L) on the CPU, in the loader's order.

        Raises:
            ConfigError: the loader is empty.
        """
        return self._epochs.predict(loader, lambda batch: self.model(moved(spectra_of(batch), self.device)))

    # -- files ----------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        self._folder.resume_once(self.cfg.resume_from)

    def _write_epoch(self, record: Mapping[str, Any]) -> None:
        selection: Selection = "last"
        if self._selects:
            selection = "improved" if self._epochs.improved else "not improved"
        if self._folder.path is not None:
            self._folder.write_epoch(selection, background=self.cfg.background_saves)
        if distributed.rank() == 0:
            _epoch_log.info("epoch %d: %s", self.epoch, numbers_of(record), extra={"topic": "epoch"})

    def save_checkpoint(self, epoch: int, is_best: bool) -> None:
        """Write ``checkpoints/last.pt``, and ``checkpoints/best.pt`` if ``is_best``.

        Args:
            epoch: completed epochs; the count in the state is what is stored.
            is_best: whether this is the best epoch so far.
        """
        if epoch != self.epoch:
            _log.warning(
                "save_checkpoint(epoch=%d): the state is that of epoch %d and is saved as such", epoch, self.epoch
            )
        self._folder.write_checkpoints(is_best=is_best)

    def save_weights_only(self, filename: str = "best_model.pt") -> Path:
        """Write the evaluated weights (the average if enabled) as a plain state dict; a collective call."""
        self._writer.wait()
        weights = to_plain(model_state(self.model) if self.ema is None else self.ema.export(self.model))
        return on_rank_0(lambda: save_checkpoint(weights, self.out_dir / filename))

    def load_checkpoint(self, path: str | Path) -> int:
        """Restore the full state from a checkpoint and return the 1-based number of the next epoch.

        Raises:
            CheckpointError: the file is missing, damaged, or of a different model.
        """
        self._folder.restore(load_checkpoint(path), path)
        return self.epoch + 1


def _one_device(argument: torch.device | str | int | None, setting: torch.device | str | int | None) -> torch.device:
    if argument is not None and setting is not None and get_device(argument) != get_device(setting):
        raise ConfigError(f" and cfg.device={setting!r} differ; give one of them", argument="device", value=argument)
    return get_device(setting if argument is None else argument)


def _engine_arguments(cfg: TrainerConfig) -> EngineArguments:
    precision: PrecisionName | None = None
    if cfg.amp:
        precision = "bf16" if cfg.amp_dtype == "bf16" else "fp16"
    return {
        "precision": precision,
        "grad_clip": cfg.grad_clip,
        "accumulation_steps": cfg.accumulation_steps,
        "max_non_finite_grad_retries": cfg.max_non_finite_grad_retries,
        "eval_seed": cfg.eval_seed,
        "capture": check_capture(cfg.capture),
    }
