"""Runs of ``treadle train astro``: tokens, model and training; the report is in :mod:`treadle.astro.report`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from treadle.astro import report
from treadle.astro.cross_modal import CrossResult, cross_predict
from treadle.astro.initialisation import initialise_from_codebooks
from treadle.astro.model import CausalTransformerLM
from treadle.astro.pictures import question_name
from treadle.astro.run_config import FLAGS, FREE, AstroRunConfig
from treadle.astro.run_data import TOKENIZERS, AstroData, prepare_data
from treadle.astro.tokenizer_files import save_tokenizers
from treadle.astro.trainer import AstroTrainer
from treadle.checkpoint.store import load_weights
from treadle.config.sections import as_settings
from treadle.distributed.state_names import load_model_state
from treadle.hooks.files import to_json
from treadle.runs.folder import split_of, stored_json
from treadle.runs.pack import Evaluation, Opened, Pack, Predictions, Results, Run
from treadle.runs.packs import SUMMARIES
from treadle.runs.report import Report
from treadle.seed import set_seed

_BATCH = 256
AstroOpened = Opened[AstroRunConfig, AstroData, AstroTrainer]


class AstroPack(Pack[AstroRunConfig, AstroData, AstroTrainer]):
    """Pack of ``treadle train astro``."""

    name = "astro"
    summary = SUMMARIES["astro"]
    help = """
    Train a transformer on tokens of galaxy images, spectra and catalogues, and predict each from the others.

    The data comes with the package. A run that was stopped at any moment, by any cause, resumes when the same command
    is run again; a finished one shows its results. Ctrl-C saves before exiting.

    The run folder holds config.json, tokenizers.safetensors, steps.jsonl, checkpoints/ with best.pt, ckpt_epoch_….pt
    and training_history.json, metrics.json, page.html and pictures/.

    \b
    Examples:
      treadle train astro
      treadle train astro training.epochs=4 model.d_model=32 --out runs/short
      treadle train astro training.meaningful_loss.enabled=false --out runs/cross_entropy_alone
      torchrun --nproc_per_node 2 -m treadle train astro
      treadle train astro --show-settings
    """
    config = AstroRunConfig
    example = "model.d_model=96 training.epochs=20"
    flags = FLAGS
    free = FREE
    needed = ("checkpoints/best.pt",)
    loads_in_processes = True
    afterwards = "the test and the plots"

    def defaults(self, device: torch.device) -> AstroRunConfig:
        """Return the default settings for a device."""
        return AstroRunConfig.for_device(device)

    def idle(self, config: AstroRunConfig) -> Iterator[tuple[str, str]]:
        """Yield the settings that another one switches off."""
        training = config.training
        if not training.meaningful_loss.enabled:
            for name in ("sample_k_per_modality", "weight_image", "weight_scalar", "weight_spectrum"):
                yield f"training.meaningful_loss.{name}", "training.meaningful_loss.enabled is False"
        if not training.num_workers:
            for name in ("persistent_workers", "prefetch_factor"):
                yield f"training.{name}", "training.num_workers is 0"

    def parallel(self, config: AstroRunConfig) -> str | None:
        """Return the setting that distributes the model over ranks."""
        return config.training.parallel

    def prepare(self, run: Run[AstroRunConfig]) -> AstroData:
        """Split the surveys; load the tokenizers of a resumed run or fit new ones."""
        return prepare_data(run.config, None if run.home is None else run.home / TOKENIZERS)

    def build(self, run: Run[AstroRunConfig], data: AstroData) -> AstroTrainer:
        """Seed, and build the trainer with a new model and its loader."""
        config, tokenizers = run.config, data.tokenizers
        vocab = tokenizers.vocab()
        set_seed(config.seed)
        with as_settings("model", vars(config.model)):
            model = CausalTransformerLM(vocab.vocab_size, vocab.n_types, **vars(config.model), max_len=data.longest)
        if config.start_from_codebooks:
            initialise_from_codebooks(
                model,
                vocab,
                image_codebook=tokenizers.image.codebook,
                spectrum_codebook=tokenizers.spectrum.codebooks,
            )
        trainer = AstroTrainer(
            model,
            vocab,
            data.train_loader(config),
            dataclasses.replace(config.training, seed=config.seed, parallel=run.parallel),
            image_codebook=tokenizers.image.codebook,
            spectrum_codebook=tokenizers.spectrum.codebooks,
            scalar_centers=tokenizers.scalar.codebook,
            device=run.device,
            output_dir=run.checkpoints,
            use_amp=config.mixed_precision is not None,
            amp_dtype="fp16" if config.mixed_precision == "fp16" else "bf16",
            use_ce=config.use_ce,
            hooks=run.hooks(
                status=lambda: _status(trainer),
                save=lambda: trainer.save_checkpoint(f"ckpt_step_{trainer.global_step:08d}.pt"),
            ),
        )
        return trainer

    def resume(self, run: Run[AstroRunConfig], trainer: AstroTrainer) -> str:
        """Do nothing; :meth:`fit` loads the checkpoint."""
        return f"resumes from the newest checkpoint in {run.checkpoints}"

    def fit(self, run: Run[AstroRunConfig], data: AstroData, trainer: AstroTrainer) -> None:
        """Train up to the number of epochs, from the newest checkpoint if there is one."""
        trainer.train(val_loader=data.loader("val", run.config), resume_from="auto")

    def keep(self, run: Run[AstroRunConfig], data: AstroData) -> None:
        """Write the tokenizers to the run folder."""
        super().keep(run, data)
        save_tokenizers(run.out / TOKENIZERS, data.tokenizers)

    def describe(self, run: Run[AstroRunConfig], data: AstroData, trainer: AstroTrainer) -> dict[str, str]:
        """Return the decisions about precision, data, tokens, model, loss and schedule."""
        return report.decisions(run.config, data, trainer)

    def finish(self, run: Run[AstroRunConfig], data: AstroData, trainer: AstroTrainer) -> Results:
        """Test the best weights, predict one modality from another, and draw the plots."""
        load_model_state(trainer.model, load_weights(run.checkpoints / "best.pt"))
        return report.finish_run(run.config, data, trainer, run.out)

    def report(self, metrics: Mapping[str, Any], out: Path) -> Report:
        """Return the tables of tokens and prediction tasks."""
        return report.results(metrics, out)

    def evaluate(self, opened: AstroOpened, split: str, *, batch_size: int | None, num_workers: int) -> Evaluation:
        """Return the losses of a split and the scores of the report's prediction tasks on it."""
        config, data = opened.run.config, opened.data
        size = batch_size or config.training.batch_size
        training = dataclasses.replace(config.training, batch_size=size, num_workers=num_workers)
        batches = data.loader(split, dataclasses.replace(config, training=training))
        metrics = to_json(opened.trainer.evaluate(batches))
        predictions = to_json([report.as_values(result) for result in _asked(opened, split, batch_size)])
        file, compared = opened.home / "metrics.json", None
        stored = stored_json(file)
        if stored is not None and stored["best_epoch"] == opened.tree["epoch"] and split in stored:
            same = stored[split] == metrics and (split != "test" or stored["predictions"] == predictions)
            compared = (file, same)
        return Evaluation(
            metrics,
            counts={"sequences": len(data.sequences[split])},
            more={"predictions": predictions},
            device=str(opened.trainer.device),
            tables=[report.predictions_table(predictions, split)],
            compared=compared,
        )

    def predict(self, opened: AstroOpened, split: str, *, batch_size: int | None, **options: Any) -> Predictions:
        """Return the true values of each prediction task, with the predictions of the model and of ridge regression."""
        arrays: dict[str, Any] = {}
        for result in _asked(opened, split, batch_size):
            name = question_name(result.question.target, result.question.given)
            arrays[f"{name}, true"] = result.true
            arrays.update({f"{name}, {method}": result.predicted[method] for method in ("model", "ridge")})
        return Predictions(arrays)


def _asked(opened: AstroOpened, split: str, batch_size: int | None) -> list[CrossResult]:
    data = opened.data
    return cross_predict(
        opened.trainer.model, data.tokenizers, data.train, split_of(data, split),
        scalars_last=opened.run.config.scalars_last > 0, batch_size=batch_size or _BATCH,
    )  # fmt: skip


def _status(trainer: AstroTrainer) -> str:
    if not trainer.history:
        return ""
    losses = [record["val_loss_total"] for record in trainer.history]
    return f"val {losses[-1]:.3f} (best {min(losses):.3f})"


PACK = AstroPack()
