"""What the model of a finished ``treadle train astro`` says about objects: one modality from others."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.astro.cross_modal import cross_predict
from treadle.checkpoint.store import load_weights
from treadle.cli.astro_data import TOKENIZERS, prepare_data
from treadle.cli.astro_pictures import question_name
from treadle.cli.astro_run import AstroRun, build_trainer
from treadle.cli.evaluate import part_of, run_folder_of
from treadle.cli.replay_astro import stored_config
from treadle.cli.start_block import cpu_threads
from treadle.device import get_device
from treadle.naming import load_model_state


def predict_astro(
    path: Path, tree: Mapping[str, Any], *, split: str, batch_size: int | None, device: str | None, **console: Any
) -> Any:
    """Returns, for each question, the true numbers and what the model and a ridge regression say.

    Raises:
        ConfigError: there is no such split, or the folder is none of such a run.
    """
    run = run_folder_of(path)
    config = stored_config(run)
    arrays: dict[str, Any] = {}
    with cpu_threads(config.threads), tempfile.TemporaryDirectory(prefix="treadle-predict-") as scratch:
        data = prepare_data(config, run / TOKENIZERS)
        trainer = build_trainer(AstroRun(config, Path(scratch), get_device(device), console["messages"]), data)
        load_model_state(trainer.model, load_weights(path))
        objects = part_of(data, split)
        for result in cross_predict(
            trainer.model, data.tokenizers, data.train, objects, scalars_last=config.scalars_last > 0,
            batch_size=batch_size or 256,
        ):  # fmt: skip
            name = question_name(result.question.target, result.question.given)
            arrays[f"{name}, true"] = result.true
            arrays.update({f"{name}, {method}": result.predicted[method] for method in ("model", "ridge")})
    return arrays
