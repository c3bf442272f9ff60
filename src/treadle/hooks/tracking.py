"""Base of trackers: rank 0 only, no duplicate points, one transfer per log point, errors never end training."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treadle import distributed
from treadle.engine.best import BestRule
from treadle.engine.hook import BaseHook
from treadle.hooks.values import as_image, flat_settings, flat_values, plain_settings
from treadle.nested import flatten_nested_dict

if TYPE_CHECKING:
    from treadle.engine import Engine


_NO_METRICS = {"lr", "time", "data_time", "step_time", "max_memory"}
"""Names of log points that describe the progress of a run rather than its quality."""


def epoch_records(trainer: Engine) -> list[dict[str, Any]]:
    """Return the records of completed epochs, one per epoch; empty for step-based runs."""
    for part in trainer.state_parts:
        records = getattr(part, "history", None)
        if isinstance(records, list):
            return records
    return []


def _best_record(trainer: Engine) -> dict[str, Any]:
    """Return the numbers of the best epoch's record, or of the last one if there is no best."""
    records = epoch_records(trainer)
    rules = [getattr(part, "best", None) for part in trainer.state_parts]
    best = [rule.best_epoch for rule in rules if isinstance(rule, BestRule) and rule.best_epoch is not None]
    chosen = [record for record in records if record.get("epoch") in best] or records[-1:]
    return {key: value for record in chosen for key, value in record.items() if isinstance(value, (int, float))}


