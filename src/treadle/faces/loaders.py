"""Checks of an epoch-based trainer's loaders before the first step, and names of the results over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeAlias

from torch.utils.data import DataLoader

from treadle import distributed
from treadle.data.sources import refuse_dataset
from treadle.engine.best import Mode, resolve_mode
from treadle.errors import ConfigError

EvalLoaders: TypeAlias = Iterable[Any] | Mapping[str, Iterable[Any]]
"""Batches to evaluate, or several such by name."""


def check_loader(loader: Any, argument: str) -> None:
    """Raise ConfigError for a data set or a list of loaders in place of a loader.

    Args:
        loader: the user's argument.
        argument: name of the argument.
    """
    refuse_dataset(loader, argument)
    if isinstance(loader, (str, bytes)) or (loader is None and argument.startswith("train")):
        raise ConfigError("must be a DataLoader or another iterable of batches", argument=argument, value=loader)
    if isinstance(loader, (list, tuple)) and any(isinstance(one, DataLoader) for one in loader):
        raise ConfigError(
            "is a list of loaders, each of which would be taken for a batch; pass several for evaluation as a dict "
            "of names and loaders, and join training data sets with ConcatDataset",
            argument=argument,
        )


def check_batches(loader: Any, argument: str) -> None:
    """Raise ConfigError for what is not one loader.

    Example:
        >>> check_batches([[0.5, 1.5]], "loader")
    """
    if isinstance(loader, Mapping):
        raise ConfigError("is a dict of loaders; pass a single one", argument=argument)
    if loader is None:
        raise ConfigError("must be a DataLoader or another iterable of batches", argument=argument, value=None)
    check_loader(loader, argument)


def check_eval_loaders(loaders: EvalLoaders | None, argument: str) -> None:
    """Raise ConfigError for a loader, or one of a dict, that cannot be evaluated, and for an empty dict.

    Args:
        loaders: the user's argument.
        argument: name of the argument.
    """
    if not isinstance(loaders, Mapping):
        _check_eval_loader(loaders, argument)
        return
    for name, loader in loaders.items():
        _check_eval_loader(loader, f"{argument}[{name!r}]")
    if not loaders or not all(isinstance(name, str) and name for name in loaders):
        raise ConfigError(
            "a dict of loaders must have at least one, with non-empty strings as names", argument=argument
        )


def require_equal_on_ranks(**arguments: Any) -> None:
    """Raise ConfigError on all ranks for an argument that differs between them, where they would wait for one another.

    Example:
        >>> require_equal_on_ranks(epochs=3, evaluation_loader="given")
    """
    given = distributed.gather_objects(arguments)
    for name, value in given[0].items():
        for rank, other in enumerate(given):
            if other[name] != value:
                raise ConfigError(
                    f"it is {value} on rank 0 and {other[name]} on rank {rank}, and must be the same on all ranks, "
                    "which train and evaluate together",
                    argument=name,
                )


def refuse_used_up(loaders: EvalLoaders | None, argument: str, *, times: int) -> None:
    """Raise ConfigError for an iterator, which can be read only once, if it would be read several times.

    Args:
        loaders: the user's argument.
        argument: name of the argument.
        times: number of times it will be read.
    """
    named = loaders.values() if isinstance(loaders, Mapping) else [loaders]
    if times > 1 and any(isinstance(loader, Iterator) for loader in named):
        raise ConfigError(
            f"a generator or other iterator can be read only once, but would be read {times} times; pass a list or a "
            "DataLoader",
            argument=argument,
        )


def _check_eval_loader(loader: Any, argument: str) -> None:
    check_loader(loader, argument)
    if isinstance(loader, Sized):
        try:
            length = len(loader)
        except TypeError:  # a DataLoader over a stream
            return
        if length == 0:
            raise ConfigError("it is empty, so there is nothing to average; pass None", argument=argument)


def results_by_name(results: Iterable[str], loaders: EvalLoaders | None) -> list[str]:
    """Return the names of results in an evaluation: unchanged, or prefixed with the name of each loader of a dict.

    Args:
        results: names of the results over one loader.
        loaders: loaders to evaluate; None has no results.

    Example:
        >>> results_by_name(["loss", "mae"], {"near": [], "far": []})
        ['near_loss', 'near_mae', 'far_loss', 'far_mae']
    """
    names = list(results)
    if isinstance(loaders, Mapping):
        return [f"{name}_{result}" for name in loaders for result in names]
    return [] if loaders is None else names


def selected_by(metric: str, loaders: EvalLoaders | None) -> str:
    """Return the result that a metric refers to; without a loader's name, that of the first loader of a dict.

    Example:
        >>> selected_by("loss", {"near": [], "far": []}), selected_by("far_loss", {"near": [], "far": []})
        ('near_loss', 'far_loss')
    """
    if not isinstance(loaders, Mapping) or any(metric.startswith(f"{name}_") for name in loaders):
        return metric
    return f"{next(iter(loaders))}_{metric}"


def without_loader_name(metric: str, loaders: EvalLoaders | None) -> str:
    """Return a metric without the name of its loader.

    Example:
        >>> without_loader_name("far_mae", {"near": [], "far": []}), without_loader_name("mae", None)
        ('mae', 'mae')
    """
    names = loaders if isinstance(loaders, Mapping) else ()
    return next((metric.removeprefix(f"{name}_") for name in names if metric.startswith(f"{name}_")), metric)


def mode_of_metric(metric: str, loaders: EvalLoaders | None) -> Mode | None:
    """Return the direction that a metric's name implies, ignoring the name of its loader.

    None if there is no dict of loaders or the name implies no direction: then the rule decides by the whole name.

    Example:
        >>> mode_of_metric("far_accuracy", {"near": [], "far": []}), mode_of_metric("far_score", {"far": []})
        ('max', None)
    """
    if not isinstance(loaders, Mapping):
        return None
    try:
        return resolve_mode(without_loader_name(metric, loaders))
    except ConfigError:
        return None
