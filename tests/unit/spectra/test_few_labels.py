"""Types from few labels: shared draws, neighbours by hand, and who is ahead."""

from __future__ import annotations

import numpy as np
import pytest

from treadle.datasets import load_spex
from treadle.spectra.few_labels import MOST_REGRESSED, difference, few_labels, few_labels_regression
from treadle.spectra.report import _few_labels_table

X = np.random.default_rng(0).normal(size=(120, 3))
Y = X[:, 0] * 4
TRAIN, TEST = np.arange(90), np.arange(90, 120)
CURVES = few_labels({"chemomae": X[:, :1], "raw": X}, Y, TRAIN, TEST, sizes=[20, 50, 500], draws=6)


def test_sizes_end_with_all_labelled_rows():
    assert CURVES["raw"]["labels"] == [20, 50, 90]
    assert [len(draws) for draws in CURVES["raw"]["draws"].values()] == [6, 6, 1]
    assert CURVES["raw"]["standard_error"][2] == 0


def test_neighbours_are_weighted_by_their_distance():
    far = np.linalg.norm(X[TEST][:, None] - X[TRAIN][None], axis=2)
    near = np.argsort(far, axis=1)[:, :3]
    weights = 1 / np.take_along_axis(far, near, axis=1)
    predicted = (Y[TRAIN][near] * weights).sum(1) / weights.sum(1)
    assert CURVES["raw"]["mae"][2] == pytest.approx(np.abs(predicted - Y[TEST]).mean())


def test_draws_are_shared_and_no_test_row_is_labelled():
    again = few_labels({"raw": X}, Y, TRAIN, TEST, sizes=[20, 50], draws=6)
    assert again["raw"] == CURVES["raw"]
    scaled = few_labels({"twice": 2 * X}, Y, TRAIN, TEST, sizes=[20, 50], draws=6)["twice"]
    assert scaled["mae"] == pytest.approx(CURVES["raw"]["mae"])
    unknown = np.where(np.arange(120) < 90, Y, np.nan)
    with pytest.raises(ValueError, match="known for 90 training and 0 test rows"):
        few_labels({"raw": X}, unknown, TRAIN, TEST)


def test_a_regression_has_the_draws_of_the_neighbours_and_the_setting_that_left_out_rows_choose():
    curve = few_labels_regression(X, Y, TRAIN, TEST, sizes=[20, 50, 500], draws=6)
    assert curve["labels"] == [20, 50, 90]
    rows = TRAIN[np.random.default_rng(0).choice(90, 20, replace=False)]
    centre, mean = X[rows].mean(0), Y[rows].mean()
    scale = np.sqrt(((X[rows] - centre) ** 2).mean())

    def near(x, other, kernel, width):
        far = width * ((x[:, None] - other[None]) ** 2).sum(2) / (2 * 3 * scale**2)
        return {"exponential": np.exp(-np.sqrt(far)), "Gaussian": np.exp(-far),
                "Matern 3/2": (1 + np.sqrt(3 * far)) * np.exp(-np.sqrt(3 * far))}[kernel]  # fmt: skip

    def fit(kernel, width, noise, known, asked):
        among = near(X[known], X[known], kernel, width) + noise * np.eye(len(known))
        return mean + near(X[asked], X[known], kernel, width) @ np.linalg.solve(among, Y[known] - mean)

    tried = {}
    for kernel in ("exponential", "Matern 3/2", "Gaussian"):
        for width in (0.01, 0.1, 1.0):
            for noise in (0.003, 0.03, 0.3):
                off = [fit(kernel, width, noise, np.delete(rows, n), rows[[n]])[0] - Y[rows[n]] for n in range(20)]
                tried[np.mean(np.square(off))] = kernel, width, noise
    expected = np.abs(fit(*tried[min(tried)], rows, TEST) - Y[TEST]).mean()
    assert curve["draws"]["20"][0] == pytest.approx(expected)
    many = few_labels_regression(np.tile(X, (3, 1)), np.tile(Y, 3), np.arange(300), TEST + 240, sizes=[20], draws=1)
    assert many["labels"] == [20]
    assert MOST_REGRESSED < 300


def test_a_baseline_of_fewer_labels_counts_where_it_has_them():
    some = few_labels_regression(X, Y, TRAIN, TEST, sizes=[20, 50], draws=6)
    best = {
        **some,
        "labels": [20, 50],
        "mae": [0.0, 0.0],
        "standard_error": [0.1, 0.1],
        "draws": {"20": [0.0] * 6, "50": [0.0] * 6},
    }
    table = _few_labels_table({**CURVES, "regression": best})
    assert "ahead with 90 labels; behind with 20, 50 labels" in table.notes[1]
    assert table.rows[-1][3] == ""


def test_the_table_says_where_the_latent_is_ahead():
    mean, error = difference(CURVES["chemomae"], CURVES["raw"], 20)
    assert mean < -2 * error < 0
    notes = _few_labels_table(CURVES).notes
    assert "ahead with 20, 50, 90 labels" in notes[1]
    behind = _few_labels_table({"chemomae": CURVES["raw"], "raw": CURVES["chemomae"]}).notes
    assert "behind with 20, 50, 90 labels" in behind[1]


def test_colours_of_the_spectra_agree_with_the_catalogue_but_for_its_bad_rows():
    spex = load_spex()
    off = np.abs(spex.synthetic_j_minus_k - spex.j_minus_k)
    known = np.isfinite(off)
    assert np.isfinite(spex.synthetic_j_minus_k).all()
    assert np.median(off[known]) < 0.1
    assert (off[known] > 0.5).sum() == 85
