"""How a step of ``treadle train spectra`` is run again, from what the run folder holds."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from treadle.device import get_device
from treadle.engine.observers import observing
from treadle.runs.folder import usable_config
from treadle.runs.replay import Replayed, Stage, Witness, checkpoints_of, run_to_step
from treadle.runs.settings import with_values
from treadle.runs.start_block import cpu_threads
from treadle.seed import set_seed
from treadle.spectra.run_config import SpectraConfig
from treadle.spectra.run_data import prepare_data
from treadle.spectra.runs import build_model, build_trainer


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
    with usable_config(run) as values:
        return with_values(SpectraConfig(), values)
