"""What trackers share: rank 0 only, no point twice, one transfer per log point, and never the end of a training."""

from __future__ import annotations

import contextlib
import importlib
import logging
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from treadle import distributed
from treadle.hooks.base import BaseHook
from treadle.means import read_scalars
from treadle.nested import flatten_nested_dict

if TYPE_CHECKING:
    from treadle.engine import Engine


def require(module: str, needed_by: str) -> Any:
    """Imports an optional module.

    Raises:
        ImportError: it is not installed; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(
            f"{needed_by} needs {module}, which cannot be imported ({error}); run: pip install 'treadle[track]'",
            name=package,
        ) from error


def flat_values(records: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens records to ``a/b`` keys and reads all their 0-d tensors, with one transfer per device.

    Example:
        >>> flat_values({"train": {"loss": torch.tensor(0.5, dtype=torch.bfloat16), "epoch": 3}, "note": "x"})
        {'train/loss': 0.5, 'train/epoch': 3, 'note': 'x'}
    """
    flat = {"/".join(path): value for path, value in flatten_nested_dict(records).items()}
    scalars = {key: value for key, value in flat.items() if isinstance(value, Tensor) and value.numel() == 1}
    flat.update(zip(scalars, read_scalars(scalars.values()).tolist(), strict=True))
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in flat.items()}


def as_image(value: Any) -> Any:
    """Returns a PIL image: of one, of an (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) uint8 array, or of a CHW tensor.

    A tensor of floats is taken to lie in [0, 1].

    Raises:
        TypeError: it is none of these.
    """
    if hasattr(value, "save") and hasattr(value, "size"):
        return value
    pixels = _chw_pixels(value) if isinstance(value, Tensor) else value
    if isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8:
        if pixels.ndim == 3 and pixels.shape[2] == 1:
            pixels = pixels[:, :, 0]
        if pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)):
            return require("PIL.Image", "an image of pixels").fromarray(np.ascontiguousarray(pixels))
    shape = f" of {value.dtype} and shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise TypeError(
        f"an image is a PIL image, a uint8 array (H, W, 3) or a tensor (C, H, W); got a {type(value).__name__}{shape}"
    )


