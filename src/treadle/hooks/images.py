"""ImageFileLoggerHook: logged images as files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle import distributed
from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked
from treadle.hooks.files import in_workspace, next_free
from treadle.hooks.tracking import Guard
from treadle.hooks.values import as_image, require
from treadle.nested import flatten_nested_dict

if TYPE_CHECKING:
    from treadle.engine import Engine


class ImageFileLoggerHook(BaseHook):
    """Hook that writes images of ``trainer.log_images`` to ``<path>/<step>/<key path>.png``, on rank 0.

    Nested keys become folders, and characters outside ``[A-Za-z0-9._-]`` become ``_``. Values are PIL images, uint8
    arrays (H, W, 3) or tensors (C, H, W).

    Args:
        interval: steps between writes, >= 1.
        path: folder; relative to the trainer's workspace.
        max_images: maximal number of images per call; None writes all.
        image_format: file extension, which determines Pillow's format, or a function that returns it for a key such as
            ``("mesh", "left")``; JPEG drops alpha channels.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> hook = ImageFileLoggerHook(interval=100, max_images=8)
    """

    writes = True

    @checked
    def __init__(
        self,
        interval: int = 1,
        path: str | Path = "images",
        max_images: int | None = None,
        *,
        image_format: str | Callable[[tuple[str, ...]], str] = "png",
    ):
        check_least(1, interval=interval)
        check_least(0, max_images=max_images)
        self.interval = interval
        self.path = Path(path)
        self.max_images = max_images
        self.image_format = image_format
        self._guard = Guard()

    def on_before_train(self, trainer: Engine) -> None:
        """Check folder, package and format before any work is lost; move images of an earlier run aside."""
        folder = in_workspace(trainer, self.path)
        pillow = require("PIL.Image", "ImageFileLoggerHook")
        if isinstance(self.image_format, str) and f".{self.image_format}" not in pillow.registered_extensions():
            raise ConfigError(
                "must be an ending that Pillow writes, such as 'png' or 'jpg'",
                argument="image_format",
                value=self.image_format,
            )
        if trainer.step == 0 and distributed.rank() == 0 and folder.is_dir():
            with self._guard(trainer, self, "moving the images of an earlier run"):
                _set_aside(trainer, folder)

    def on_log_images(self, trainer: Engine, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Write the images."""
        if distributed.rank() != 0 or trainer.step % self.interval != 0:
            return
        folder = in_workspace(trainer, self.path) / str(trainer.step)
        taken: set[Path] = set()
        for key, value in list(flatten_nested_dict(records).items())[: self.max_images]:
            with self._guard(trainer, self, f"writing image {'/'.join(key)!r}"):
                image = as_image(value)
                ending = self.image_format if isinstance(self.image_format, str) else self.image_format(key)
                target = _free(folder.joinpath(*(_safe(part) for part in key)), ending, taken)
                if ending in ("jpg", "jpeg") and image.mode not in ("RGB", "L"):
                    image = image.convert("RGB")
                if not dry_run:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    image.save(target)


def _set_aside(trainer: Engine, folder: Path) -> None:
    """Move folders of steps written by an earlier run into another folder."""
    steps = [path for path in folder.iterdir() if path.is_dir() and path.name.isdigit()]
    if steps:
        aside = next_free(folder)
        aside.mkdir()
        for path in steps:
            path.rename(aside / path.name)
        trainer.logger.info("images of an earlier run in %s are now in %s", folder.name, aside.name)


def _safe(part: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", part)
    return name if name.strip(".") else "_" * max(len(name), 1)  # "..", "." and "" would refer to other folders


def _free(stem: Path, ending: str, taken: set[Path]) -> Path:
    """Return ``<stem>.png``, or ``<stem>_2.png`` if another key of this call maps to the same name."""
    target, number = stem.with_name(f"{stem.name}.{ending}"), 2
    while target in taken:
        target, number = stem.with_name(f"{stem.name}_{number}.{ending}"), number + 1
    taken.add(target)
    return target
