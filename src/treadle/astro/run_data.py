"""Data of ``treadle train astro``: three surveys with disjoint splits, and their tokens."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from treadle.astro.loader import build_loader
from treadle.astro.run_config import AstroRunConfig
from treadle.astro.sequences import move_scalars_last
from treadle.astro.survey_tokens import ScalarDropout, Sequences, SurveyTokenizers, fit_tokenizers
from treadle.astro.surveys import Survey, load_surveys
from treadle.astro.tokenizer_files import load_tokenizers
from treadle.config.sections import as_settings
from treadle.datasets.splits import split_by_group
from treadle.errors import CheckpointError
from treadle.runs.ranks import by_rank_0, shared_batches
from treadle.runs.split import DataConfig

_log = logging.getLogger("treadle.cli")

TOKENIZERS = "tokenizers.safetensors"
Surveys = dict[str, Survey]


@dataclass(frozen=True)
class AstroData:
    """Surveys by split, their tokenizers, and the token sequences of each split."""

    train: Surveys
    val: Surveys
    test: Surveys
    tokenizers: SurveyTokenizers
    sequences: dict[str, Sequences]
    """``"train"``, ``"val"`` and ``"test"``: all surveys concatenated; training surveys are repeated as configured."""

    @property
    def parts(self) -> dict[str, Surveys]:
        """The three splits by name."""
        return {"train": self.train, "val": self.val, "test": self.test}

    @property
    def longest(self) -> int:
        """Length of the longest possible sequence: that of an object with every modality."""
        (_, height, width), size = self.tokenizers.image.shape, self.tokenizers.image.patch_size
        spectrum, vocab = self.tokenizers.spectrum, self.tokenizers.vocab()
        segments: int = spectrum.points // next(iter(spectrum.codebooks.values())).shape[1]
        return 4 + height * width // size**2 + vocab.n_columns + segments + len(vocab.spectrum_groups)

    def train_loader(self, config: AstroRunConfig) -> DataLoader[Any]:
        """Return the training loader; hidden scalars and the order of modalities are redrawn each time."""
        dataset = ScalarDropout(
            self.sequences["train"], self.tokenizers.vocab(), share=config.hidden_scalars,
            scalars_last=config.scalars_last,
        )  # fmt: skip
        return _loader(dataset, config, shuffle=True)

    def loader(self, part: str, config: AstroRunConfig) -> DataLoader[Any]:
        """Return the loader of a split: every sequence once in each order used in training, with nothing hidden."""
        dataset: Any = list(self.sequences[part])
        if config.scalars_last:
            dataset += [move_scalars_last(sequence, self.tokenizers.vocab()) for sequence in self.sequences[part]]
        return _loader(dataset, config, shuffle=False)


def _loader(dataset: Any, config: AstroRunConfig, *, shuffle: bool) -> DataLoader[Any]:
    batches = shared_batches(dataset, config.training.batch_size, shuffle=shuffle, seed=config.seed)
    return build_loader(dataset, config.training, shuffle=shuffle, batch_sampler=batches.get("batch_sampler"))


def split_surveys(config: DataConfig) -> tuple[Surveys, Surveys, Surveys]:
    """Load the surveys and split the objects of each: galaxies, dwarfs, image tiles.

    Raises:
        ConfigError: a split would be empty.
    """
    parts: tuple[Surveys, Surveys, Surveys] = ({}, {}, {})
    for name, survey in load_surveys().items():
        taken = survey.take(config.rows_of(len(survey)))
        rows = split_by_group(
            taken.objects, val_fraction=config.val_fraction, test_fraction=config.test_fraction, seed=config.split_seed
        )
        for part, chosen in zip(parts, rows, strict=True):
            part[name] = taken.take(chosen)
    return parts


def prepare_data(config: AstroRunConfig, stored: Path | None) -> AstroData:
    """Split the surveys, fit the tokenizers to the training split, and encode the sequences.

    Args:
        config: the settings.
        stored: tokenizers of the resumed run; None fits new ones.

    Raises:
        ConfigError: a split would be empty, or the sizes do not fit the data.
        ImportError: scikit-learn is not installed.
    """
    train, val, test = split_surveys(config.data)
    tokenizers = by_rank_0(lambda: _fit(config, train) if stored is None else _load_or_fit(stored, config, train))
    repeats = vars(config.repeats)
    sequences = {
        "train": [s for name, survey in train.items() for s in tokenizers.encode(survey) * repeats[name]],
        "val": [s for survey in val.values() for s in tokenizers.encode(survey)],
        "test": [s for survey in test.values() for s in tokenizers.encode(survey)],
    }
    return AstroData(train, val, test, tokenizers, sequences)


def _load_or_fit(path: Path, config: AstroRunConfig, train: Surveys) -> SurveyTokenizers:
    try:
        return load_tokenizers(path)
    except CheckpointError as error:
        _log.warning(
            "%s; they are fitted again, which gives the same ones if numpy and scikit-learn are those of the run",
            error,
        )
        return _fit(config, train)


def _fit(config: AstroRunConfig, train: Surveys) -> SurveyTokenizers:
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    # With one thread the order of summation is fixed, so that a restarted run has the same codebooks.
    with threadpool_limits(1), as_settings("tokens", vars(config.tokens)):
        return fit_tokenizers(list(train.values()), **vars(config.tokens), seed=config.seed)