def _chw_pixels(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    if tensor.dim() not in (2, 3):
        return None
    tensor = tensor.detach()
    if tensor.is_floating_point():
        tensor = tensor.float().nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
    array: np.ndarray[Any, Any] = (tensor if tensor.dim() == 2 else tensor.permute(1, 2, 0)).cpu().numpy()
    return array


class Guard:
    """Keeps an error of a tracker from ending a training: the first one is a warning, further ones are debug lines."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    @contextlib.contextmanager
    def __call__(self, trainer: Engine, who: BaseHook, doing: str) -> Iterator[None]:
        """Runs a block and reports its exception instead of raising it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (a full disk or a lost network must not cost the training)
            message = f"{type(who).__name__}: {doing} failed: {type(error).__name__}: {error}"
            self.say_once(trainer, "failure", f"{message}. Training goes on; later failures are logged as debug")

    def say_once(self, trainer: Engine, topic: str, message: str) -> None:
        """Logs the first message on a topic as a warning and further ones as debug."""
        trainer.logger.log(logging.DEBUG if topic in self._said else logging.WARNING, "%s", message)
        self._said.add(topic)


@contextlib.contextmanager
def random_numbers_untouched() -> Iterator[None]:
    """Puts the global generators back: MLflow draws a run's name from one, and data would be shuffled otherwise."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)


class TrackerHook(BaseHook):
    """Sends log points and images somewhere, at ``trainer.step``.

    A tracker implements :meth:`open`, :meth:`write`, :meth:`close`, and where it can :meth:`write_images`. It keeps
    in :attr:`sent_through` the last step that an earlier process may have sent, and answers in :meth:`was_sent` for
    points up to there, so that after a resume no point is sent twice.
    """

    def __init__(self) -> None:
        self.guard = Guard()
        self.sent_through = -1
        self._open = False

    # -- for the tracker to implement -----------------------------------------------------------------------------

    def check(self, trainer: Engine) -> None:
        """Imports the package and checks the settings, on every rank: if this raises, it raises on all."""

    def open(self, trainer: Engine) -> None:
        """Starts or continues the run, on rank 0; an error here does end the training."""

    def was_sent(self, key: str, step: int) -> bool:
        """Whether an earlier process sent this key at this step; asked for steps up to :attr:`sent_through`."""
        return True

    def write(self, trainer: Engine, values: dict[str, Any]) -> None:
        """Sends flat values at ``trainer.step``."""

    def write_images(self, trainer: Engine, images: dict[str, Any]) -> None:
        """Sends PIL images by flat key at ``trainer.step``."""

    def close(self, trainer: Engine, error: BaseException | None) -> None:
        """Ends the run."""

    # -- events ---------------------------------------------------------------------------------------------------

    def on_before_train(self, trainer: Engine) -> None:
        """Opens the tracker on rank 0."""
        self.check(trainer)
        if distributed.rank() == 0:
            with random_numbers_untouched():
                self.open(trainer)
            self._open = True

    def on_log(self, trainer: Engine, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Sends the records."""
        if not self._may_write(trainer):
            return
        with self.guard(trainer, self, f"logging step {trainer.step}"), random_numbers_untouched():
            values = self._unsent(trainer, flat_values(records))
            if values and not dry_run:
                self.write(trainer, values)

    def on_log_images(self, trainer: Engine, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Sends the images."""
        if not self._may_write(trainer):
            return
        with self.guard(trainer, self, f"logging images at step {trainer.step}"), random_numbers_untouched():
            flat = {"/".join(path): image for path, image in flatten_nested_dict(records).items()}
            images = {key: as_image(image) for key, image in self._unsent(trainer, flat).items()}
            if images and not dry_run:
                self.write_images(trainer, images)

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Closes the tracker, after an error too."""
        if self._open:
            self._open = False
            with self.guard(trainer, self, "closing"), random_numbers_untouched():
                self.close(trainer, error)

    # -- helpers --------------------------------------------------------------------------------------------------

    def _may_write(self, trainer: Engine) -> bool:
        if distributed.rank() == 0 and not self._open:
            self.guard.say_once(
                trainer, "closed", f"{type(self).__name__}: what is logged outside of training is not sent"
            )
        return self._open

    def _unsent(self, trainer: Engine, values: dict[str, Any]) -> dict[str, Any]:
        if trainer.step > self.sent_through:
            return values
        return {key: value for key, value in values.items() if not self.was_sent(key, trainer.step)}

    def say_what_is_kept(self, trainer: Engine, run_id: str, id_file: str) -> None:
        """Says that a run which cannot go back keeps its points; for a start from nothing that is a warning."""
        if self.sent_through > trainer.step:
            trainer.logger.log(
                logging.WARNING if trainer.step == 0 else logging.INFO,
                "%s: run %s has points up to step %d, which are not sent again. Delete %s in the workspace to start a "
                "new run",
                type(self).__name__, run_id, self.sent_through, id_file,
            )  # fmt: skip

    def only_numbers(self, trainer: Engine, values: dict[str, Any]) -> dict[str, float]:
        """Returns the values that are numbers and names the others, once."""
        numbers = {key: value for key, value in values.items() if isinstance(value, (bool, int, float))}
        self.name_skipped(trainer, [key for key in values if key not in numbers])
        return {key: float(value) for key, value in numbers.items()}

    def name_skipped(self, trainer: Engine, keys: list[str]) -> None:
        """Says once which values this tracker cannot take."""
        if keys:
            self.guard.say_once(
                trainer, "skipped", f"{type(self).__name__}: not logged, because it takes no such values: {keys}"
            )
