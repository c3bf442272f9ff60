"""Runs of ``treadle train spectra``: data, model and training; the report is in :mod:`treadle.spectra.report`."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treadle.config.sections import as_settings
from treadle.data import steps_per_epoch
from treadle.errors import number_of
from treadle.runs.folder import split_of, write_changed
from treadle.runs.pack import Evaluation, Opened, Pack, Predictions, Results, Run, load_newest
from treadle.runs.packs import SUMMARIES
from treadle.runs.report import Report
from treadle.seed import forked_rng, set_seed
from treadle.spectra import report
from treadle.spectra.config import TrainerConfig
from treadle.spectra.inference import Extractor, ExtractorConfig, Tester, TesterConfig
from treadle.spectra.model import ChemoMAE
from treadle.spectra.optim import build_optimizer, build_scheduler
from treadle.spectra.residual import ResidualMAE
from treadle.spectra.run_config import FLAGS, FREE, SpectraConfig
from treadle.spectra.run_data import SpectraData, prepare_data
from treadle.spectra.trainer import SpectraTrainer

_log = logging.getLogger("treadle.cli")
_BATCH = 256
_RANK = 64  # factors of the linear part of a ResidualMAE


class SpectraPack(Pack[SpectraConfig, SpectraData, SpectraTrainer]):
    """Pack of ``treadle train spectra``."""

    name = "spectra"
    summary = SUMMARIES["spectra"]
    help = """
    Train a masked autoencoder on 1,939 real near-infrared spectra and show what it learned.

    A run that was stopped at any moment, by any cause, resumes when the same command is run again; a finished one shows
    its results. Ctrl-C saves before exiting.

    The run folder holds config.json, training_history.json, steps.jsonl, checkpoints/, best_model.pt, metrics.json and
    pictures/.

    \b
    Examples:
      treadle train spectra
      treadle train spectra epochs=20 optimizer.lr=1e-3 --out runs/short
      treadle train spectra model.d_model=96 trainer.early_stop_patience=none --device cuda
      torchrun --nproc_per_node 2 -m treadle train spectra
      treadle train spectra --show-settings
    """
    config = SpectraConfig
    example = "epochs=20 model.d_model=32"
    flags = FLAGS
    free = FREE
    needed = ("best_model.pt",)
    afterwards = "the test, the probes and the plots"

    def defaults(self, device: torch.device) -> SpectraConfig:
        """Return the default settings for a device."""
        return SpectraConfig.for_device(device)

    def idle(self, config: SpectraConfig) -> Iterable[tuple[str, str]]:
        """Yield the settings that another one switches off."""
        if config.model.residual:
            yield "model.use_learnable_pos", "model.residual is True"
        yield from ((f"trainer.{name}", f"trainer.{why}") for name, why in config.trainer.idle())

    def parallel(self, config: SpectraConfig) -> str | None:
        """Return the setting that distributes the model over ranks."""
        parallel = config.trainer.parallel
        return parallel if isinstance(parallel, str) else None

    def prepare(self, run: Run[SpectraConfig]) -> SpectraData:
        """Load and scale the spectra."""
        return prepare_data(run.config.data)

    def build(self, run: Run[SpectraConfig], data: SpectraData) -> SpectraTrainer:
        """Build the trainer with its loaders, optimizer and schedule."""
        config, device = run.config, run.device
        train_loader = data.loader(data.train, config.batch_size, shuffle=True, seed=config.seed, device=device)
        model = build_model(config, data).to(device)
        with as_settings("optimizer", vars(config.optimizer)):
            optimizer = build_optimizer(model, **vars(config.optimizer))
        with as_settings("schedule", vars(config.schedule)):
            scheduler = build_scheduler(
                optimizer,
                steps_per_epoch=steps_per_epoch(train_loader, config.trainer.accumulation_steps),
                epochs=config.epochs,
                **vars(config.schedule),
            )
        unused = {name: getattr(TrainerConfig, name) for name, _ in config.trainer.idle()}  # the pack sets some
        cfg = dataclasses.replace(
            config.trainer, **unused, out_dir=run.out, device=str(device), resume_from="auto" if run.resume else None,
            parallel=run.parallel, compile=config.trainer.compile if run.trains else False,
        )  # fmt: skip
        trainer = SpectraTrainer(
            model,
            optimizer,
            train_loader,
            data.loader(data.val, _BATCH, device=device),
            scheduler=scheduler,
            cfg=cfg,
            hooks=run.hooks(
                status=lambda: _status(trainer), save=lambda: trainer.save_checkpoint(trainer.epoch, False)
            ),
        )
        return trainer

    def resume(self, run: Run[SpectraConfig], trainer: SpectraTrainer) -> str:
        """Load ``last.pt``, or ``best.pt`` if it is damaged."""
        return load_newest(run, trainer, epochs=run.config.epochs, step=lambda: trainer.step)

    def fit(self, run: Run[SpectraConfig], data: SpectraData, trainer: SpectraTrainer) -> None:
        """Train up to the number of epochs, or until the validation loss stops improving."""
        epochs = run.config.epochs
        trainer.fit(epochs)
        if trainer.epoch < epochs:
            _log.info(
                "stopped early after epoch %d of %d: no better validation loss for %s",
                trainer.epoch, epochs, number_of(trainer.cfg.early_stop_patience or 0, "epoch"),
            )  # fmt: skip

    def keep(self, run: Run[SpectraConfig], data: SpectraData) -> None:
        """Write the settings; this pack's config.json has never contained the pack name."""
        write_changed(json.dumps(self.values(run.config), indent=2) + "\n", run.out / "config.json")

    def describe(self, run: Run[SpectraConfig], data: SpectraData, trainer: SpectraTrainer) -> dict[str, str]:
        """Return the decisions about precision, data, model and schedule."""
        config = run.config
        low, high = float(data.wavelengths[0]), float(data.wavelengths[-1])
        per_epoch = steps_per_epoch(trainer.train_loader, config.trainer.accumulation_steps)
        model, trained = config.model, sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        return {
            "precision": _precision_line(config, trainer.device),
            "data": f"SpeX, {len(data.x):,} spectra of {data.num_groups:,} objects, {data.x.shape[1]} channels, "
            f"{low:.2f} to {high:.2f} {data.wavelength_unit}, SNV-scaled",
            "split": f"by object: {len(data.train):,} spectra train, {len(data.val):,} validate, "
            f"{len(data.test):,} test",
            "model": f"{model_name(config)}, {trained:,} parameters, latent of {model.latent_dim}; hides "
            + ("blocks, bands, or all but a band" if model.residual else f"{model.n_mask} of {model.n_blocks} blocks"),
            "schedule": f"{number_of(config.epochs, 'epoch')} of {number_of(per_epoch, 'step')}, batches of "
            f"{config.batch_size}, learning rate {config.optimizer.lr:g} after "
            f"{number_of(config.schedule.warmup_epochs, 'epoch')} of warm-up",
        }  # fmt: skip

    def finish(self, run: Run[SpectraConfig], data: SpectraData, trainer: SpectraTrainer) -> Results:
        """Test and probe the best weights, and draw the plots."""
        with forked_rng():  # a model equal to the one at the start of training
            untrained = build_model(run.config, data)
        return report.finish_run(run.config, data, trainer, untrained, run.out)

    def report(self, metrics: Mapping[str, Any], out: Path) -> Report:
        """Return the tables of losses and probes."""
        return report.results(metrics)

    def evaluate(
        self,
        opened: Opened[SpectraConfig, SpectraData, SpectraTrainer],
        split: str,
        *,
        batch_size: int | None,
        num_workers: int,
    ) -> Evaluation:
        """Return the loss of a split under the fixed evaluation masks."""
        rows, cfg = split_of(opened.data, split), opened.run.config.trainer
        tester = TesterConfig(
            device=str(opened.run.device), amp=cfg.amp, amp_dtype=cfg.amp_dtype, loss_type=cfg.loss_type,
            reduction=cfg.reduction, log_history=False, eval_seed=cfg.eval_seed,
        )  # fmt: skip
        loss = Tester(opened.trainer.model, tester)(opened.data.loader(rows, batch_size or _BATCH))
        return Evaluation({"loss": loss}, counts={"spectra": len(rows)})

    def predict(
        self,
        opened: Opened[SpectraConfig, SpectraData, SpectraTrainer],
        split: str,
        *,
        batch_size: int | None,
        **options: Any,
    ) -> Predictions:
        """Return the latents of a split, each with its row in the data set."""
        rows, cfg = split_of(opened.data, split), opened.run.config.trainer
        extractor = ExtractorConfig(
            device=str(opened.run.device), amp=cfg.amp, amp_dtype=cfg.amp_dtype, return_numpy=True
        )
        latent = Extractor(opened.trainer.model, extractor)(opened.data.loader(rows, batch_size or _BATCH))
        return Predictions({"latent": np.asarray(latent), "row": np.asarray(rows)})


