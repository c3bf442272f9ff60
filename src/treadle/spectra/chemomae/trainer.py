"""Trainer of chemomae 0.2, with its arguments, files, results and override points on this library's loop."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from treadle.checkpoint.ranks import on_rank_0
from treadle.checkpoint.schema import to_plain
from treadle.checkpoint.store import averaged_weights, copy_checkpoint, save_checkpoint
from treadle.device import moved
from treadle.distributed import unwrap
from treadle.distributed.state_names import model_state
from treadle.engine.best import BestRule
from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.errors.arguments import check_whole, checked, suggesting
from treadle.hooks.history import HistoryHook
from treadle.spectra.chemomae.config import FILES, PreparedBatch, TrainerConfig
from treadle.spectra.chemomae.overrides import (
    STEP_HOOKS,
    EpochBatches,
    ExtensionHook,
    HookedTask,
    OwnMasksTask,
    StepExtension,
)
from treadle.spectra.files import Selection, SpectraFolder
from treadle.spectra.originals import is_original
from treadle.spectra.patches import PatchMAE
from treadle.spectra.task import LOSSES, Augmenter, SpectraTask, spectra_of
from treadle.spectra.trainer import SpectraEpochs, SpectraTrainer

_log = logging.getLogger("treadle.spectra")


class Trainer(SpectraTrainer):
    """Trainer of masked reconstruction with the override points of chemomae 0.2.

    A subclass may replace ``train_batches``, ``prepare_batch``, ``forward_batch``, ``compute_loss``, the events
    ``before_epoch``, ``after_epoch``, ``before_step``, ``after_step``, and ``checkpoint_extra_state`` with
    ``load_checkpoint_extra_state``. Those not overridden cost nothing; ``after_step`` synchronises with the device to
    read the loss.

    Args:
        model: returns ``(x_recon, z, visible_mask)``.
        optimizer: optimizer of its parameters.
        train_loader: batches (B, L), tuples whose first item is one, or :class:`PreparedBatch`.
        scheduler: advanced after every applied step.
        augmenter: augments the model's input, not the target.
        cfg: settings; None uses the defaults.

    Raises:
        ConfigError: a setting is invalid.

    Example:
        >>> # Trainer(model, optimizer, train_loader, cfg=TrainerConfig(out_dir="run")).fit(100)["optimizer_updates"]
    """

    STEP_POLICY = "successful_optimizer_update"

    @checked
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train_loader: Iterable[Any],
        *,
        scheduler: LRScheduler | None = None,
        augmenter: Augmenter | None = None,
        cfg: TrainerConfig | None = None,
    ):
        self.files = TrainerConfig() if cfg is None else dataclasses.replace(cfg)
        self.augmenter = augmenter
        self._check_files()
        first = next(model.parameters(), None)
        where = first.device if first is not None else torch.device("cpu")
        device = torch.device(self.files.device) if self.files.device is not None else where
        loader = EpochBatches(self) if self._replaces("train_batches") else train_loader
        super().__init__(
            model, optimizer, loader, scheduler=scheduler, augmenter=augmenter, cfg=self.files.settings(device),
            progress=self.files.progress and self.files.verbose,
        )  # fmt: skip
        self.batches = train_loader
        if isinstance(augmenter, nn.Module):
            augmenter.to(self.device).train()

    def _check_files(self) -> None:
        paths = [self.files.file(name) for name in FILES]
        given = [path for path in paths if path is not None]
        if len(set(given)) != len(given):
            raise ConfigError(f"{', '.join(FILES)}: two of them are the same path; give each its own")

    def _replaces(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(Trainer, name)

    # -- override points ------------------------------------------------------------------------------------------

    def train_batches(self, epoch: int) -> Iterable[Any]:
        """Return the batches of a 1-based epoch."""
        return self.batches

    def prepare_batch(self, batch: Any) -> PreparedBatch:
        """Return input, target and mask of a batch; a :class:`PreparedBatch` is not augmented."""
        if isinstance(batch, PreparedBatch):
            return batch
        x = moved(spectra_of(batch), self.device)
        return PreparedBatch(x if self.augmenter is None else self.augmenter(x), x)

    def forward_batch(self, batch: PreparedBatch) -> tuple[Tensor, Tensor]:
        """Return the reconstruction and the visible mask, both (B, L)."""
        if batch.visible_mask is None:
            x_recon, _, visible_mask = self.model(batch.model_input)
        else:
            x_recon, _, visible_mask = self.model(batch.model_input, visible_mask=batch.visible_mask)
        return x_recon, visible_mask

    def compute_loss(self, reconstructed: Tensor, target: Tensor, visible_mask: Tensor) -> Tensor:
        """Return the loss, 0-d, over the channels selected by ``loss_region``."""
        mask = ~visible_mask if self.files.loss_region == "masked" else torch.ones_like(visible_mask)
        return LOSSES[self.cfg.loss_type](reconstructed, target, mask, reduction=self.cfg.reduction)

    def before_epoch(self, epoch: int) -> None:
        """Handle the start of a 1-based epoch."""

    def after_epoch(self, epoch: int, record: dict[str, Any]) -> None:
        """Handle the end of an epoch, before its record is written; may add fields to it."""

    def before_step(self, epoch: int, batch_index: int, batch: PreparedBatch) -> None:
        """Handle a step before its forward pass; ``batch_index`` counts from 0 within the epoch."""

    def after_step(
        self, epoch: int, batch_index: int, batch: PreparedBatch, *, loss: float, optimizer_updated: bool
    ) -> None:
        """Handle a finished step, including one skipped by fp16."""

    def checkpoint_extra_state(self) -> dict[str, Any]:
        """Return state of the subclass for checkpoints: numbers, strings, tensors, lists and dicts."""
        return {}

    def load_checkpoint_extra_state(self, state: dict[str, Any]) -> None:
        """Restore a state returned by :meth:`checkpoint_extra_state`.

        Raises:
            ConfigError: there is such state and the subclass does not override this method.
        """
        if state:
            raise ConfigError(
                f"the checkpoint has state of a subclass ({', '.join(state)}); override load_checkpoint_extra_state"
            )

    # -- counters -------------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """1-based current epoch; between epochs, the last one."""
        return self.epoch + 1 if self._engine.state.training else self.epoch

    @property
    def attempted_steps(self) -> int:
        """Steps, including those skipped by fp16."""
        return self.step

    @property
    def optimizer_updates(self) -> int:
        """Steps that changed the weights."""
        return self.applied_steps

    @property
    def amp_skips(self) -> int:
        """Steps skipped by fp16."""
        return self.step - self.applied_steps

    # -- training and files ---------------------------------------------------------------------------------------

    @suggesting
    def fit(self, epochs: int) -> dict[str, Any]:
        """Train until ``epochs`` epochs are complete.

        Returns:
            ``epochs``, ``completed``, ``final_model``, ``final_artifact``, ``attempted_steps``, ``optimizer_updates``
            and ``amp_skips``.

        Raises:
            ConfigError: ``epochs`` is not an integer >= 1.
        """
        check_whole(1, epochs=epochs)
        if self._replaces("before_epoch"):
            self._resume()
            self._engine.cursor.settle(self.train_loader)
            for epoch in range(self.epoch + 1, epochs):
                self.before_epoch(epoch)
                super().fit(epoch)
            if self.epoch < epochs:
                self.before_epoch(epochs)
        super().fit(epochs)
        name = "ema_weights_file" if self._exports_average else "raw_weights_file"
        final, artifact = self.files.file(name), None
        if final is not None and self._writes_artifacts:
            artifact = str(artifact_path(final))
        return {
            "epochs": self.epoch,
            "completed": self.epoch >= epochs,
            "final_model": None if final is None else str(getattr(self.files, name)),
            "final_artifact": artifact,
            "attempted_steps": self.attempted_steps,
            "optimizer_updates": self.optimizer_updates,
            "amp_skips": self.amp_skips,
        }

    @property
    def _exports_average(self) -> bool:
        return self.cfg.use_ema and self.files.ema_weights_file is not None

    @property
    def _writes_artifacts(self) -> bool:
        return self.files.model_artifacts and type(unwrap(self.model)) is PatchMAE

    def save_checkpoint(self, epoch: int, *, path: str | Path | None = None) -> None:  # type: ignore[override]
        """Write the state of the run to ``path``; None writes to ``checkpoint_dir``.

        Raises:
            ConfigError: there is no ``checkpoint_dir``.
        """
        if epoch != self.epoch:
            _log.warning(
                "save_checkpoint(epoch=%d): the state is that of epoch %d and is saved as such", epoch, self.epoch
            )
        target = self._folder.last if path is None else Path(path)
        if target is None:
            raise ConfigError("give a path; the run has no checkpoint_dir", argument="path", value=None)
        self._writer.wait()
        tree = self._engine.state_dict()
        on_rank_0(lambda: save_checkpoint(tree, target))

    def save_weights_only(self, filename: str | Path | None = None) -> Path:
        """Write the raw weights as a plain state dict and as an artifact; a collective call.

        Raises:
            ConfigError: there is no ``raw_weights_file``.
        """
        target = self.files.file("raw_weights_file") if filename is None else self.out_dir / filename
        if target is None:
            raise ConfigError("give a name; the run has no raw_weights_file", argument="filename", value=None)
        self._writer.wait()
        weights = to_plain(model_state(self.model))
        return on_rank_0(lambda: self.write_weights(weights, target))

    def write_weights(self, weights: Mapping[str, Any], path: Path) -> Path:
        """Write weights to a file, and as an artifact next to it if ``model_artifacts`` is True."""
        written = save_checkpoint(weights, path)
        if self._writes_artifacts and written == path:
            model: Any = unwrap(self.model)
            model.save(artifact_path(path), state_dict=weights)
        return written

    # -- parts ----------------------------------------------------------------------------------------------------

    def _make_task(self, augmenter: Augmenter | None) -> SpectraTask:
        task = super()._make_task(augmenter)
        task.loss_region = self.files.loss_region
        return HookedTask(self, task) if any(map(self._replaces, (*STEP_HOOKS, "after_step"))) else OwnMasksTask(task)

    def _describe(self) -> dict[str, Any]:
        n_mask = getattr(unwrap(self.model), "n_mask", None)
        return {
            **super()._describe(), "loss_region": self.files.loss_region,
            "n_mask": n_mask if type(n_mask) is int else None, "augmenter": _described(self.augmenter),
        }  # fmt: skip

    def _make_epochs(self, rule: BestRule | None) -> SpectraEpochs:
        return _Epochs(self)

    def _make_folder(self, out_dir: Path, rule: BestRule | None) -> SpectraFolder:
        return _Folder(self, out_dir)

    def _make_hooks(self, out_dir: Path) -> list[BaseHook]:
        extension = StepExtension(self) if self._replaces("after_step") else ExtensionHook(self)
        path = self.files.file("history_file")
        return [extension] if path is None else [extension, HistoryHook(path, lambda: self.history)]


def _described(augmenter: Augmenter | None) -> str | None:
    """Return the settings of an augmenter, or its name if it has none, so that a resume with others is named."""
    if augmenter is None:
        return None
    name = getattr(augmenter, "__qualname__", type(augmenter).__qualname__)
    text = str(getattr(augmenter, "config", name))
    return name if " at 0x" in text else text


def artifact_path(path: Path) -> Path:
    """Return the path of the artifact, with configuration, next to a weights file.

    Example:
        >>> artifact_path(Path("last_model.pt")).name
        'last_model.artifact.pt'
    """
    return path.with_name(f"{path.stem}.artifact{path.suffix}")


class _Epochs(SpectraEpochs):
    """Epoch driver with chemomae 0.2's counters in its records."""

    def __init__(self, trainer: Trainer):
        super().__init__(trainer._engine)
        self._trainer = trainer

    def _score(self, val_loader: Any) -> float:
        value = super()._score(val_loader)
        record = self.history[-1]
        record.pop("val_loss", None)
        n_mask = getattr(unwrap(self.engine.model), "n_mask", None)
        before = self.history[-2] if len(self.history) > 1 else {}
        counts = {
            name: int(getattr(self._trainer, name)) for name in ("attempted_steps", "optimizer_updates", "amp_skips")
        }
        if self._trainer._replaces("before_step"):  # which may set the learning rate
            record["lr"] = float(self.engine.optimizer.param_groups[0]["lr"])
        record["loss_region"] = self._trainer.files.loss_region
        record["n_mask"] = n_mask if isinstance(n_mask, int) else None
        record.update({name: count - int(before.get(f"cumulative_{name}", 0)) for name, count in counts.items()})
        record.update({f"cumulative_{name}": count for name, count in counts.items()})
        core = dict(record)
        self._trainer.after_epoch(record["epoch"], record)
        changed = [key for key, value in core.items() if record.get(key) != value]
        if changed:
            raise ConfigError(f"after_epoch changed {', '.join(changed)}; it may add fields to the record only")
        return value


