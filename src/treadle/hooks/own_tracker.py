"""User-defined trackers: an interface of three methods, and the hook that calls them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from treadle.hooks.tracking import TrackerHook

if TYPE_CHECKING:
    from treadle.engine import Engine


@runtime_checkable
class Tracker(Protocol):
    """Interface of objects in ``trackers=[...]``; called on rank 0 only.

    An exception in any method is logged once as a warning, and training continues.

    Example:
        >>> class Lines:
        ...     def start(self, config, workspace, step):
        ...         self.lines = []
        ...     def log(self, values, step):
        ...         self.lines.append((step, values))
        ...     def finish(self, final, error):
        ...         self.lines.append(("end", final))
        >>> isinstance(Lines(), Tracker)
        True
    """

    def start(self, config: dict[str, Any], workspace: Path | None, step: int) -> None:
        """Called when training starts.

        Args:
            config: settings of the run as nested plain values.
            workspace: the run folder, if there is one.
            step: 0, or the step that a run resumes from; later points will be logged again.
        """

    def log(self, values: dict[str, Any], step: int) -> None:
        """Called at every log point.

        Args:
            values: numbers (and strings, if the run logs any) under ``a/b`` keys.
            step: optimizer steps attempted.
        """

    def finish(self, final: dict[str, float], error: BaseException | None) -> None:
        """Called at the end.

        Args:
            final: the final metrics under ``final/...``; empty after an error.
            error: the error that ended training, or None.
        """


class OwnTrackerHook(TrackerHook):
    """Hook that passes log points to an object with the methods of :class:`Tracker`.

    Args:
        tracker: the object.
    """

    def __init__(self, tracker: Tracker):
        super().__init__()
        self.tracker = tracker
        self._final: dict[str, float] = {}

    @property
    def state_key(self) -> str:
        """Class of the object; the hook has no state."""
        return f"tracker {type(self.tracker).__name__}"

    def open(self, trainer: Engine) -> None:
        """Start the tracker."""
        self._final = {}
        self.tracker.start(self.settings(trainer), trainer.workspace, trainer.step)

    def write(self, trainer: Engine, values: dict[str, Any]) -> None:
        """Pass on the values."""
        self.tracker.log(values, trainer.step)

    def write_final(self, trainer: Engine, values: dict[str, float]) -> None:
        """Keep the final metrics for ``finish``, which follows at once."""
        self._final = values

    def close(self, trainer: Engine, error: BaseException | None) -> None:
        """Finish the tracker."""
        self.tracker.finish(self._final, error)
