"""ImageFileLoggerHook: logged images as PNG files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle import distributed
from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.hooks.files import in_workspace
from treadle.hooks.tracking import Guard
from treadle.hooks.values import as_image, require
from treadle.nested import flatten_nested_dict

if TYPE_CHECKING:
    from treadle.engine import Engine


class ImageFileLoggerHook(BaseHook):
    """Writes the images of ``trainer.log_images`` as ``<path>/<step>/<key path>.png``, on rank 0.

    Nested keys become folders, and characters outside ``[A-Za-z0-9._-]`` become ``_``. Values are PIL images; uint8
    arrays (H, W, 3) and tensors (C, H, W) are taken too.

    Args:
        interval: only steps divisible by this are written, >= 1.
        path: folder; relative to the trainer's workspace.
        max_images: the most images of one call; None writes all.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> hook = ImageFileLoggerHook(interval=100, max_images=8)
    """

    writes = True

    def __init__(self, interval: int = 1, path: str | Path = "images", max_images: int | None = None):
        if interval < 1:
            raise ConfigError("must be at least 1 step", argument="interval", value=interval)
        if max_images is not None and max_images < 0:
            raise ConfigError("must be >= 0, or None to write all", argument="max_images", value=max_images)
        self.interval = interval
        self.path = Path(path)
        self.max_images = max_images
        self._guard = Guard()

    def on_before_train(self, trainer: Engine) -> None:
        """Checks the folder and the package before any work is lost."""
        in_workspace(trainer, self.path)
        require("PIL.Image", "ImageFileLoggerHook")

    def on_log_images(self, trainer: Engine, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Writes the images."""
        if distributed.rank() != 0 or trainer.step % self.interval != 0:
            return
        folder = in_workspace(trainer, self.path) / str(trainer.step)
        taken: set[Path] = set()
        for key, value in list(flatten_nested_dict(records).items())[: self.max_images]:
            with self._guard(trainer, self, f"writing image {'/'.join(key)!r}"):
                image = as_image(value)
                target = _free(folder.joinpath(*(_safe(part) for part in key)), taken)
                if not dry_run:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    image.save(target)


def _safe(part: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", part)
    return name if name.strip(".") else "_" * max(len(name), 1)  # "..", "." and "" would name other folders


def _free(stem: Path, taken: set[Path]) -> Path:
    """Returns ``<stem>.png``, or ``<stem>_2.png`` when another key of this call has become the same name."""
    target, number = stem.with_name(f"{stem.name}.png"), 2
    while target in taken:
        target, number = stem.with_name(f"{stem.name}_{number}.png"), number + 1
    taken.add(target)
    return target
