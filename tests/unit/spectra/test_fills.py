"""Filling in without a network: the conditional mean by its formula, and settings chosen on other rows."""

from __future__ import annotations

import numpy as np
import pytest

from treadle.spectra.fills import GaussianFill, NearestFill, PcaFill, choose_fills, masked_error

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(200, 2)) @ RNG.normal(size=(2, 7)) + 0.05 * RNG.normal(size=(200, 7)) + 3.0
TRAIN, TEST = ROWS[:160], ROWS[160:]
SEEN = RNG.random(TEST.shape) < 0.6
SEEN[0], SEEN[1] = False, True


def test_the_gaussian_is_the_regression_on_what_is_seen():
    row, mask = TEST[:1], np.array([[True, True, True, True, False, False, False]])
    design = np.c_[np.ones(len(TRAIN)), TRAIN[:, :4]]
    weights = np.linalg.lstsq(design, TRAIN[:, 4:], rcond=None)[0]
    filled = GaussianFill(TRAIN, 0.0)(row, mask)
    np.testing.assert_allclose(filled[:, 4:], np.c_[1.0, row[:, :4]] @ weights, rtol=1e-8)


@pytest.mark.parametrize("fill", [GaussianFill(TRAIN, 1e-3), PcaFill(TRAIN, 2), NearestFill(TRAIN, 3)])
def test_what_is_seen_stays_and_what_is_hidden_is_not_read(fill):
    filled = fill(TEST, SEEN)
    assert np.array_equal(filled[SEEN], TEST[SEEN])
    assert np.array_equal(fill(np.where(SEEN, TEST, np.nan), SEEN), filled)
    assert masked_error(filled, TEST, SEEN) < 0.5 * masked_error(np.broadcast_to(TRAIN.mean(0), TEST.shape), TEST, SEEN)


def test_nothing_seen_gives_the_mean():
    for fill in (GaussianFill(TRAIN, 1e-3), PcaFill(TRAIN, 2)):
        np.testing.assert_allclose(fill(TEST[:1], SEEN[:1])[0], TRAIN.mean(axis=0))


def test_each_setting_is_the_best_on_the_rows_that_it_is_chosen_on():
    chosen = choose_fills(TRAIN, TEST, SEEN)
    assert chosen["pca"].setting == 2  # the rows have two dimensions, and more only fit the noise
    for made in chosen.values():
        assert masked_error(made.fill(TEST, SEEN), TEST, SEEN) == made.error
