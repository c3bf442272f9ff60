"""What the pictures of astronomy runs show is what the tokens and the model say."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from treadle.astro import CausalTransformerLM, load_surveys
from treadle.astro.page import _fluxes, _shown_images, _shown_spectra, _spaced, _type_text
from treadle.astro.run_config import AstroRunConfig, RepeatsConfig, TokensConfig
from treadle.astro.run_data import AstroData, prepare_data
from treadle.runs.split import DataConfig


@pytest.fixture(scope="module")
def data() -> AstroData:
    tokens = TokensConfig(v_image=4, scalar_bins=3, v_spectra=4, patch_size=16, segment=32)
    rows = DataConfig(max_rows=60, test_fraction=0.2)
    return prepare_data(AstroRunConfig(data=rows, tokens=tokens, repeats=RepeatsConfig(1, 1, 1)), None)


@pytest.fixture(scope="module")
def trainer(data: AstroData) -> SimpleNamespace:
    torch.manual_seed(0)
    vocab = data.tokenizers.vocab()
    model = CausalTransformerLM(vocab.vocab_size, vocab.n_types, 8, 1, 2, 16, 0.0, data.longest)
    return SimpleNamespace(model=model)


def test_no_sequence_is_longer_than_the_model_allows_and_one_with_everything_fits(data: AstroData) -> None:
    lengths = [len(sequence["tokens"]) for part in data.sequences.values() for sequence in part]
    # BOS, 4 patches, 16 columns, 2 segments in each of 4 groups, SEP behind each of 6 parts, EOS.
    assert max(lengths) < data.longest == 1 + 4 + 16 + 4 * 2 + 6 + 1


def test_an_epoch_passes_over_small_surveys_as_often_as_asked(data: AstroData) -> None:
    config = AstroRunConfig(
        data=DataConfig(max_rows=60, test_fraction=0.2), repeats=RepeatsConfig(3, 2, 1),
        tokens=TokensConfig(v_image=4, scalar_bins=3, v_spectra=4, patch_size=16, segment=32),
    )  # fmt: skip
    again = prepare_data(config, None)
    counts = {name: len(survey) for name, survey in data.train.items()}
    assert len(data.sequences["train"]) == sum(counts.values())
    assert len(again.sequences["train"]) == 3 * counts["xdf"] + 2 * counts["spex"] + counts["sdss"]
    assert len(again.sequences["test"]) == len(data.sequences["test"])


def test_tokens_of_sequences_become_the_spectra_that_the_tokenizer_makes_of_them(data: AstroData) -> None:
    spex, tokenizer = data.test["spex"], data.tokenizers.spectrum
    assert spex.spectra is not None
    tokens = torch.stack([sequence["tokens"] for sequence in data.tokenizers.encode(spex)])
    np.testing.assert_array_equal(_fluxes(data, tokens), tokenizer.decode(tokenizer.encode(spex.spectra)))


def test_spectra_are_shown_by_rising_type_with_draws_of_each(data: AstroData, trainer: SimpleNamespace) -> None:
    shown = _shown_spectra(data, trainer)
    assert shown.true.shape == shown.codebook.shape == (6, 256)
    assert shown.drawn.shape == (6, 64, 256)
    types = ["MLT".index(title[0]) * 10 + float(title[1:]) for title in shown.titles]
    assert types == sorted(types)
    all_spectra = load_surveys()["spex"].spectra
    assert all_spectra is not None
    assert all((row == all_spectra).all(axis=1).any() for row in shown.true)


def test_pictures_are_shown_true_through_tokens_and_expected(data: AstroData, trainer: SimpleNamespace) -> None:
    rows, titles = _shown_images(data, trainer)
    assert [picture.shape for picture in rows.values()] == [(6, 3, 32, 32)] * 3
    assert len(titles) == 6
    patches = data.tokenizers.image.patches
    low, high = patches.restore(patches.codebook).min(), patches.restore(patches.codebook).max()
    assert low <= rows["from patches before"].min() <= rows["from patches before"].max() <= high


def test_rows_are_evenly_spaced_in_value_and_unknown_ones_left_out() -> None:
    values = np.array([np.nan, *range(11)][::-1], dtype=np.float64)
    assert values[_spaced(values)].tolist() == [0, 2, 4, 6, 8, 10]
    assert len(_spaced(values[:3])) == 3


@pytest.mark.parametrize(("number", "text"), [(0.0, "M0"), (9.5, "M9.5"), (10.0, "L0"), (28.0, "T8")])
def test_types_are_written_as_they_are_read(number: float, text: str) -> None:
    assert _type_text(number) == text
