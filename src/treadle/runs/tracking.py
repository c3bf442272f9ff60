"""The option ``--trackers`` of the training commands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.engine import Engine
    from treadle.hooks.tracking import TrackerHook


class Tracking:
    """Trackers attached to every engine of a command, whose runs end with the command's final metrics.

    Args:
        trackers: comma-separated names.
        config: returns the settings sent with the runs; called once there is an engine.

    Example:
        >>> Tracking("jsonl", dict).open
        []
    """

    def __init__(self, trackers: str, config: Callable[[], Mapping[str, Any]]):
        self.trackers = trackers
        self.config = config
        self.metrics: Mapping[str, Any] = {}
        self.open: list[tuple[Engine, TrackerHook]] = []

    def final(self, metrics: Mapping[str, Any] | None) -> None:
        """Record the metrics that the command measured after training, without its copy of the settings."""
        self.metrics = {key: value for key, value in (metrics or {}).items() if key != "config"}

    def before_building(self, engine: Engine) -> None:
        """Do nothing."""

    def before_running(self, engine: Engine) -> None:
        """Append the trackers to the hooks."""
        from treadle.hooks.trackers import with_trackers
        from treadle.hooks.tracking import TrackerHook

        given = len(engine.hooks)
        engine.hooks = with_trackers(engine.hooks, self.trackers)
        for hook in engine.hooks[given:]:
            if isinstance(hook, TrackerHook):
                hook.config, hook.held = dict(self.config()), True
                self.open.append((engine, hook))

    def release(self, error: BaseException | None) -> None:
        """End the open runs."""
        for engine, hook in self.open:
            hook.release(engine, self.metrics, error)


@contextlib.contextmanager
def tracked(trackers: str | None, config: Callable[[], Mapping[str, Any]]) -> Iterator[Tracking]:
    """Track every run started inside the block.

    Args:
        trackers: comma-separated names, as for ``--trackers``; None for none.
        config: returns the settings sent with the runs.

    Raises:
        ConfigError: there is no tracker of that name.

    Example:
        >>> with tracked(None, dict) as tracking:
        ...     tracking.final({"test_loss": 0.5})
    """
    from treadle.engine.observers import observing
    from treadle.hooks.trackers import with_trackers

    tracking = Tracking(trackers or "", config)
    with_trackers([], tracking.trackers)  # an unknown name is rejected before any work
    failure: BaseException | None = None
    try:
        with observing(tracking):
            yield tracking
    except BaseException as error:
        failure = error
        raise
    finally:
        tracking.release(failure)
