"""TensorBoardHook: log points and images as TensorBoard events."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.errors.arguments import checked
from treadle.hooks.files import in_workspace
from treadle.hooks.tracking import TrackerHook
from treadle.hooks.values import flat_settings, require

if TYPE_CHECKING:
    from treadle.engine import Engine


class TensorBoardHook(TrackerHook):
    """TensorBoard tracker of scalars and images, on rank 0: ``tensorboard --logdir <workspace>/tensorboard``.

    A resumed run makes TensorBoard drop the points after its step, so curves have no duplicates. A fresh run in a used
    folder hides the older curves. Settings and final metrics are in the tab HPARAMS.

    Args:
        path: folder; relative to the trainer's workspace.
        **writer_kwargs: further arguments of ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        ImportError: when training starts, if tensorboard is not installed.

    Example:
        >>> hook = TensorBoardHook("tensorboard")
    """

    @checked
    def __init__(self, path: str | Path = "tensorboard", **writer_kwargs: Any):
        super().__init__()
        self.path = Path(path)
        self.writer_kwargs = writer_kwargs
        self._writer: Any = None
        self._folder = self.path
        self._last_tags: set[str] | None = None

    def check(self, trainer: Engine) -> None:
        """Check the path and import tensorboard."""
        self._folder = in_workspace(trainer, self.path)
        require("torch.utils.tensorboard", "TensorBoardHook")

    def open(self, trainer: Engine) -> None:
        """Open an event file that purges points after the current step."""
        step = trainer.step
        # Points at the purge step itself are dropped, and those of the resumed step were written before its checkpoint.
        arguments = {"purge_step": step + 1 if step else 0, **self.writer_kwargs}
        writer = require("torch.utils.tensorboard", "TensorBoardHook").SummaryWriter
        self._writer = writer(log_dir=str(self._folder), **arguments)
        self.sent_through = step if step else -1
        self._last_tags = None

    def was_sent(self, key: str, step: int) -> bool:
        """Check the files; only needed if an epoch ended at the resumed step."""
        if self._last_tags is None:
            self._last_tags = _tags_at(self._folder, step)
        return key in self._last_tags

    def write(self, trainer: Engine, values: dict[str, Any]) -> None:
        """Write and flush the scalars, so that a killed process loses none."""
        for key, value in self.only_numbers(trainer, values).items():
            self._writer.add_scalar(key, value, trainer.step)
        self._writer.flush()

    def write_images(self, trainer: Engine, images: dict[str, Any]) -> None:
        """Write the images."""
        for key, image in images.items():
            self._writer.add_image(key, np.array(image.convert("RGB")), trainer.step, dataformats="HWC")
        self._writer.flush()

    def write_final(self, trainer: Engine, values: dict[str, float]) -> None:
        """Write the final metrics as scalars, and with the settings as a row of HPARAMS."""
        settings = {key: value for key, value in flat_settings(self.settings(trainer)).items() if value is not None}
        hparams = require("torch.utils.tensorboard.summary", "TensorBoardHook").hparams
        for summary in hparams(settings, dict.fromkeys(values)):
            self._writer.file_writer.add_summary(summary)
        for key, value in values.items():
            self._writer.add_scalar(key, value, trainer.step)

    def close(self, trainer: Engine, error: BaseException | None) -> None:
        """Close the event file."""
        self._writer.close()


def _tags_at(folder: Path, step: int) -> set[str]:
    module = "tensorboard.backend.event_processing.event_accumulator"
    reader = require(module, "TensorBoardHook").EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    reader.Reload()
    tags = reader.Tags()
    scalars = {tag for tag in tags["scalars"] if any(event.step == step for event in reader.Scalars(tag))}
    return scalars | {tag for tag in tags["images"] if any(event.step == step for event in reader.Images(tag))}
