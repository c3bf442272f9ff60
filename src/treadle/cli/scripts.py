"""What ``scripts/train.py`` and ``scripts/evaluate.py`` do with the configuration that Hydra composed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.errors import ConfigError, refuse_unknown
from treadle.runs.launch import refuse_ranks

_OF_TRAIN = ("device", "log_dir", "experiment_name", "resume", "checkpoint")
_OF_EVALUATE = ("checkpoint", "split", "batch_size", "num_workers", "device")


def train(cfg: Any) -> float | None:
    """Trains by a configuration, in the folder that Hydra gives the run.

    Returns:
        The best validation metric, which a sweeper of Hydra may look for.
    """
    from hydra.core.hydra_config import HydraConfig

    from treadle.engine.observers import observing
    from treadle.graphs.run_config import GraphsConfig
    from treadle.graphs.runs import GraphRun, train_graphs
    from treadle.runs.record_hooks import SessionKeeper

    messages = message_console()
    with errors_as_one_line(messages), log_to(messages), observing(SessionKeeper()):
        refuse_ranks("scripts/train.py", instead="treadle train graphs")
        values = _plain(cfg)
        options = {key: values.pop(key, None) for key in _OF_TRAIN}
        if not isinstance(options["resume"], bool):
            raise ConfigError(f"resume={options['resume']!r}: must be true or false")
        hydra = HydraConfig.get()
        run = GraphRun(
            out=_short(Path(hydra.runtime.output_dir)),
            device=_text(options["device"]),
            resume=options["resume"],
            results=result_console(),
            messages=messages,
            checkpoint=None if options["checkpoint"] is None else Path(options["checkpoint"]),
            given=list(hydra.overrides.task),
        )
        metrics = train_graphs(GraphsConfig.from_values(values), run)
    best: float | None = None if metrics is None else metrics["best_val_metric"]
    return best


def evaluate(cfg: Any) -> None:
    """Evaluates the checkpoint that a configuration names."""
    from treadle.cli.evaluate import evaluate_checkpoint

    messages = message_console()
    with errors_as_one_line(messages), log_to(messages):
        options = _plain(cfg)
        refuse_unknown("evaluate: model, data and encodings are those of the checkpoint", options, _OF_EVALUATE)
        checkpoint = options["checkpoint"]
        if checkpoint is None:
            raise ConfigError("checkpoint: is missing; give checkpoint=logs/experiment/checkpoints/best.pt or the like")
        options["device"] = _text(options["device"])
        del options["checkpoint"]
        evaluate_checkpoint(Path(str(checkpoint)), **options, results=result_console(), messages=messages)


def _plain(cfg: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _short(path: Path) -> Path:
    """Returns a path below the working folder as a relative one, as the user thinks of it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
