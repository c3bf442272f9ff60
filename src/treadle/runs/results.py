"""Data passed between the stages of a pack: opened run, metrics, predictions, results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from treadle.runs.report import Picture, Table
from treadle.runs.run import Run

Config = TypeVar("Config")
Data = TypeVar("Data")
Trainer = TypeVar("Trainer")


@dataclass(frozen=True)
class Opened(Generic[Config, Data, Trainer]):
    """Run opened for evaluation: rebuilt from its folder, with the weights of one checkpoint.

    Attributes:
        run: the run, whose ``home`` is its folder.
        data: from :meth:`Pack.prepare`.
        trainer: from :meth:`Pack.build`, with the weights in its model.
        path: the checkpoint.
        tree: the content of the checkpoint.
    """

    run: Run[Config]
    data: Data
    trainer: Trainer
    path: Path
    tree: Mapping[str, Any]

    @property
    def home(self) -> Path:
        """The folder of the run."""
        assert self.run.home is not None
        return self.run.home


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a split.

    Attributes:
        metrics: by name.
        counts: the numbers of evaluated items, such as ``{"graphs": 12}``.
        about: strings shown before the split's name, such as the data set.
        more: further values for ``eval_results_SPLIT.json``.
        device: the device used.
        tables: further tables.
        compared: a file with the run's own results of this split, and whether these are equal to the bit; None if there
            are none.
    """

    metrics: Mapping[str, Any]
    counts: Mapping[str, int] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None
    tables: Sequence[Table] = ()
    compared: tuple[Path, bool] | None = None

    def as_values(self) -> dict[str, Any]:
        """Return the evaluation as plain values, with ``compared`` as ``equal_to_<name of the file>``."""
        equal = {} if self.compared is None else {f"equal_to_{self.compared[0].stem}": self.compared[1]}
        where = {} if self.device is None else {"device": self.device}
        return {**self.about, "metrics": self.metrics, **self.more, **self.counts, **where, **equal}


@dataclass(frozen=True)
class Predictions:
    """Predictions as arrays by name, with texts to print, if any.

    Attributes:
        arrays: by name; for a split, in the order of its samples.
        texts: text records, such as a prompt and its continuation.
    """

    arrays: Mapping[str, Any]
    texts: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class Results:
    """Results of a training.

    Attributes:
        metrics: plain values for ``metrics.json``; the version, the device and the settings are added.
        pictures: pictures for the page.
    """

    metrics: Mapping[str, Any]
    pictures: Sequence[Picture] = ()
