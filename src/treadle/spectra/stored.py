"""What the model of a finished ``treadle train spectra`` says: its loss on a split, and latents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from treadle.checkpoint.store import load_weights
from treadle.distributed.state_names import load_model_state
from treadle.runs.folder import part_of, run_folder_of
from treadle.runs.start_block import cpu_threads
from treadle.spectra.inference import Extractor, ExtractorConfig, Tester, TesterConfig
from treadle.spectra.replay import stored_config
from treadle.spectra.run_config import SpectraConfig
from treadle.spectra.run_data import SpectraData, prepare_data
from treadle.spectra.runs import build_model

_BATCH = 256


def predict_spectra(path: Path, tree: Mapping[str, Any], *, split: str, batch_size: int | None, **where: Any) -> Any:
    """Returns the latents of a split, and of each its row in the data set.

    Raises:
        ConfigError: there is no such split, or the folder is none of such a run.
    """
    config, data, model = _stored(path)
    rows = part_of(data, split)
    cfg = ExtractorConfig(
        device=where["device"], amp=config.trainer.amp, amp_dtype=config.trainer.amp_dtype, return_numpy=True
    )
    with cpu_threads(config.threads):
        latent = Extractor(model, cfg)(data.loader(rows, batch_size or _BATCH))
    return {"latent": np.asarray(latent), "row": np.asarray(rows)}


def evaluate_spectra(path: Path, tree: Mapping[str, Any], *, split: str, batch_size: int | None, **where: Any) -> Any:
    """Returns the loss of a split under the masks of every evaluation, and how many spectra it is of.

    Raises:
        ConfigError: there is no such split, or the folder is none of such a run.
    """
    config, data, model = _stored(path)
    rows, trainer = part_of(data, split), config.trainer
    cfg = TesterConfig(
        device=where["device"], amp=trainer.amp, amp_dtype=trainer.amp_dtype, loss_type=trainer.loss_type,
        reduction=trainer.reduction, log_history=False, eval_seed=trainer.eval_seed,
    )  # fmt: skip
    with cpu_threads(config.threads):
        loss = Tester(model, cfg)(data.loader(rows, batch_size or _BATCH))
    return {"metrics": {"loss": loss}, "spectra": len(rows)}


def _stored(path: Path) -> tuple[SpectraConfig, SpectraData, nn.Module]:
    config = stored_config(run_folder_of(path))
    data = prepare_data(config.data)
    model = build_model(config, data.x.shape[1])
    load_model_state(model, load_weights(path))
    return config, data, model
