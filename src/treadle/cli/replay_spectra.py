"""How a step of ``treadle train spectra`` is run again, from what the run folder holds."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

from rich.console import Console

from treadle.cli.replay_run import Replayed, Stage, Witness, checkpoints_of, run_to_step
from treadle.cli.spectra_config import DataConfig, ModelConfig, OptimizerConfig, ScheduleConfig, SpectraConfig
from treadle.cli.spectra_data import prepare_data
from treadle.cli.spectra_run import build_model, build_trainer
from treadle.cli.start_block import cpu_threads
from treadle.device import get_device
from treadle.errors import ConfigError
from treadle.observers import observing
from treadle.seed import set_seed
from treadle.spectra.config import TrainerConfig


def replay_spectra(run: Path, step: int, *, device: str | None, debug: bool, messages: Console) -> Replayed:
    """Runs a step of ``treadle train spectra`` again from what its folder holds; the folder is only read.

    Raises:
        ConfigError: the folder is none of such a run, or the run has no such step.
    """
    config = stored_config(run)
    witness = Witness(checkpoints_of(run), step, debug=debug)
    with tempfile.TemporaryDirectory(prefix="treadle-replay-") as scratch, cpu_threads(config.threads):
        data = prepare_data(config.data)
        set_seed(config.seed)
        model = build_model(config, data.x.shape[1])
        with observing(Stage(witness, Path(scratch), only_mini=False)):
            trainer = build_trainer(
                config, model, data, out=Path(scratch), device=get_device(device), resume=False, messages=messages
            )
            run_to_step(lambda: trainer.fit(config.epochs), witness)
    return witness.seen


def stored_config(run: Path) -> SpectraConfig:
    """Returns the settings in a run folder.

    Raises:
        ConfigError: there are none, or they are of another version.
    """
    path = run / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        sections = {
            "data": DataConfig, "model": ModelConfig, "optimizer": OptimizerConfig, "schedule": ScheduleConfig,
            "trainer": TrainerConfig,
        }  # fmt: skip
        made = {name: kind(**values.pop(name)) for name, kind in sections.items()}
        return dataclasses.replace(SpectraConfig(), **values, **made)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"RUN={str(run)!r}: {path.name} cannot be used ({type(error).__name__}: {error}); give the folder of a run "
            "of 'treadle train spectra', or your own script with --script"
        ) from error
