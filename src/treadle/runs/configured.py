"""Evaluation of finished runs of configuration files, rebuilt from ``run.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treadle.builder import build_trainer
from treadle.device import get_device
from treadle.errors import ConfigError
from treadle.faces.step import BaseTrainer
from treadle.runs.folder import run_folder_of
from treadle.runs.pack import Evaluation, Opened, Pack, Predictions, Run, predicted_arrays
from treadle.runs.record import recorded_config

ConfiguredOpened = Opened[Any, None, Any]


class ConfiguredRuns(Pack[Any, None, Any]):
    """Pack-like access to runs of configuration files, whose trainer brings its own data; not a command.

    Example:
        >>> ConfiguredRuns().default_split("")
        'test'
    """

    name = "mini"
    splits = ()

    @contextmanager
    def open(
        self, path: Path, tree: Mapping[str, Any], *, device: str | None, messages: Any
    ) -> Iterator[ConfiguredOpened]:
        """Yield a run with its trainer, which loads the weights on first use; the run folder is only read.

        Raises:
            ConfigError: the run has no record of its configuration.
        """
        home = run_folder_of(path)
        found = recorded_config(home, int(tree["global_step"]))
        if found is None:
            raise ConfigError(
                f"has no run.json, which `treadle train FILE` writes: open it in Python with "
                f"treadle.open_run({str(home)!r}, trainer), the trainer as your script makes it, or load the weights "
                f"into your own model with treadle.load_weights({str(path)!r})",
                argument="RUN",
                value=str(home),
            )
        config, folder = found
        if device is not None:
            config["trainer"]["device"] = device
        trainer = build_trainer(config, folder=folder)
        run = Run(config, home, get_device(device), messages, home=home, trains=False)
        yield Opened(run, None, trainer, path, tree)

    def evaluate(self, opened: ConfiguredOpened, split: str, *, batch_size: int | None, num_workers: int) -> Evaluation:
        """Return the means over ``build_eval_data_loader()``.

        Raises:
            ConfigError: the trainer has no such method, or a batch size is given.
        """
        trainer = self._trainer_of(opened, ("build_eval_data_loader",), batch_size)
        return Evaluation(trainer.evaluate(trainer.build_eval_data_loader()))

    def predict(self, opened: ConfiguredOpened, split: str, *, batch_size: int | None, **options: Any) -> Predictions:
        """Return the outputs of ``predict_step(input)`` over ``build_predict_data_loader()``, concatenated, by name.

        Raises:
            ConfigError: the trainer lacks one of the methods, or a batch size is given.
        """
        trainer = self._trainer_of(opened, ("predict_step", "build_predict_data_loader"), batch_size)
        return Predictions(predicted_arrays(trainer, trainer.build_predict_data_loader()))

    def _trainer_of(self, opened: ConfiguredOpened, needed: tuple[str, ...], batch_size: int | None) -> Any:
        """Return the trainer with the scored weights in its model."""
        if batch_size is not None:
            raise ConfigError(
                f"--batch-size {batch_size}: the batches are those of the trainer's own data loader; set it there"
            )
        trainer = opened.trainer
        missing = [name for name in needed if not hasattr(trainer, name)]
        if missing or not isinstance(trainer, BaseTrainer):
            lacks = " and ".join(f"{name}()" for name in missing) or "build_model()"
            raise ConfigError(
                f"{type(trainer).__name__}: has no {lacks}; add it to the trainer, which is rebuilt for this"
            )
        self.load(opened.run, trainer, opened.path, opened.tree)
        return trainer
