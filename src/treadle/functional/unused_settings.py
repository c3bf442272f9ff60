"""Check of config values decided elsewhere, such as the batch size, against the actual ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from treadle import distributed
from treadle.functional.settings import UNUSED, config_of

_log = logging.getLogger("treadle.functional")


def read_unused_settings(config: Any) -> dict[str, Any]:
    """Return a config's values for epochs, batch size and seed by dotted name, from any part.

    Example:
        >>> read_unused_settings({"training": {"batch_size": 8}, "seed": 1})
        {'config.seed': 1, 'config.training.batch_size': 8}
    """
    whole = config_of(config)
    found = {f"config.{name}": value for name in UNUSED if _is_number(value := whole.value(name))}
    part = whole.part("training")
    values = {} if part is None else part.fields()
    return {**found, **{f"config.training.{name}": values[name] for name in UNUSED if _is_number(values.get(name))}}


def warn_of_unused_settings(
    unused: Mapping[str, Any],
    *,
    num_epochs: int,
    loaders: tuple[Iterable[Any], Any],
    accumulation: int,
) -> None:
    """Warn about each config value that differs from the actual one.

    Args:
        claims: result of :func:`read_unused_settings`.
        num_epochs: argument of ``train``.
        loaders: training and evaluation loaders.
        accumulation: micro-batches per step.
    """
    size = _batch_size(loaders[0])
    sizes = {} if size is None else {size * steps * ranks for steps in (1, accumulation)
                                     for ranks in (1, distributed.world_size())}  # fmt: skip
    samples, seed = _num_samples(loaders[1]), torch.initial_seed()
    for name, value in unused.items():
        kind, text = name.rpartition(".")[2], None
        if kind in ("num_epochs", "epochs") and value != num_epochs:
            text = f"train() was asked for {num_epochs} epochs, and trains these"
        elif kind == "batch_size" and sizes and value not in sizes:
            text = f"the loader has batch_size={size} and keeps it; build it with the config's"
        elif kind == "seed" and value != seed:
            text = f"torch was seeded with {seed}; call treadle.set_seed({value}) before the model is made"
        elif kind == "max_eval_samples" and samples is not None and samples > value:
            text = f"the evaluation's loader has {samples} samples and all count; shorten its data set to the config's"
        if text is not None:
            _log.warning("%s=%s: %s", name, value, text)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _batch_size(loader: Any) -> int | None:
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size: Any = getattr(owner, "batch_size", None)
        if _is_number(size):
            return int(size)
    return None


def _num_samples(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        return None
