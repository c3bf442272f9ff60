"""The setting ``trackers``: tracking services by name, or user-defined trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Union

from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError, nearest
from treadle.hooks.csv import CsvHook
from treadle.hooks.jsonl import JsonlHook
from treadle.hooks.logging import LoggingHook
from treadle.hooks.mlflow import MlflowHook
from treadle.hooks.own_tracker import OwnTrackerHook, Tracker
from treadle.hooks.tensorboard import TensorBoardHook
from treadle.hooks.tracking import epoch_records
from treadle.hooks.trackio import TrackioHook
from treadle.hooks.validate import check_hooks
from treadle.hooks.wandb import WandbHook

if TYPE_CHECKING:
    from treadle.engine import Engine

TrackerChoice = Union[str, BaseHook, Tracker]  # noqa: UP007  (a type alias, also on Python 3.10 with a protocol in it)
_INTERVAL = 10
_NAMED: dict[str, Callable[[], BaseHook]] = {
    "csv": CsvHook,
    "jsonl": JsonlHook,
    "mlflow": MlflowHook,
    "tensorboard": TensorBoardHook,
    "trackio": TrackioHook,
    "wandb": WandbHook,
}


def with_trackers(hooks: Sequence[BaseHook], trackers: str | Sequence[TrackerChoice]) -> list[BaseHook]:
    """Return hooks with tracker hooks appended; every front end takes these as ``trackers=``.

    Steps are logged as means over 10 steps, or by a LoggingHook among ``hooks``; epochs as their records, under
    ``epoch/...``. Settings are sent when the run starts, final metrics when it ends.

    Args:
        hooks: hooks of the run.
        trackers: each is ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, ``"trackio"``, ``"jsonl"``, ``"csv"``, the
            corresponding hook for further arguments, or an object with the methods of :class:`treadle.hooks.Tracker`. A
            string names one, or several separated by commas.

    Raises:
        ConfigError: a tracker is unknown, or ``hooks`` is not a list of hooks.

    Example:
        >>> [hook.state_key for hook in with_trackers([], "tensorboard,jsonl")]
        ['LoggingHook', 'EpochRecordsHook', 'TensorBoardHook', 'JsonlHook']
    """
    given = check_hooks(hooks)
    chosen = [_hook(tracker) for tracker in _listed(trackers)]
    if not chosen:
        return given
    logging = [] if any(isinstance(hook, LoggingHook) for hook in given) else [LoggingHook(_INTERVAL)]
    return [*given, *logging, EpochRecordsHook(), *chosen]


def _listed(trackers: str | Sequence[TrackerChoice]) -> list[TrackerChoice]:
    if isinstance(trackers, str):
        return [name.strip() for name in trackers.split(",") if name.strip()]
    if not isinstance(trackers, Sequence):
        raise ConfigError("must be a list, such as ['tensorboard']", argument="trackers", value=trackers)
    return list(trackers)


def _hook(tracker: TrackerChoice) -> BaseHook:
    if isinstance(tracker, BaseHook):
        return tracker
    if isinstance(tracker, str):
        if tracker not in _NAMED:
            raise ConfigError(f"there is no tracker {tracker!r}; {nearest(tracker, _NAMED)}", argument="trackers")
        return _NAMED[tracker]()
    if isinstance(tracker, Tracker):
        return OwnTrackerHook(tracker)
    missing = [name for name in ("start", "log", "finish") if not hasattr(tracker, name)]
    raise ConfigError(
        f"{type(tracker).__name__} is neither a name nor a hook, and has no method {', '.join(missing)}; see "
        "treadle.hooks.Tracker",
        argument="trackers",
    )


class EpochRecordsHook(BaseHook):
    """Hook that logs each epoch's record as ``epoch/...`` for trackers; nothing in step-based runs."""

    def on_after_epoch(self, trainer: Engine) -> None:
        """Log the numbers in the last record."""
        for record in epoch_records(trainer)[-1:]:
            trainer.log({"epoch": {key: value for key, value in record.items() if isinstance(value, (int, float))}})
