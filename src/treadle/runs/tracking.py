"""The option ``--trackers`` of the commands that train: their runs are followed as those of a script are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.engine import Engine
    from treadle.hooks.tracking import TrackerHook


class Tracking:
    """Trackers of every engine of a command, whose runs end with what the command measured last.

    Args:
        trackers: names with commas between.
        config: returns the settings that go with the runs; called once there is an engine.

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
        """Name what the command measured after the training; its copy of the settings is left out."""
        self.metrics = {key: value for key, value in (metrics or {}).items() if key != "config"}

    def before_building(self, engine: Engine) -> None:
        """Leave everything as it is."""

    def before_running(self, engine: Engine) -> None:
        """Add the trackers behind the hooks that are there."""
        from treadle.hooks.trackers import with_trackers
        from treadle.hooks.tracking import TrackerHook

        given = len(engine.hooks)
        engine.hooks = with_trackers(engine.hooks, self.trackers)
        for hook in engine.hooks[given:]:
            if isinstance(hook, TrackerHook):
                hook.config, hook.held = dict(self.config()), True
                self.open.append((engine, hook))

    def release(self, error: BaseException | None) -> None:
        """End the runs that are open."""
        for engine, hook in self.open:
            hook.release(engine, self.metrics, error)


@contextlib.contextmanager
def tracked(trackers: str | None, config: Callable[[], Mapping[str, Any]]) -> Iterator[Tracking]:
    """Follow every run that begins inside the block.

    Args:
        trackers: names with commas between, as ``--trackers`` takes them; None for none.
        config: returns the settings that go with the runs.

    Raises:
        ConfigError: there is no tracker of that name.

    Example:
        >>> with tracked(None, dict) as tracking:
        ...     tracking.final({"test_loss": 0.5})
    """
    from treadle.engine.observers import observing
    from treadle.hooks.trackers import with_trackers

    tracking = Tracking(trackers or "", config)
    with_trackers([], tracking.trackers)  # a wrong name is refused before any work
    failure: BaseException | None = None
    try:
        with observing(tracking):
            yield tracking
    except BaseException as error:
        failure = error
        raise
    finally:
        tracking.release(failure)