def _is_metric(key: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and not _NO_METRICS & set(key.split("/"))


class Guard:
    """Guard that keeps a tracker's errors from ending the run: the first is logged as a warning, others as debug."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    @contextlib.contextmanager
    def __call__(self, trainer: Engine, who: BaseHook, doing: str) -> Iterator[None]:
        """Run a block and log its exception instead of raising it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (a full disk or a lost network must not cost the training)
            message = f"{who.state_key}: {doing} failed: {type(error).__name__}: {error}"
            self.warn_once(trainer, "failure", f"{message}. Training continues; later failures are logged as debug")

    def warn_once(self, trainer: Engine, topic: str, message: str) -> None:
        """Log the first message on a topic as a warning and later ones as debug."""
        trainer.logger.log(logging.DEBUG if topic in self._said else logging.WARNING, "%s", message)
        self._said.add(topic)


@contextlib.contextmanager
def random_numbers_untouched() -> Iterator[None]:
    """Restore the global generators: MLflow draws a run's name from one, which would change the data order."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)


class TrackerHook(BaseHook):
    """Base class of trackers of log points and images, at ``trainer.step``.

    A tracker implements :meth:`open`, :meth:`write`, :meth:`close`, and optionally :meth:`write_images` and
    :meth:`write_final`. It stores in :attr:`sent_through` the last step that an earlier process may have sent, and
    implements :meth:`was_sent` for points up to there, so that no point is sent twice after a resume.

    Attributes:
        config: settings of the run to send; None takes those of the trainer.
        held: whether the run stays open after successful training, until :meth:`release`.
    """

    writes = True

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = None if config is None else dict(config)
        self.held = False
        self.guard = Guard()
        self.sent_through = -1
        self._open = False
        self._failed = False
        self._last: dict[str, Any] = {}

    # -- to be implemented by the tracker -----------------------------------------------------------------------------

    def check(self, trainer: Engine) -> None:
        """Import the package and check the settings, on every rank, so that errors are raised on all."""

    def open(self, trainer: Engine) -> None:
        """Start or continue the run, on rank 0; after an error here training continues without this tracker."""

    def was_sent(self, key: str, step: int) -> bool:
        """Return whether an earlier process sent this key at this step; called for steps up to :attr:`sent_through`."""
        return True

    def write(self, trainer: Engine, values: dict[str, Any]) -> None:
        """Send flat values at ``trainer.step``."""

    def write_images(self, trainer: Engine, images: dict[str, Any]) -> None:
        """Send PIL images by flat key at ``trainer.step``."""

    def write_final(self, trainer: Engine, values: dict[str, float]) -> None:
        """Send the final metrics of a successful run, under ``final/...``."""

    def close(self, trainer: Engine, error: BaseException | None) -> None:
        """End the run."""

    # -- events ---------------------------------------------------------------------------------------------------

    def on_before_train(self, trainer: Engine) -> None:
        """Open the tracker on rank 0."""
        self.check(trainer)
        if distributed.rank() != 0 or self._open:
            return
        self._failed = True
        with self.guard(trainer, self, "starting"), random_numbers_untouched():
            self.open(trainer)
            self._open, self._failed = True, False

    def on_log(self, trainer: Engine, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Send the records."""
        if not self._may_write(trainer):
            return
        with self.guard(trainer, self, f"logging step {trainer.step}"), random_numbers_untouched():
            flat = flat_values(records)
            self._last.update(flat)
            values = self._unsent(trainer, flat)
            if values and not dry_run:
                self.write(trainer, values)

    def on_log_images(self, trainer: Engine, records: Mapping[str, Any], dry_run: bool = False) -> None:
        """Send the images."""
        if not self._may_write(trainer):
            return
        with self.guard(trainer, self, f"logging images at step {trainer.step}"), random_numbers_untouched():
            flat = {"/".join(path): image for path, image in flatten_nested_dict(records).items()}
            images = {key: as_image(image) for key, image in self._unsent(trainer, flat).items()}
            if images and not dry_run:
                self.write_images(trainer, images)

    def on_close(self, trainer: Engine, error: BaseException | None = None) -> None:
        """Close the tracker, also after an error; a held run stays open unless there was one."""
        if self._open and (error is not None or not self.held):
            self.release(trainer, {}, error)

    def release(self, trainer: Engine, metrics: Mapping[str, Any], error: BaseException | None = None) -> None:
        """End an open run.

        Args:
            trainer: the engine.
            metrics: metrics measured after training, such as on a test set, to add to the final ones.
            error: error that ended the run, if any; then there are no final metrics.
        """
        if not self._open:
            return
        self._open = False
        if error is None:
            with self.guard(trainer, self, "writing the final metrics"), random_numbers_untouched():
                final = {**(_best_record(trainer) or self._last), **flat_settings(metrics)}
                numbers = {key: float(value) for key, value in final.items() if _is_metric(key, value)}
                if numbers:
                    self.write_final(trainer, {f"final/{key}": value for key, value in numbers.items()})
        with self.guard(trainer, self, "closing"), random_numbers_untouched():
            self.close(trainer, error)

    # -- helpers --------------------------------------------------------------------------------------------------

    def settings(self, trainer: Engine) -> dict[str, Any]:
        """Return the settings to send with the run, as nested plain values."""
        return plain_settings(trainer.config if self.config is None else self.config)

    def _may_write(self, trainer: Engine) -> bool:
        if distributed.rank() == 0 and not self._open and not self._failed:
            self.guard.warn_once(
                trainer, "closed", f"{self.state_key}: records logged outside of training are not sent"
            )
        return self._open

    def _unsent(self, trainer: Engine, values: dict[str, Any]) -> dict[str, Any]:
        if trainer.step > self.sent_through:
            return values
        return {key: value for key, value in values.items() if not self.was_sent(key, trainer.step)}

    def say_what_is_kept(self, trainer: Engine, run_id: str, id_file: str) -> None:
        """Log that a run that cannot be rewound keeps its points; a warning for fresh runs."""
        if self.sent_through > trainer.step:
            trainer.logger.log(
                logging.WARNING if trainer.step == 0 else logging.INFO,
                "%s: run %s has points up to step %d, which are not sent again. Delete %s in the workspace to start a "
                "new run",
                self.state_key, run_id, self.sent_through, id_file,
            )  # fmt: skip

    def only_numbers(self, trainer: Engine, values: dict[str, Any]) -> dict[str, float]:
        """Return the values that are numbers, and log the others once."""
        numbers = {key: value for key, value in values.items() if isinstance(value, (bool, int, float))}
        self.name_skipped(trainer, [key for key in values if key not in numbers])
        return {key: float(value) for key, value in numbers.items()}

    def name_skipped(self, trainer: Engine, keys: list[str]) -> None:
        """Log once which values this tracker does not support."""
        if keys:
            self.guard.warn_once(
                trainer, "skipped", f"{self.state_key}: not logged, because it does not accept these values: {keys}"
            )