class _Folder(SpectraFolder):
    """Run folder with file names from the settings."""

    def __init__(self, trainer: Trainer, path: Path):
        super().__init__(trainer._engine, trainer._writer, path)
        self._trainer = trainer

    @property
    def last(self) -> Path | None:
        """File of the newest state; None if none is written."""
        folder = self._trainer.files.file("checkpoint_dir")
        return None if folder is None else folder / "last.pt"

    def candidates(self, folder: Path) -> Iterable[Path]:
        """Return the last state, even if it is not finite."""
        return [] if self.last is None else [self.last, self.last.with_name("last.nonfinite.pt")]

    def restore(self, tree: Mapping[str, Any], source: str | Path) -> None:
        """Restore a checkpoint tree in place, without its random state if ``restore_rng`` is False."""
        if not self._trainer.files.restore_rng:
            tree = {**tree, "rng": None, "rng_state": None} if is_original(tree) else {**tree, "rng": None}
        super().restore(tree, source)

    def complete(self, tree: Mapping[str, Any], source: Path) -> None:
        """Keep a chemomae checkpoint next to the one that replaces it."""
        if is_original(tree):
            copy_checkpoint(source, source.with_suffix(f".chemomae{source.suffix}"))

    def write_epoch(self, selection: Selection, *, background: bool) -> None:
        """Write the weights and the state of an epoch; a collective call."""
        self.before_write()
        state, step, last = self.engine.state, self.engine.step, self.last

        def write(tree: Mapping[str, Any]) -> None:
            self._write(tree)
            if last is not None:
                state.record_saved(last, step)  # not before it is

        self._writer.save_file(lambda buffers: self.engine.state_dict(buffers=buffers), write, background=background)
        self.record_written()

    def write_checkpoints(self, *, is_best: bool) -> None:
        """Write the weights and the current state; a collective call."""
        self._writer.wait()
        self.before_write()
        tree = self.engine.state_dict()
        on_rank_0(lambda: self._write(tree))

    def _write(self, tree: Mapping[str, Any]) -> None:
        files = self._trainer.files
        raw, average = files.file("raw_weights_file"), files.file("ema_weights_file")
        if raw is not None:
            self._trainer.write_weights(tree["model"], raw)
        if average is not None and (averaged := averaged_weights(tree)) is not None:
            self._trainer.write_weights(averaged, average)
        if self.last is not None:
            save_checkpoint(tree, self.last)
