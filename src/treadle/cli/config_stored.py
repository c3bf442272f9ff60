"""What the model of a finished run of a configuration file says: metrics, and what its ``predict_step`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.builder import build_trainer
from treadle.checkpoint.store import load_weights
from treadle.distributed.state_names import load_model_state
from treadle.engine.evaluation import for_each_batch
from treadle.engine.predictions import joined, kept_outputs
from treadle.errors import ConfigError
from treadle.faces.step import BaseTrainer
from treadle.runs.folder import run_folder_of
from treadle.runs.record import recorded_config


def predict_config(path: Path, tree: Mapping[str, Any], *, device: str | None, **options: Any) -> Any:
    """Returns what ``predict_step(input)`` gives for each batch of ``build_predict_data_loader()``, joined, by name.

    Raises:
        ConfigError: the trainer lacks one of them, or the run has no record of its configuration.
    """
    _refuse_size(options["batch_size"])
    trainer = _stored(path, tree, device, needed=("predict_step", "build_predict_data_loader"))
    outputs: list[Any] = []
    for_each_batch(
        trainer.model, trainer.build_predict_data_loader(),
        lambda batch: outputs.append(kept_outputs(trainer.predict_step(batch))),
        precision=trainer.precision, eval_seed=trainer.eval_seed,
    )  # fmt: skip
    found = joined(outputs)
    named = found if isinstance(found, dict) else {"prediction": found}
    return {
        name: value.float().numpy() if value.is_floating_point() else value.numpy() for name, value in named.items()
    }


def evaluate_config(path: Path, tree: Mapping[str, Any], *, device: str | None, **options: Any) -> Any:
    """Returns the means over ``build_eval_data_loader()``.

    Raises:
        ConfigError: the trainer has no such method, or the run has no record of its configuration.
    """
    _refuse_size(options["batch_size"])
    trainer = _stored(path, tree, device, needed=("build_eval_data_loader",))
    return {"metrics": trainer.evaluate(trainer.build_eval_data_loader())}


def _refuse_size(batch_size: int | None) -> None:
    if batch_size is not None:
        raise ConfigError(
            f"--batch-size {batch_size}: the batches are those of the trainer's own data loader; set it there"
        )


def _stored(path: Path, tree: Mapping[str, Any], device: str | None, *, needed: tuple[str, ...]) -> Any:
    """Builds the trainer of a run again, with the weights that count in its model; nothing of the run is touched."""
    run = run_folder_of(path)
    found = recorded_config(run, int(tree["global_step"]))
    if found is None:
        raise ConfigError(
            f"has no run.json, which `treadle train FILE` writes; load the weights into your own "
            f"model with treadle.load_weights({path.name!r})",
            argument="RUN",
            value=str(run),
        )
    config, folder = found
    if device is not None:
        config["trainer"]["device"] = device
    trainer = build_trainer(config, folder=folder)
    missing = [name for name in needed if not hasattr(trainer, name)]
    if missing or not isinstance(trainer, BaseTrainer):
        lacks = " and ".join(f"{name}()" for name in missing) or "build_model()"
        raise ConfigError(
            f"{type(trainer).__name__}: has no {lacks}; add it to the trainer, which is built again for this"
        )
    trainer.workspace = None
    trainer.prepare()
    load_model_state(trainer.unwrapped_model, load_weights(path))
    return trainer
