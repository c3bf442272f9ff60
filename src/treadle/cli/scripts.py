"""Implementation of ``scripts/train.py`` and ``scripts/evaluate.py``, given the configuration composed by Hydra."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console, show_report
from treadle.cli.settings_command import warn_of_repeats
from treadle.config.grammar import parse
from treadle.errors import ConfigError, refuse_unknown
from treadle.runs.launch import refuse_ranks

_OF_TRAIN = ("device", "log_dir", "experiment_name", "resume", "checkpoint")
_WITHOUT_SECTION = ("seed", "deterministic", "threads", "log_every")
_OF_EVALUATE = ("checkpoint", "split", "batch_size", "num_workers", "device")


def for_hydra(texts: Sequence[str]) -> list[str]:
    """Convert arguments of the script for Hydra, which writes ``+key=value`` as ``++key`` if the key may exist already.

    Example:
        >>> for_hydra(["+training.epochs=3", "+dataset=mine", "-m"])
        ['++training.epochs=3', '+dataset=mine', '-m']
    """
    known = (*_OF_TRAIN, *_WITHOUT_SECTION)
    return [f"+{text}" if _added(text, known) else text for text in texts]


def _added(text: str, known: Sequence[str]) -> bool:
    key = text.partition("=")[0]
    return key.startswith("+") and not key.startswith("++") and "@" not in key and ("." in key or key[1:] in known)


def train(cfg: Any) -> float | None:
    """Train a configuration in the folder that Hydra assigns to the run.

    Returns:
        The best validation metric, which a Hydra sweeper may optimize.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from treadle.engine.observers import observing
    from treadle.graphs.run_config import GraphsConfig
    from treadle.graphs.runs import PACK
    from treadle.runs.pack import Run
    from treadle.runs.ranks import device_of_rank
    from treadle.runs.record_hooks import SessionKeeper

    messages = message_console()
    with errors_as_one_line(messages), log_to(messages), observing(SessionKeeper()):
        refuse_ranks("scripts/train.py", instead="treadle train graphs")
        hydra = HydraConfig.get()
        warn_of_repeats(hydra.overrides.task)
        values, options = _settings(hydra)
        if not isinstance(options["resume"], bool):
            raise ConfigError("must be true or false", argument="resume", value=options["resume"])
        run = Run(
            GraphsConfig.from_values(values),
            _short(Path(hydra.runtime.output_dir)),
            device_of_rank(_text(options["device"])),
            messages,
            resume=options["resume"],
            explicit=options["device"] is not None,
            weights=None if options["checkpoint"] is None else Path(options["checkpoint"]),
            given=list(hydra.overrides.task),
        )
        if run.resume and hydra.mode is RunMode.MULTIRUN and PACK.holds_another(run):
            messages.print(f"{run.out}: holds a run of another sweep, now moved aside", style="yellow", markup=False)
            run = dataclasses.replace(run, resume=False)
        metrics = PACK.run(run, show_report)
    best: float | None = None if metrics is None else metrics["best_val_metric"]
    return best


def _settings(hydra: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a run and the options of the script.

    Hydra composes the groups; strings ``key=value`` are parsed as by every command, where ``off`` is not a string.
    """
    from hydra import compose
    from omegaconf import OmegaConf

    from treadle.graphs.run_config import with_assignments

    texts = list(hydra.overrides.task)
    of_hydra = [text for text in texts if _is_of_hydra(text, hydra.runtime.choices)]
    # Interpolations are resolved last, since they may refer to values set on the command line.
    values = _plain(compose(hydra.job.config_name, overrides=of_hydra), resolve=False)
    options = {key: values.pop(key, None) for key in _OF_TRAIN}
    settings = []
    for text in texts:
        if text not in of_hydra:
            found = parse(text)
            if found.key in options:
                options[found.key] = found.value
            else:
                settings.append(found)
    whole = _plain(OmegaConf.create({**with_assignments(values, settings), **options}))
    return whole, {key: whole.pop(key) for key in options}


def _is_of_hydra(text: str, groups: Mapping[str, Any]) -> bool:
    """Return whether an argument selects from a group or deletes a key."""
    key = text.lstrip("+").partition("=")[0]
    return text.startswith("~") or "@" in key or key in groups


def evaluate(cfg: Any) -> None:
    """Evaluate the checkpoint that a configuration names."""
    from hydra.core.hydra_config import HydraConfig

    from treadle.cli.evaluate import evaluate_checkpoint

    messages = message_console()
    with errors_as_one_line(messages), log_to(messages):
        options = _plain(cfg)
        given = [parse(text) for text in HydraConfig.get().overrides.task if not _is_of_hydra(text, {})]
        options |= {found.key: found.value for found in given if found.key in options}
        refuse_unknown("evaluate: model, data and encodings are those of the checkpoint", options, _OF_EVALUATE)
        checkpoint = options["checkpoint"]
        if checkpoint is None:
            raise ConfigError(
                "is missing; give checkpoint=logs/experiment/checkpoints/best.pt or the like", argument="checkpoint"
            )
        options["device"] = _text(options["device"])
        del options["checkpoint"]
        evaluate_checkpoint(Path(str(checkpoint)), **options, results=result_console(), messages=messages)


def _plain(cfg: Any, *, resolve: bool = True) -> dict[str, Any]:
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(cfg, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _short(path: Path) -> Path:
    """Return a path below the working directory as a relative path."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
