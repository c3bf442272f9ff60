"""Filling in without a network: the conditional mean by its formula, and settings chosen on other rows."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern

from treadle.errors import ConfigError
from treadle.regression import Setting
from treadle.spectra.fills import GaussianFill, KernelFill, NearestFill, PcaFill, choose_fills, masked_error

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(200, 2)) @ RNG.normal(size=(2, 7)) + 0.05 * RNG.normal(size=(200, 7)) + 3.0
TRAIN, TEST = ROWS[:160], ROWS[160:]
KERNEL = KernelFill(TRAIN, GaussianFill(TRAIN, 1e-3), Setting("Matern 3/2", 0.3, 0.01))
SEEN = RNG.random(TEST.shape) < 0.6
SEEN[0], SEEN[1] = False, True


def test_the_gaussian_is_the_regression_on_what_is_seen():
    row, mask = TEST[:1], np.array([[True, True, True, True, False, False, False]])
    design = np.c_[np.ones(len(TRAIN)), TRAIN[:, :4]]
    weights = np.linalg.lstsq(design, TRAIN[:, 4:], rcond=None)[0]
    filled = GaussianFill(TRAIN, 0.0)(row, mask)
    np.testing.assert_allclose(filled[:, 4:], np.c_[1.0, row[:, :4]] @ weights, rtol=1e-8)


@pytest.mark.parametrize("fill", [GaussianFill(TRAIN, 1e-3), PcaFill(TRAIN, 2), NearestFill(TRAIN, 3), KERNEL])
def test_what_is_seen_stays_and_what_is_hidden_is_not_read(fill):
    filled = fill(TEST, SEEN)
    assert np.array_equal(filled[SEEN], TEST[SEEN])
    assert np.array_equal(fill(np.where(SEEN, TEST, np.nan), SEEN), filled)
    assert masked_error(filled, TEST, SEEN) < 0.5 * masked_error(np.broadcast_to(TRAIN.mean(0), TEST.shape), TEST, SEEN)


def test_rows_of_one_mask_are_filled_together_as_alone():
    masks = np.repeat([[True] * 4 + [False] * 3, [False] * 2 + [True] * 5], 20, axis=0)[np.tile([0, 39, 1], 13)]
    for fill in (GaussianFill(TRAIN, 1e-3), KERNEL):
        alone = np.concatenate([fill(TEST[i : i + 1], masks[i : i + 1]) for i in range(len(masks))])
        np.testing.assert_allclose(fill(TEST[: len(masks)], masks), alone, rtol=1e-9)


def test_kernels_add_the_process_of_what_the_gaussian_leaves_over():
    bent = np.c_[TRAIN, TRAIN[:, :1] ** 2]
    gaussian, mask = GaussianFill(bent, 1e-3), np.array([True] * 5 + [False] * 3)
    filled = KernelFill(bent[20:], gaussian, Setting("Matern 3/2", 0.3, 0.01))(bent[:20], np.tile(mask, (20, 1)))
    before = gaussian(bent, np.tile(mask, (len(bent), 1)))
    scaled = (bent[:, mask] - bent.mean(axis=0)[mask]) / bent[20:, mask].std(axis=0)
    process = GaussianProcessRegressor(Matern((2 * 5 / 0.3) ** 0.5, "fixed", nu=1.5), alpha=0.01, optimizer=None)
    left = process.fit(scaled[20:], (bent - before)[20:, ~mask]).predict(scaled[:20])
    np.testing.assert_allclose(filled[:, ~mask], before[:20, ~mask] + left, rtol=1e-7)
    assert masked_error(filled, bent[:20], mask[None].repeat(20, 0)) < 0.6 * masked_error(
        before[:20], bent[:20], mask[None].repeat(20, 0)
    )


def test_nothing_seen_gives_the_mean():
    for fill in (GaussianFill(TRAIN, 1e-3), PcaFill(TRAIN, 2), KERNEL):
        np.testing.assert_allclose(fill(TEST[:1], SEEN[:1])[0], TRAIN.mean(axis=0))


def test_each_setting_is_the_best_on_the_rows_that_it_is_chosen_on():
    chosen = choose_fills(TRAIN, TEST, SEEN)
    assert chosen["pca"].setting == 2  # the rows have two dimensions, and more only fit the noise
    for made in chosen.values():
        assert masked_error(made.fill(TEST, SEEN), TEST, SEEN) == made.error


@pytest.mark.parametrize(
    "make",
    [lambda rows: GaussianFill(rows, 0.1), lambda rows: PcaFill(rows, 1), lambda rows: NearestFill(rows, 1),
     lambda rows: KernelFill(rows, KERNEL.gaussian, KERNEL.setting)],
)  # fmt: skip
def test_training_rows_with_gaps_are_refused(make):
    with pytest.raises(ConfigError, match="train: 2 of 160 rows are not finite"):
        make(np.where(np.arange(160)[:, None] % 100 == 3, np.nan, TRAIN))
