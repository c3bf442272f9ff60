"""How a step of ``treadle train text`` or of its fine-tuning is run again, from what the run folder holds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from treadle.checkpoint.store import load_weights
from treadle.device import get_device
from treadle.distributed.state_names import load_model_state
from treadle.engine.observers import observing
from treadle.runs.folder import usable_config
from treadle.runs.replay import Replayed, Stage, Witness, checkpoints_of, run_to_step
from treadle.runs.settings import with_values
from treadle.runs.start_block import cpu_threads
from treadle.text.extras import without_progress_bars
from treadle.text.folder import BEST, home_of
from treadle.text.run_config import TextConfig
from treadle.text.run_data import TextData, check_same_text, prepare_data
from treadle.text.runs import TextRun, build_base, build_lora, fit


def replay_text(run: Path, step: int, *, device: str | None, debug: bool, messages: Console) -> Replayed:
    """Runs a step of ``treadle train text`` again; the folder is only read.

    Args:
        run: the run folder; its ``lora`` folder for a step of the fine-tuning.
        step: 1-based.
        device: None takes CUDA, then MPS, then the CPU.
        debug: stop inside the step.
        messages: where progress goes.

    Raises:
        ConfigError: the run was made on another text, or has no such step.
        CheckpointError: the base of the fine-tuning is missing or damaged.
    """
    home = home_of(run)
    with tempfile.TemporaryDirectory(prefix="treadle-replay-") as scratch, stored_text(home) as (config, data):
        witness = Witness(checkpoints_of(run), step, debug=debug)
        again = TextRun(config, data, Path(scratch), get_device(device), messages)
        model, trainer = build_base(again)
        train, val, epochs = data.train, data.val, config.epochs
        if run != home:
            load_model_state(model, load_weights(home / BEST))
            trainer = build_lora(model, again)
            train, val, epochs = data.lora_train, data.lora_val, config.lora.epochs
        with observing(Stage(witness, Path(scratch), only_mini=False)):
            run_to_step(lambda: fit(trainer, again, train=train, val=val, epochs=epochs, folder=again.out), witness)
    return witness.seen


@contextmanager
def stored_text(home: Path) -> Iterator[tuple[TextConfig, TextData]]:
    """Gives the settings in a run folder and the text they describe, with the threads that the run had.

    Raises:
        ConfigError: there are none, they are of another version, or the run was made on another text.
    """
    with usable_config(home) as stored:
        settings = {key: value for key, value in stored.items() if key not in ("face", "corpus")}
        config = with_values(TextConfig(), settings)
    with cpu_threads(config.threads), without_progress_bars():
        data = prepare_data(config)
        check_same_text(stored, data, folder=str(home))
        yield config, data
