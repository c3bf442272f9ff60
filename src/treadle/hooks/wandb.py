"""WandbHook: log points and images to Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.hooks.tracking import TrackerHook, as_image, require

if TYPE_CHECKING:
    from pathlib import Path

    from treadle.engine import Engine

_ID_FILE = "wandb_run_id"
_STEP_FILE = "wandb_last_step"


class WandbHook(TrackerHook):
    """Sends log points and images at ``step=trainer.step``, on rank 0.

    The run's id is kept in ``<workspace>/wandb_run_id`` and the run is continued from there; ``WANDB_RUN_ID`` in the
    environment wins over the file. A wandb run cannot go back: after a resume, steps that it has already are not sent
    again. Delete the file to start another run in the same workspace. Arguments that are None are left out.

    Args:
        project: the wandb project.
        name: the run's name.
        config: the run's settings.
        **wandb_init_kwargs: further arguments of ``wandb.init``; without ``dir`` its files go to the workspace.

    Raises:
        ImportError: when training starts, if wandb is not installed.

    Example:
        >>> hook = WandbHook(project="my-project", name="experiment-1", config={"lr": 1e-3}, tags=None)
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        **wandb_init_kwargs: Any,
    ):
        super().__init__()
        given = {"project": project, "name": name, "config": config, **wandb_init_kwargs}
        self.init_kwargs = {key: value for key, value in given.items() if value is not None}
        self._run: Any = None
        self._wandb: Any = None
        self._step_file: Path | None = None

    def check(self, trainer: Engine) -> None:
        """Imports wandb."""
        self._wandb = require("wandb", "WandbHook")

    def open(self, trainer: Engine) -> None:
        """Starts the run, or continues the one whose id is known."""
        workspace = trainer.workspace
        arguments = dict(self.init_kwargs)
        branches = "resume_from" in arguments or "fork_from" in arguments  # wandb then forbids resume=
        run_id = arguments.get("id") or os.environ.get("WANDB_RUN_ID") or _first_word(workspace, _ID_FILE)
        if run_id is not None and not branches:
            arguments["id"] = run_id
            arguments.setdefault("resume", "allow")
        if workspace is None:
            trainer.logger.warning("WandbHook: without a workspace the run id is not kept; a resume is a new wandb run")
        else:
            workspace.mkdir(parents=True, exist_ok=True)
            if "WANDB_DIR" not in os.environ:
                arguments.setdefault("dir", str(workspace))
        self._run = self._wandb.init(**arguments)
        self.sent_through = self._last_step(trainer)
        if workspace is not None:
            self._step_file = workspace / _STEP_FILE
            (workspace / _ID_FILE).write_text(f"{self._run.id}\n", encoding="utf-8")
        self.say_what_is_kept(trainer, str(self._run.id), _ID_FILE)

    def _last_step(self, trainer: Engine) -> int:
        """The last step the run has: by the server where it answered, else by what this workspace noted."""
        next_step = getattr(self._run, "step", None)
        if getattr(self._run, "resumed", False) and isinstance(next_step, int):
            return next_step - 1
        noted = _words(trainer.workspace, _STEP_FILE)
        if len(noted) == 2 and noted[0] == str(self._run.id) and noted[1].isdigit():
            return int(noted[1])
        return -1

    def write(self, trainer: Engine, values: dict[str, Any]) -> None:
        """Sends the values; wandb joins what has the same step."""
        self._run.log(values, step=trainer.step)
        self._note(trainer.step)

    def write_images(self, trainer: Engine, images: dict[str, Any]) -> None:
        """Sends the images."""
        self._run.log({key: self._wandb.Image(as_image(image)) for key, image in images.items()}, step=trainer.step)
        self._note(trainer.step)

    def _note(self, step: int) -> None:
        if self._step_file is not None:
            # Replaced, so that a killed process leaves the old note or the new one; not synced, at each log point.
            temporary = self._step_file.with_name(f".{_STEP_FILE}.tmp")
            temporary.write_text(f"{self._run.id} {step}\n", encoding="utf-8")
            os.replace(temporary, self._step_file)

    def close(self, trainer: Engine, error: BaseException | None) -> None:
        """Finishes the run."""
        self._run.finish(exit_code=0 if error is None else 1)


def _words(workspace: Path | None, name: str) -> list[str]:
    if workspace is None or not (workspace / name).is_file():
        return []
    return (workspace / name).read_text(encoding="utf-8").split()


def _first_word(workspace: Path | None, name: str) -> str | None:
    return next(iter(_words(workspace, name)), None)
