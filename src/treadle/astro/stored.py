"""What the model of a finished ``treadle train astro`` says about objects: losses, and one modality from others."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from treadle.astro.cross_modal import CrossResult, cross_predict
from treadle.astro.pictures import question_name
from treadle.astro.replay import stored_config
from treadle.astro.report import as_values
from treadle.astro.run_config import AstroRunConfig
from treadle.astro.run_data import TOKENIZERS, AstroData, prepare_data
from treadle.astro.runs import AstroRun, build_trainer
from treadle.astro.trainer import AstroTrainer
from treadle.checkpoint.store import load_weights
from treadle.device import get_device
from treadle.distributed.state_names import load_model_state
from treadle.hooks.files import to_json
from treadle.runs.folder import part_of, run_folder_of, stored_json
from treadle.runs.start_block import cpu_threads

_BATCH = 256


def evaluate_astro(
    path: Path,
    tree: Mapping[str, Any],
    *,
    split: str,
    batch_size: int | None,
    num_workers: int,
    device: str | None,
    messages: Console,
) -> dict[str, Any]:
    """Returns the losses of a split, and the scores of the report's questions about its objects.

    Args:
        path: the checkpoint.
        tree: what it holds.
        split: ``"train"``, with each sequence as often as it was trained on, ``"val"`` or ``"test"``.
        batch_size: None takes that of the training for the losses, and 256 objects for the questions.
        num_workers: processes that load batches.
        device: None takes CUDA, then MPS, then the CPU.
        messages: where progress goes.

    Raises:
        ConfigError: there is no such split, or the folder is none of such a run.
    """
    with _stored(path, device=device, messages=messages) as (config, data, trainer):
        training = dataclasses.replace(
            config.training, batch_size=batch_size or config.training.batch_size, num_workers=num_workers
        )
        metrics = to_json(trainer.evaluate(data.loader(split, dataclasses.replace(config, training=training))))
        results = _asked(config, data, trainer, split=split, batch_size=batch_size)
        predictions = to_json([as_values(result) for result in results])
    found = {
        "metrics": metrics,
        "predictions": predictions,
        "sequences": len(data.sequences[split]),
        "device": str(trainer.device),
    }
    stored = stored_json(run_folder_of(path) / "metrics.json")
    if stored is not None and stored["best_epoch"] == tree["epoch"] and split in stored:
        same = stored[split] == metrics and (split != "test" or stored["predictions"] == predictions)
        found["equal_to_metrics"] = same
    return found


def predict_astro(
    path: Path, tree: Mapping[str, Any], *, split: str, batch_size: int | None, device: str | None, messages: Console
) -> Any:
    """Returns, for each question, the true numbers and what the model and a ridge regression say.

    Raises:
        ConfigError: there is no such split, or the folder is none of such a run.
    """
    arrays: dict[str, Any] = {}
    with _stored(path, device=device, messages=messages) as (config, data, trainer):
        for result in _asked(config, data, trainer, split=split, batch_size=batch_size):
            name = question_name(result.question.target, result.question.given)
            arrays[f"{name}, true"] = result.true
            arrays.update({f"{name}, {method}": result.predicted[method] for method in ("model", "ridge")})
    return arrays


def _asked(
    config: AstroRunConfig, data: AstroData, trainer: AstroTrainer, *, split: str, batch_size: int | None
) -> list[CrossResult]:
    return cross_predict(
        trainer.model, data.tokenizers, data.train, part_of(data, split), scalars_last=config.scalars_last > 0,
        batch_size=batch_size or _BATCH,
    )  # fmt: skip


@contextmanager
def _stored(
    path: Path, *, device: str | None, messages: Console
) -> Iterator[tuple[AstroRunConfig, AstroData, AstroTrainer]]:
    """Gives settings, data and a trainer with the weights of a checkpoint, with the threads that the run had."""
    run = run_folder_of(path)
    config = stored_config(run)
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, parallel=None))
    with cpu_threads(config.threads), tempfile.TemporaryDirectory(prefix="treadle-stored-") as scratch:
        data = prepare_data(config, run / TOKENIZERS)
        trainer = build_trainer(AstroRun(config, Path(scratch), get_device(device), messages), data)
        load_model_state(trainer.model, load_weights(path))
        yield config, data, trainer
