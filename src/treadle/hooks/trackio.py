"""TrackioHook: log points and images to trackio."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.errors.arguments import checked
from treadle.hooks.files import RunNotes
from treadle.hooks.tracking import TrackerHook
from treadle.hooks.values import require

if TYPE_CHECKING:
    from treadle.engine import Engine


class TrackioHook(TrackerHook):
    """trackio tracker of log points and images, on rank 0: ``trackio show --project <project>``.

    Without a Space or a server, trackio stores runs in its own local folder (``TRACKIO_DIR``). The run's name is stored
    in ``<workspace>/trackio_run_id``, from which the run is continued. A trackio run cannot be rewound: after a resume,
    steps that were already sent are not sent again. trackio writes twice a second, so a killed process may lose the
    points of its last half second. Delete the file to start another run in the same workspace.

    Args:
        project: the trackio project.
        name: the run's name; None lets trackio choose one.
        config: the run's settings; None takes those of the trainer.
        **trackio_init_kwargs: further arguments of ``trackio.init``.

    Raises:
        ImportError: when training starts, if trackio is not installed.

    Example:
        >>> hook = TrackioHook(project="digits", config={"lr": 1e-3})
    """

    @checked
    def __init__(
        self,
        project: str = "treadle",
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        **trackio_init_kwargs: Any,
    ):
        super().__init__(config)
        self.project = project
        self.name = name
        self.init_kwargs = {"embed": False, **trackio_init_kwargs}
        self._run: Any = None
        self._trackio: Any = None
        self._notes = RunNotes(None, "trackio")

    def check(self, trainer: Engine) -> None:
        """Import trackio."""
        self._trackio = require("trackio", "TrackioHook", extra="trackio")

    def open(self, trainer: Engine) -> None:
        """Start the run, or continue the stored one."""
        if trainer.workspace is None:
            trainer.logger.warning(
                "TrackioHook: without a workspace the run's name is not saved, so a resume starts a new run"
            )
        self._notes = RunNotes(trainer.workspace, "trackio")
        kept = self._notes.run_id
        arguments = {
            # trackio reserves keys with a leading underscore.
            "config": {key.lstrip("_"): value for key, value in self.settings(trainer).items()},
            "name": self.name or kept,
            "resume": "never" if kept is None else "allow",
            **self.init_kwargs,
        }
        with _standard_output_to_error():
            self._run = self._trackio.init(project=self.project, **arguments)
        name = str(self._run.name)
        self.sent_through = self._notes.last_step(name)
        self._notes.keep(name)
        self.say_what_is_kept(trainer, name, self._notes.id_file)

    def write(self, trainer: Engine, values: dict[str, Any]) -> None:
        """Send the values."""
        self._run.log(values, step=trainer.step)
        self._notes.note(str(self._run.name), trainer.step)

    def write_images(self, trainer: Engine, images: dict[str, Any]) -> None:
        """Send the images."""
        self.write(trainer, {key: self._trackio.Image(image) for key, image in images.items()})

    def write_final(self, trainer: Engine, values: dict[str, float]) -> None:
        """Send the final metrics at the last step."""
        self._run.log(values, step=trainer.step)

    def close(self, trainer: Engine, error: BaseException | None) -> None:
        """Finish the run."""
        with _standard_output_to_error():
            self._trackio.finish()


def _standard_output_to_error() -> contextlib.AbstractContextManager[Any]:
    """Redirect trackio's messages to stderr, since standard output is for results."""
    return contextlib.redirect_stdout(sys.stderr)
