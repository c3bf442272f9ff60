"""How a step of a graph run is run again, from what its checkpoints say of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from treadle.checkpoint.store import find_latest
from treadle.device import get_device
from treadle.engine.observers import observing
from treadle.errors import ConfigError
from treadle.graphs.run_build import prepare_data
from treadle.graphs.runs import GraphRun, build, fit
from treadle.graphs.stored import config_of
from treadle.runs.replay import Replayed, Stage, Witness, checkpoints_of, run_to_step
from treadle.runs.start_block import cpu_threads


def replay_graphs(run: Path, step: int, *, device: str | None, debug: bool, messages: Console) -> Replayed:
    """Runs a step of a graph run again; the folder is only read.

    Raises:
        ConfigError: the folder is none of such a run, or the run has no such step.
        CheckpointError: no checkpoint is intact.
    """
    checkpoints = checkpoints_of(run)
    latest = find_latest([path for path in checkpoints.glob("*.pt") if path.name in ("best.pt", "last.pt")])
    if latest is None:
        raise ConfigError(f"has no checkpoint in {checkpoints}", argument="RUN", value=str(run))
    config, threads = config_of(*latest)
    witness = Witness(checkpoints, step, debug=debug)
    with tempfile.TemporaryDirectory(prefix="treadle-replay-") as scratch, cpu_threads(threads):
        data = prepare_data(config, messages)
        again = GraphRun(Path(scratch), device, resume=False, results=messages, messages=messages)
        with observing(Stage(witness, Path(scratch), only_mini=False)):
            trainer = build(config, again, data, get_device(device))
            run_to_step(lambda: fit(trainer, config, data), witness)
    return witness.seen
