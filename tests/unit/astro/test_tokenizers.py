"""Tokenizers: what goes in comes back as near as the codebook allows, and nothing is seen that was not fitted to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treadle.astro.scalar_tokenizer import MISSING, ScalarTokenizer
from treadle.astro.tokenizers import ImageTokenizer, SpectrumTokenizer, Standardised
from treadle.errors import ConfigError


def test_a_codebook_with_an_entry_for_each_patch_gives_the_pictures_back():
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 8, 12)).astype(np.uint8)
    tokenizer = ImageTokenizer.fit(images, 3 * 2 * 3, patch_size=4)
    tokens = tokenizer.encode(images)
    assert tokens.shape == (3, 6)
    assert len(np.unique(tokens)) == 18
    assert np.allclose(tokenizer.decode(tokens), images, atol=1e-3)


def test_what_is_masked_is_missing_and_never_a_number():
    mask = [[0, 1], [0, 0], [0, 0], [0, 0]]
    table = np.ma.masked_array([[1.0, 9999.0], [2.0, 5.0], [3.0, 6.0], [4.0, 7.0]], mask=mask)
    tokenizer = ScalarTokenizer.fit(table, ["x", "y"], 2)
    assert tokenizer.edges[1].tolist() == [5.0, 6.0, 7.0]
    assert tokenizer.encode(table)[0].tolist() == [0, MISSING]
    spectra = np.ma.masked_array(np.arange(8.0).reshape(2, 4), mask=np.eye(2, 4))
    with pytest.raises(ConfigError, match="finite"):
        SpectrumTokenizer.fit(spectra, ["a"], 2, segment=2)


@pytest.mark.parametrize("hole", [np.nan, np.inf, np.ma.masked])
def test_a_picture_with_a_hole_is_refused_and_gets_no_token(hole):
    images = np.ma.masked_array(np.random.default_rng(0).random((3, 1, 4, 4)))
    tokenizer = ImageTokenizer.fit(images, 2, patch_size=2)
    images[1, 0, 2, 3] = hole
    with pytest.raises(ConfigError, match="finite"):
        tokenizer.encode(images)
    with pytest.raises(ConfigError, match="finite"):
        ImageTokenizer.fit(images, 2, patch_size=2)


def test_patches_are_counted_row_after_row():
    images = np.zeros((1, 1, 4, 4))
    images[0, 0, :2, 2:] = 9.0
    images[0, 0, 2:, :2] = 5.0
    tokenizer = ImageTokenizer.fit(images, 3, patch_size=2)
    top_left, top_right, bottom_left, bottom_right = tokenizer.encode(images)[0]
    assert top_left == bottom_right
    means = tokenizer.patches.decode([top_left, top_right, bottom_left]).mean(axis=1)
    assert np.allclose(means, [0, 9, 5], atol=1e-5)


def test_the_nearest_entry_is_taken_also_beyond_one_block_of_rows():
    rng = np.random.default_rng(0)
    book = Standardised(rng.normal(size=(7, 3)).astype(np.float32), mean=100.0, scale=3.0)
    vectors = (100 + 3 * rng.normal(size=(9001, 3))).astype(np.float32)
    distance = np.linalg.norm(vectors[:, None] - book.restore(book.codebook), axis=-1)
    assert np.array_equal(book.encode(vectors), distance.argmin(axis=1))


def test_the_codebook_of_the_losses_has_variance_one_whatever_the_unit():
    images = np.random.default_rng(0).integers(0, 256, (20, 1, 8, 8))
    large, small = (ImageTokenizer.fit(images / unit, 32, patch_size=4) for unit in (1, 255))
    assert 0.2 < large.codebook.var() < 1.5
    assert np.allclose(large.codebook, small.codebook, atol=1e-4)


def spectra():
    return (1 + np.random.default_rng(1).random((40, 24))).astype(np.float32)


def test_every_group_has_the_codebook_of_its_own_wavelengths():
    flux = spectra()
    flux[:, 12:] += 50
    tokenizer = SpectrumTokenizer.fit(flux, ["blue", "red"], 6, segment=4)
    tokens = tokenizer.encode(flux)
    assert list(tokens) == ["blue", "red"]
    assert all(part.shape == (40, 3) for part in tokens.values())
    decoded = tokenizer.decode(tokens)
    assert np.abs(decoded - flux).max() < 1.1
    assert decoded[:, :12].max() < 3
    assert decoded[:, 12:].min() > 49


def test_one_absurd_value_does_not_take_the_codes_of_the_rest():
    flux = spectra()
    flux[0, 3] = 1e4
    tokenizer = SpectrumTokenizer.fit(flux, ["all"], 16, segment=4)
    ordinary = tokenizer.encode(flux)["all"][1:]
    assert len(np.unique(ordinary)) == 15
    decoded = tokenizer.decode(tokenizer.encode(flux))
    assert np.abs(decoded[0, :4] / flux[0, :4] - 1).max() < 0.01


def test_fitting_again_gives_the_same_bits():
    flux = spectra()
    first, again = (SpectrumTokenizer.fit(flux, ["a"], 8, segment=4, seed=3) for _ in range(2))
    assert np.array_equal(first.codebooks["a"], again.codebooks["a"])


def test_bins_are_those_of_the_own_column_and_missing_numbers_stay_missing():
    table = np.stack([np.arange(8.0), 100 * np.arange(8.0)], axis=1)
    table[5, 1] = np.nan
    tokenizer = ScalarTokenizer.fit(table, ["small", "large"], 4)
    bins = tokenizer.encode(table)
    assert bins[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert bins[5, 1] == MISSING
    decoded = tokenizer.decode(bins)
    assert decoded[:, 0].tolist() == [0.5, 0.5, 2.5, 2.5, 4.5, 4.5, 6.5, 6.5]
    assert np.array_equal(np.isnan(decoded), np.isnan(table))
    assert np.nanmax(np.abs(decoded[:, 1] - table[:, 1])) <= 100


def test_values_beyond_those_fitted_fall_into_the_end_bins():
    tokenizer = ScalarTokenizer.fit(np.arange(8.0)[:, None], ["a"], 4)
    assert tokenizer.encode([[-1e9], [1e9], [np.inf]]).ravel().tolist() == [0, 3, MISSING]


def test_centres_for_the_losses_weigh_every_column_alike():
    rng = np.random.default_rng(0)
    table = np.stack([rng.normal(20, 1, 500), rng.normal(1e4, 1e3, 500)], axis=1)
    codebook = ScalarTokenizer.fit(table, ["mag", "area"], 16).codebook
    assert codebook.dtype == np.float32
    assert np.allclose(codebook.std(axis=1), 1, atol=0.1)
    assert np.allclose(codebook.mean(axis=1), 0, atol=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ImageTokenizer.fit(np.ones((2, 8, 8)), 2), r"images of shape \(2, 8, 8\)"),
        (lambda: ImageTokenizer.fit(np.ones((2, 1, 8, 8)), 2, patch_size=3), "patch_size=3"),
        (lambda: ImageTokenizer.fit(np.ones((2, 1, 8, 8)), 2), "standard deviation 0"),
        (lambda: SpectrumTokenizer.fit(spectra(), ["a", "a"], 2), "each once"),
        (lambda: SpectrumTokenizer.fit(spectra(), ["a", "b"], 2, segment=5), "segment=5"),
        (lambda: SpectrumTokenizer.fit(spectra() * np.nan, ["a"], 2), "finite"),
        (lambda: SpectrumTokenizer.fit(spectra(), ["a"], 2, softening=0.0), "softening"),
        (lambda: ScalarTokenizer.fit([[1.0, np.nan], [2.0, np.nan]], ["a", "b"], 2), "columns b have no finite"),
        (lambda: ScalarTokenizer.fit([[1.0, 5.0], [2.0, 5.0]], ["a", "b"], 2), "column b has one value"),
        (lambda: ScalarTokenizer.fit([[1.0, 5.0]], ["a"], 2), r"shape \(1, 2\)"),
    ],
)
def test_what_makes_no_tokenizer_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_what_does_not_fit_a_tokenizer_is_refused():
    tokenizer = SpectrumTokenizer.fit(spectra(), ["a"], 4, segment=4)
    with pytest.raises(ConfigError, match="fitted to 24 points"):
        tokenizer.encode(np.ones((2, 12)))
    with pytest.raises(ConfigError, match="unknown key 'b'"):
        tokenizer.decode({"b": torch.zeros(2, 6, dtype=torch.long).numpy()})
    with pytest.raises(ConfigError, match=r"\[0, 4\)"):
        tokenizer.decode({"a": np.full((2, 6), 4)})
    with pytest.raises(ConfigError, match=r"\[0, 4\)"):
        tokenizer.decode({"a": np.full((2, 6), -1)})
