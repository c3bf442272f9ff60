"""WandbHook: log points and images to Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.errors.arguments import checked
from treadle.hooks.files import RunNotes
from treadle.hooks.tracking import TrackerHook
from treadle.hooks.values import as_image, require

if TYPE_CHECKING:
    from treadle.engine import Engine


class WandbHook(TrackerHook):
    """Weights & Biases tracker of log points and images at ``step=trainer.step``, on rank 0.

    The run's id is stored in ``<workspace>/wandb_run_id``, from which the run is continued; the environment variable
    ``WANDB_RUN_ID`` overrides the file. A wandb run cannot be rewound: after a resume, steps that it already has are
    not sent again. Delete the file to start another run in the same workspace. Arguments that are None are left out.

    Args:
        project: the wandb project.
        name: the run's name.
        config: the run's settings; None takes those of the trainer.
        **wandb_init_kwargs: further arguments of ``wandb.init``; without ``dir`` its files go to the workspace.

    Raises:
        ImportError: when training starts, if wandb is not installed.

    Example:
        >>> hook = WandbHook(project="my-project", name="experiment-1", config={"lr": 1e-3}, tags=None)
    """

    @checked
    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        **wandb_init_kwargs: Any,
    ):
        super().__init__(config)
        given = {"project": project, "name": name, **wandb_init_kwargs}
        self.init_kwargs = {key: value for key, value in given.items() if value is not None}
        self._run: Any = None
        self._wandb: Any = None
        self._notes = RunNotes(None, "wandb")

    def check(self, trainer: Engine) -> None:
        """Import wandb."""
        self._wandb = require("wandb", "WandbHook")

    def open(self, trainer: Engine) -> None:
        """Start the run, or continue the stored one."""
        self._notes = RunNotes(trainer.workspace, "wandb")
        arguments = dict(self.init_kwargs)
        if settings := self.settings(trainer):
            arguments["config"] = settings
        branches = "resume_from" in arguments or "fork_from" in arguments  # wandb then forbids resume=
        run_id = arguments.get("id") or os.environ.get("WANDB_RUN_ID") or self._notes.run_id
        if run_id is not None and not branches:
            arguments["id"] = run_id
            arguments.setdefault("resume", "allow")
        if trainer.workspace is None:
            trainer.logger.warning(
                "WandbHook: without a workspace the run id is not saved, so a resume starts a new wandb run"
            )
        else:
            trainer.workspace.mkdir(parents=True, exist_ok=True)
            if "WANDB_DIR" not in os.environ:
                arguments.setdefault("dir", str(trainer.workspace))
        self._run = self._wandb.init(**arguments)
        self.sent_through = self._last_step()
        self._notes.keep(str(self._run.id))
        self.say_what_is_kept(trainer, str(self._run.id), self._notes.id_file)

    def _last_step(self) -> int:
        """Return the last step of the run according to the server if it responded, else to this workspace."""
        next_step = getattr(self._run, "step", None)
        if getattr(self._run, "resumed", False) and isinstance(next_step, int):
            return next_step - 1
        return self._notes.last_step(str(self._run.id))

    def write(self, trainer: Engine, values: dict[str, Any]) -> None:
        """Send the values; wandb merges values of the same step."""
        self._run.log(values, step=trainer.step)
        self._notes.note(str(self._run.id), trainer.step)

    def write_images(self, trainer: Engine, images: dict[str, Any]) -> None:
        """Send the images."""
        self._run.log({key: self._wandb.Image(as_image(image)) for key, image in images.items()}, step=trainer.step)
        self._notes.note(str(self._run.id), trainer.step)

    def write_final(self, trainer: Engine, values: dict[str, float]) -> None:
        """Set the final metrics in the summary of the run."""
        self._run.summary.update(values)

    def close(self, trainer: Engine, error: BaseException | None) -> None:
        """Finish the run."""
        self._run.finish(exit_code=0 if error is None else 1)
