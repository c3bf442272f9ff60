"""How a step of ``treadle train astro`` is run again, from what the run folder holds."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from treadle.astro.run_config import AstroRunConfig
from treadle.astro.run_data import TOKENIZERS, prepare_data
from treadle.astro.runs import AstroRun, build_trainer, fit
from treadle.device import get_device
from treadle.engine.observers import observing
from treadle.runs.folder import usable_config
from treadle.runs.replay import Replayed, Stage, Witness, checkpoints_of, run_to_step
from treadle.runs.settings import with_values
from treadle.runs.start_block import cpu_threads


def replay_astro(run: Path, step: int, *, device: str | None, debug: bool, messages: Console) -> Replayed:
    """Runs a step of ``treadle train astro`` again; the folder is only read.

    Raises:
        ConfigError: the folder is none of such a run, or the run has no such step.
    """
    config = stored_config(run)
    witness = Witness(checkpoints_of(run), step, debug=debug)
    with tempfile.TemporaryDirectory(prefix="treadle-replay-") as scratch, cpu_threads(config.threads):
        data = prepare_data(config, run / TOKENIZERS)
        again = AstroRun(config, Path(scratch), get_device(device), messages)
        with observing(Stage(witness, Path(scratch), only_mini=False)):
            trainer = build_trainer(again, data)
            run_to_step(lambda: fit(trainer, config, data), witness)
    return witness.seen


def stored_config(run: Path) -> AstroRunConfig:
    """Returns the settings in a run folder.

    Raises:
        ConfigError: there are none, or they are of another version.
    """
    with usable_config(run) as values:
        del values["face"]
        return with_values(AstroRunConfig(), values)