def build_model(config: SpectraConfig, data: SpectraData) -> ChemoMAE | ResidualMAE:
    """Seed, and build the model with its initial weights; the linear part of a ``ResidualMAE`` is fitted."""
    set_seed(config.seed)
    settings = {key: value for key, value in vars(config.model).items() if key != "residual"}
    with as_settings("model", vars(config.model)):
        if not config.model.residual:
            return ChemoMAE(seq_len=data.x.shape[1], **settings)
        del settings["use_learnable_pos"]
        model = ResidualMAE(seq_len=data.x.shape[1], rank=min(_RANK, len(data.train) - 1), **settings)
    model.fit(torch.from_numpy(data.x[data.train]))
    return model


def model_name(config: SpectraConfig) -> str:
    """Return the class name of the model."""
    return "ResidualMAE" if config.model.residual else "ChemoMAE"


def _status(trainer: SpectraTrainer) -> str:
    if not trainer.history:
        return ""
    return f"val {trainer.history[-1]['val_loss']:.4f} (best {trainer.best['val_loss']:.4f})"


def _precision_line(config: SpectraConfig, device: torch.device) -> str:
    if config.trainer.amp:
        return f"{config.trainer.amp_dtype} autocast (trainer.amp=false turns it off)"
    why = "bf16 is slower than fp32 on most CPUs" if device.type == "cpu" else "trainer.amp=false"
    return f"fp32 ({why})"


PACK = SpectraPack()
